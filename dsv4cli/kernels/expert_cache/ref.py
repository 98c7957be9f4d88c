"""The expert cache in plain PyTorch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsv4cli.kernels.expert_cache import ExpertCache


def fetch(
    chosen: torch.Tensor, cache: "ExpertCache", host: Sequence[torch.Tensor], stacks: Sequence[torch.Tensor]
) -> torch.Tensor:
    state = cache.row_of_expert, cache.expert_of_slot, cache.last_used
    row_of, expert_of, used = (tensor.tolist() for tensor in state)
    now, stays = int(cache.steps) + 1, len(row_of) - len(host[0])
    wanted = sorted(set(chosen.flatten().tolist()))
    missing = [expert for expert in wanted if row_of[expert] < 0]
    free = [slot for slot, expert in enumerate(expert_of) if expert not in wanted]
    free.sort(key=lambda slot: used[slot])
    used = [last if slot in free else now for slot, last in enumerate(used)]
    rows, staged = [max(row, 0) for row in row_of], cache.first_staging_row
    for expert in missing:
        if free:
            slot = free.pop(0)
            row_of[expert_of[slot]] = -1
            expert_of[slot], used[slot], row_of[expert] = expert, now, cache.first_slot_row + slot
            rows[expert] = row_of[expert]
        else:
            rows[expert] = staged
            staged += 1
        for source, stack in zip(host, stacks, strict=True):
            stack[rows[expert]] = source[expert - stays]
    for tensor, values in zip(state, (row_of, expert_of, used), strict=True):
        tensor.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
    cache.steps.fill_(now)
    cache.counts.add_(
        torch.tensor([len(chosen), len(wanted), len(wanted) - len(missing)], device="cpu").to(chosen.device)
    )
    return torch.tensor(rows, dtype=torch.int64, device=chosen.device)
