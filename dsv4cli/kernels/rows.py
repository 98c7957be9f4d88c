"""How row-wise kernels see a tensor: as rows, without a copy, and how many rows a program processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from dsv4cli.kernels.dispatch import KernelUnsupported

# most rows of a step on a CPU in which each row gets the bits that it gets alone: decode steps, with or without drafts
ROWS_ALIKE = 64
# most rows of a step on a GPU in which each row gets the bits that it gets alone, inside `exact_rows`
ROWS_EXACT = 8
# values of a program when rows are shorter: 8 for each of 128 threads
TILE = 1024
# longest row that a program can hold: 64 fp32 values for each of 256 threads
LONGEST = 16_384


# set by `exact_rows`, per thread
_exact: ContextVar[bool] = ContextVar("exact rows", default=False)


@contextmanager
def exact_rows(exact: bool) -> Iterator[None]:
    """If `exact`, Triton kernels sum each row of a step of up to ROWS_EXACT rows in the order used for a single row.

    Applies to this thread inside the block. Otherwise the order is the fastest for that number of rows.
    """
    before = _exact.set(exact)
    try:
        yield
    finally:
        _exact.reset(before)


def planned_rows(count: int, like: int = ROWS_EXACT) -> int:
    """Return the row count that decides the summation order.

    It is `count`, but `like` for up to ROWS_EXACT rows inside `exact_rows`.
    """
    return like if _exact.get() and 0 < count <= ROWS_EXACT else count


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] as a view [R, D] with consecutive columns.

    Rows may have any stride, as in a slice of wider rows. Raises KernelUnsupported for dtypes other than bf16 and fp32,
    and if no such view exists.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise KernelUnsupported(f"this Triton kernel supports bf16 and fp32, not {x.dtype}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelUnsupported(f"this Triton kernel requires consecutive columns, not strides {x.stride()}")
    if x.ndim == 2:
        return x
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        raise KernelUnsupported(
            f"this Triton kernel requires evenly spaced rows, not shape {tuple(x.shape)} with strides {x.stride()}"
        ) from None


class RowTiles(NamedTuple):
    """Rows of a program, the power of two of columns that holds a row, and the number of warps."""

    rows: int
    columns: int
    warps: int


def tile(width: int) -> RowTiles:
    """Return the tiles for rows of this width. Raises KernelUnsupported for rows longer than LONGEST."""
    if width > LONGEST:
        raise KernelUnsupported(f"this Triton kernel supports rows of up to {LONGEST} values, not {width}")
    columns = 1 << (width - 1).bit_length()
    return RowTiles(max(1, TILE // columns), columns, 4 if columns <= 2 * TILE else 8)
