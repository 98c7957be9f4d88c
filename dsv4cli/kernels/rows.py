"""How a kernel that works row by row sees a tensor: its rows without a copy, and how many of them a program takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from dsv4cli.kernels.dispatch import KernelUnsupported

# a step of up to so many rows gives each the bits that it gets alone: what decodes, with drafts to verify or without
ROWS_ALIKE = 64
# the most rows of a step on a GPU that get the bits that each gets alone, where that is demanded
ROWS_EXACT = 8
# values that a program holds at once where rows are shorter, 8 for each of 128 threads
TILE = 1024
# the longest row that a program holds: 64 fp32 values for each of 256 threads
LONGEST = 16_384


# what `exact_rows` has set, in each thread for itself
_exact: ContextVar[bool] = ContextVar("exact rows", default=False)


@contextmanager
def exact_rows(exact: bool) -> Iterator[None]:
    """Inside, in this thread, Triton's kernels add up a row of a step of up to ROWS_EXACT rows as they do a row alone,
    if `exact`; else in whichever order is the fastest for that number of rows."""
    before = _exact.set(exact)
    try:
        yield
    finally:
        _exact.reset(before)


def planned_rows(count: int, like: int = ROWS_EXACT) -> int:
    """For how many rows to choose an order of sums: `count`, but inside `exact_rows` the number `like` for all few."""
    return like if _exact.get() and 0 < count <= ROWS_EXACT else count


def rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as a view [R, D] with consecutive columns; rows may lie apart, as in a slice of wider ones.

    Raises KernelUnsupported for another dtype than bf16 and fp32, and where no such view exists.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise KernelUnsupported(f"this Triton kernel takes bf16 or fp32, not {x.dtype}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelUnsupported(f"this Triton kernel takes consecutive columns, not strides {x.stride()}")
    if x.ndim == 2:
        return x
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        raise KernelUnsupported(
            f"this Triton kernel takes evenly spaced rows, not shape {tuple(x.shape)} with strides {x.stride()}"
        ) from None


class RowTiles(NamedTuple):
    """How many rows a program takes, the power of two that holds one, the warps for it."""

    rows: int
    columns: int
    warps: int


def tile(width: int) -> RowTiles:
    """For rows of this width.

    Raises KernelUnsupported for a row longer than LONGEST.
    """
    if width > LONGEST:
        raise KernelUnsupported(f"this Triton kernel takes rows of up to {LONGEST} values, not {width}")
    columns = 1 << (width - 1).bit_length()
    return RowTiles(max(1, TILE // columns), columns, 4 if columns <= 2 * TILE else 8)
