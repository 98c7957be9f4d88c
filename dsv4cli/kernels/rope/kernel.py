"""Rotary position embedding in Triton: each program processes whole rows (one head of a token)."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap_of_few, wait_for_inputs
from dsv4cli.kernels.rows import rows, tile


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    given, y = rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, width = given.shape
    if width % 2:
        raise KernelUnsupported(f"the Triton rotation takes rows of whole pairs, not of {width} values")
    # torch stores a conjugate as a flag on the same memory
    turns = torch.view_as_real(rotation.conj() if rotation.is_conj() else rotation)  # [T, R, 2]
    if turns.stride()[1:] != (2, 1):
        raise KernelUnsupported(f"the Triton rotation takes consecutive turns, not strides {rotation.stride()}")
    per_program, columns, warps = tile(width)
    if count:
        _rotate[(cdiv(count, per_program),)](
            given, turns, y, count, given.stride(0), turns.stride(0), -1.0 if rotation.is_conj() else 1.0,
            count // len(rotation), rotation.shape[1], width, per_program, columns, num_warps=warps,
            **overlap_of_few(x, len(rotation)),
        )  # fmt: skip
    return y


@triton.jit
def turns_of(turn, inside, DIRECTION: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the cosine and sine of each pair of a row, fp32 [n, COLUMNS / 2]; 1 and 0 for pairs that are not rotated.

    turn: pointers [n, 1], or one for all, to a row's TURNED cosines and sines; inside: bool [n, 1], mask of valid rows.
    """
    pair = tl.arange(0, COLUMNS // 2)[None]
    turns = inside & (pair >= WIDTH // 2 - TURNED) & (pair < WIDTH // 2)
    place = turn + (pair - (WIDTH // 2 - TURNED)) * 2
    return tl.load(place, turns, other=1.0), tl.load(place + 1, turns, other=0.0) * DIRECTION


@triton.jit
def turned(values, cosine, sine, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate the last TURNED pairs of rows of WIDTH values (fp32 [n, columns]), without rounding."""
    COLUMNS: tl.constexpr = values.shape[1]
    real, imaginary = tl.split(tl.reshape(values, [values.shape[0], COLUMNS // 2, 2]))  # [n, COLUMNS / 2]
    pair = tl.arange(0, COLUMNS // 2)[None]
    turns = (pair >= WIDTH // 2 - TURNED) & (pair < WIDTH // 2)
    # select instead of multiplying by one: values that are not rotated keep the sign of zeros, and infinities
    turned_real = tl.where(turns, real * cosine - imaginary * sine, real)
    turned_imaginary = tl.where(turns, real * sine + imaginary * cosine, imaginary)
    return tl.interleave(turned_real, turned_imaginary)


@launched(do_not_specialize=["count"])
def _rotate(
    x,  # [count, WIDTH], count = T * HEADS
    turns,  # [T, TURNED, 2]: cosine, sine
    y,  # as x, contiguous
    count,
    stride,
    turn_stride,
    DIRECTION: tl.constexpr,  # sign of the angle: 1.0 or -1.0
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,  # number of rotated pairs, the trailing ones
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None]
    inside = (row < count) & (column < WIDTH)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * stride + column, inside, other=0.0).to(tl.float32)
    turn = turns + row // HEADS * turn_stride
    cosine, sine = turns_of(turn, row < count, DIRECTION, TURNED, WIDTH, COLUMNS)
    result = turned(values, cosine, sine, TURNED, WIDTH)
    tl.store(y + row * WIDTH + column, result.to(y.dtype.element_ty), inside)
