"""Which experts of a layer lie on the GPU while the others wait in host memory, and how they come."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.expert_cache import ref


@dataclass(frozen=True)
class ExpertCache:
    """Where the E experts of a layer lie in stacks of matrices on the GPU; `fetch` keeps it up to date.

    The last H experts have a row in host memory each, in ascending order; the others lie in the stacks for good.

    row_of_expert: int64 [E], the row of the stacks that holds an expert, -1 for none.
    expert_of_slot: int64 [C], the expert in each slot; slot i is row first_slot_row + i.
    last_used: int64 [C], the step that used each slot last.
    steps: int64 [1], how many steps there were.
    counts: int64 [3], summed over the steps: tokens, different experts that they chose, how many of these were in the
        stacks.
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
    """Brings every chosen expert into the stacks: int64 [E], the row of each, of those that are nowhere 0.

    chosen: int64 [T, k]. host: up to nine tensors [H, ...], on a GPU pinned, which its programs read in place; stacks:
    as many [R, ...] of the same dtypes and shapes, all without gaps. A missing expert, in ascending order, takes the
    slot that was used longest ago (of equal ones the first) of those that hold no chosen expert; where there is none it
    takes a row of staging, which the next call may overwrite.

    On a GPU a launch that loads from the stacks before it waits for its inputs must not be the next one (`overlap`).
    """
    return choose(chosen, ref).fetch(chosen, cache, host, stacks)
