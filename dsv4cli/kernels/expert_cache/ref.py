"""Experts on their way to the stacks in plain PyTorch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsv4cli.kernels.expert_cache import Residency


def fetch(
    chosen: torch.Tensor, residency: "Residency", host: Sequence[torch.Tensor], stacks: Sequence[torch.Tensor]
) -> torch.Tensor:
    place, owner, used = (tensor.tolist() for tensor in (residency.place, residency.owner, residency.used))
    now, stays = int(residency.clock) + 1, len(place) - len(host[0])
    wanted = sorted(set(chosen.flatten().tolist()))
    missing = [expert for expert in wanted if place[expert] < 0]
    free = [slot for slot, expert in enumerate(owner) if expert not in wanted]
    free.sort(key=lambda slot: used[slot])
    used = [last if slot in free else now for slot, last in enumerate(used)]
    rows, staged = [max(row, 0) for row in place], residency.staging
    for expert in missing:
        if free:
            slot = free.pop(0)
            place[owner[slot]] = -1
            owner[slot], used[slot], place[expert] = expert, now, residency.first + slot
            rows[expert] = place[expert]
        else:
            rows[expert] = staged
            staged += 1
        for source, stack in zip(host, stacks, strict=True):
            stack[rows[expert]] = source[expert - stays]
    for tensor, values in ((residency.place, place), (residency.owner, owner), (residency.used, used)):
        tensor.copy_(torch.tensor(values, dtype=torch.int64))
    residency.clock.fill_(now)
    residency.counts.add_(torch.tensor([len(chosen), len(wanted), len(wanted) - len(missing)]).to(chosen.device))
    return torch.tensor(rows, dtype=torch.int64, device=chosen.device)
