"""An LRU cache of a layer's routed experts on the GPU; the other experts stay in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.expert_cache import ref


@dataclass(frozen=True)
class ExpertCache:
    """Which of a layer's E experts are in the stacked matrices on the GPU, and in which row; updated by `fetch`.

    The last H experts have one row each in host memory, in ascending order. The other experts are resident on the GPU.

    Attributes:
        row_of_expert: int64 [E], the expert's row in the stacks, or -1.
        expert_of_slot: int64 [C], the expert in each slot; slot i is row first_slot_row + i.
        last_used: int64 [C], the last step that used each slot.
        steps: int64 [1], the number of steps so far.
        counts: int64 [3], summed over the steps: tokens, distinct experts chosen, how many of these were cache hits.
        first_staging_row: the first of H - C rows for experts that get no slot.
    """

    row_of_expert: torch.Tensor
    expert_of_slot: torch.Tensor
    last_used: torch.Tensor
    steps: torch.Tensor
    counts: torch.Tensor
    first_slot_row: int
    first_staging_row: int


def fetch(
    chosen: torch.Tensor, cache: ExpertCache, host: Sequence[torch.Tensor], stacks: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Copy every missing chosen expert into the stacks, and return each expert's row: int64 [E], 0 if it has none.

    A missing expert, in ascending order, evicts the least recently used slot (the first, if several tie) that holds no
    chosen expert. If there is no such slot, it uses a staging row, which the next call may overwrite.

    Args:
        chosen: int64 [T, k].
        host: up to nine tensors [H, ...], pinned if a GPU is used: its programs read them in place.
        stacks: for each host tensor one [R, ...] of the same dtype and row shape. All tensors are contiguous.

    On a GPU, the next launch must not load from the stacks before it waits for its inputs (`overlap`).
    """
    return choose(chosen, ref).fetch(chosen, cache, host, stacks)
