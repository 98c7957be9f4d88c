"""Rows in fp16, of inputs and of GGUF blocks, for one product on tensor cores instead of two.

Each row is multiplied by a power of two, 2 ** shift, so that its largest value is between 2 ** 14 and 2 ** 15, or not
far below: nothing overflows. bf16 inputs are then exact, and values of blocks are rounded once to 11 significant bits.
With a second fp16 number for what rounding leaves, a value has 22 bits. Values below 2 ** -28 of the row's bound are
subnormal: their error is up to 2 ** -39 of it. `unshifted` scales the products back.
"""

import math

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.ggml.kernel.fields import alignment, blocks, field_of, tile_rows, u16
from dsv4cli.kernels.ggml.kernel.octet_values import octet_values
from dsv4cli.kernels.ggml.kernel.octets import KernelBlocks, from_half, has_codes, has_offset
from dsv4cli.kernels.ggml.types import TYPES
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2

# exponent of the largest values, and the largest shift: its power of two must be a normal fp32 number
_TOP, _MOST = tl.constexpr(14), tl.constexpr(126)
# largest magnitude of a value, as a multiple of the block's scale and of its offset's scale
BOUNDS = {
    "Q8_0": (128, 0), "Q4_0": (8, 0), "Q5_0": (16, 0), "IQ4_NL": (127, 0), "MXFP4": (12, 0), "Q2_K": (45, 15),
    "Q3_K": (128, 0), "Q4_K": (945, 63), "Q5_K": (1953, 63), "Q6_K": (4096, 0), "IQ4_XS": (4064, 0),
    "IQ2_XXS": (166.625, 0), "IQ2_XS": (166.625, 0), "IQ2_S": (166.625, 0), "IQ3_XXS": (480.5, 0), "IQ3_S": (465, 0),
}  # fmt: skip
# rows and blocks, or octets, of a program that computes shifts; rows and octets of one that decodes
_SHIFT_ROWS, _SHIFT_BLOCKS, _ROWS, _OCTETS = 32, 32, 16, 16


def row_shifts(matrix: KernelBlocks, width: int) -> torch.Tensor:
    """Return the shift of each row of a matrix or a stack with this many columns: int32 [..., N]."""
    shifts = torch.empty(matrix.rows.shape[:-1], dtype=torch.int32, device=matrix.rows.device)
    count, steps = shifts.numel(), blocks(matrix.kind, width) if has_codes(matrix.kind) else width // 8
    _row_shifts[(cdiv(count, _SHIFT_ROWS),)](
        matrix.rows, shifts, count, width, matrix.kind, matrix.height, _SHIFT_ROWS,
        min(_SHIFT_BLOCKS, next_power_of_2(int(steps))),
    )  # fmt: skip
    return shifts


def input_halves(
    x: torch.Tensor, tokens: torch.Tensor | None = None, per_token: int = 1, *, paired: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of bf16 x [..., K] in fp16 and their shifts, int32 [...].

    Args:
        x: rows with consecutive columns; 3 dimensions, or 2.
        tokens: int32 [P], per_token times the rows to take, rounded down; None for all rows.
        paired: whether the columns of each four are in the order 0, 2, 1, 3: that of the words of `octets.decoded`.
    """
    shape = x.shape if tokens is None else (len(tokens), x.shape[-1])
    y = torch.empty(shape, dtype=torch.float16, device=x.device)
    shifts = torch.empty(shape[:-1], dtype=torch.int32, device=x.device)
    _launch_halves(x, y, shifts, tokens, per_token, paired)
    return y, shifts


def halves_in_place(x: torch.Tensor, *, paired: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_halves` of contiguous x [P, K], in the memory of x."""
    y, shifts = x.view(torch.float16), torch.empty(len(x), dtype=torch.int32, device=x.device)
    _launch_halves(x, y, shifts, None, 1, paired)
    return y, shifts


def _launch_halves(
    x: torch.Tensor, y: torch.Tensor, shifts: torch.Tensor, tokens: torch.Tensor | None, per_token: int, paired: bool
) -> None:
    groups, group = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    if shifts.numel():
        _input_halves[(shifts.numel(),)](
            x, y, shifts, tokens, x.stride(0), group, groups, per_token, x.shape[-1], next_power_of_2(x.shape[-1]),
            paired, num_warps=4,
        )  # fmt: skip


def decoded_halves(matrix: KernelBlocks, shifts: torch.Tensor, y: torch.Tensor, first: int) -> None:
    """Decode rows of each of G groups of a matrix [G * N, K], from row `first` of a group on.

    Args:
        shifts: of these rows, [G, ..].
        y: fp16 [1, G, .., K] for the values, or [2, G, .., K] for the values and what their rounding leaves.
    """
    parts, groups, count, width = y.shape
    octets = math.gcd(width // 8, _OCTETS)
    _decoded_halves[(cdiv(groups * count, _ROWS), width // 8 // octets)](
        matrix.rows, matrix.table, shifts, y, groups * count, count, len(matrix.rows) // groups, first, width,
        matrix.kind, matrix.height, parts == 2, _ROWS, octets, num_warps=4,
    )  # fmt: skip


@triton.jit
def power(shift):
    """Return 2 ** shift in fp32, for shifts of -126 to 126."""
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unshifted(products, shift):
    """Return products times 2 ** -shift, which is the sum of two shifts.

    The factor itself need not be an fp32 number. No step overflows unless the result does.
    """
    first = -shift >> 1
    return products * power(first) * power(-shift - first)


@constexpr_function
def _bound(kind, part):
    return float(BOUNDS[kind][part])


@constexpr_function
def _scale_field(kind):
    """Return which field begins with a block's scale; that of an offset follows in the same unit."""
    return TYPES[kind].fields.index(TYPES[kind].halves[0] if TYPES[kind].halves else 0)


@triton.jit
def _shift(largest):
    """Return the shift of rows with these largest magnitudes."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23 & 255) - 127
    return tl.minimum(tl.maximum(-exponent + _TOP, -_MOST), _MOST)


@triton.jit
def _block_bounds(rows, b, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    """Return a bound of the magnitudes of blocks b [1, B] of rows [R, 1]: fp32 [R, B]."""
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS, HEIGHT)
    FIELD: tl.constexpr = _scale_field(KIND)
    scale = field_of(rows, b, FIELD, KIND, BLOCKS, HEIGHT)
    if KIND == "MXFP4":
        # half of the e8m0 scale; the two smallest would be subnormal, and the next one is a bound of them
        code = tl.maximum(tl.load(scale).to(tl.int32), 2)
        bound = ((code - 1) << 23).to(tl.float32, bitcast=True)
    else:
        bound = tl.abs(from_half(u16(scale, ALIGN)))
    bound *= _bound(KIND, 0)
    if has_offset(KIND):
        bound += tl.abs(from_half(u16(scale + 2, ALIGN))) * _bound(KIND, 1)
    return bound


@launched(do_not_specialize=["count"])
def _row_shifts(
    weight,  # blocks [count, K]
    shifts,  # int32 [count]
    count,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,  # blocks at a time; octets of types without codes
):
    BLOCKS: tl.constexpr = blocks(KIND, K)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tile_rows(weight, tl.minimum(row, count - 1)[:, None], K, KIND, HEIGHT)
    largest = tl.zeros([ROWS], tl.float32)
    STEPS: tl.constexpr = BLOCKS if has_codes(KIND) else K // 8
    for start in range(0, STEPS, EACH):
        # missing ones repeat the last
        each = tl.minimum(start + tl.arange(0, EACH), STEPS - 1)[None]
        if has_codes(KIND):
            bound = tl.max(_block_bounds(rows, each, KIND, BLOCKS, HEIGHT), 1)
        else:
            values = tl.abs(octet_values(rows, each, None, KIND, BLOCKS, HEIGHT))
            bound = tl.max(tl.max(tl.where(values < float("inf"), values, 0.0), 2), 1)
        largest = tl.maximum(largest, bound)
    tl.store(shifts + row, _shift(largest), row < count)


@launched
def _input_halves(
    x,  # bf16 [T, GROUPS, K], or [T, K]
    y,  # fp16 [rows, K]
    shifts,  # int32 [rows]
    tokens,  # int32 [rows], PER_TOKEN times the row of x of each row of y, rounded down, or None
    x_row,
    x_group,
    GROUPS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRED: tl.constexpr,
):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    token, group = row // GROUPS, row % GROUPS
    if tokens is not None:
        token = tl.load(tokens + row) // PER_TOKEN
    values = tl.load(x + token.to(tl.int64) * x_row + group * x_group + column, column < K, other=0.0).to(tl.float32)
    size = tl.abs(values)
    shift = _shift(tl.max(tl.where(size < float("inf"), size, 0.0), 0))
    halves = (values * power(shift)).to(tl.float16)
    if PAIRED:
        halves = tl.reshape(tl.permute(tl.reshape(halves, [WIDTH // 4, 2, 2]), (0, 2, 1)), [WIDTH])
    tl.store(y + row.to(tl.int64) * K + column, halves, column < K)
    tl.store(shifts + row, shift)


@launched(do_not_specialize=["count", "each", "first"])
def _decoded_halves(
    weight,  # blocks [G * N, K]
    table,
    shifts,  # int32 [count]
    y,  # fp16 [count, K]; if TWICE, twice
    count,
    each,  # rows of a group to decode
    n,
    first,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    TWICE: tl.constexpr,
    ROWS: tl.constexpr,
    OCTETS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    octet = tl.program_id(1) * OCTETS + tl.arange(0, OCTETS)[None]
    own = tl.minimum(row, count - 1)
    rows = tile_rows(weight, (own // each * n + first + own % each)[:, None], K, KIND, HEIGHT)
    values = octet_values(rows, octet, table, KIND, blocks(KIND, K), HEIGHT)
    factor = power(tl.load(shifts + own))
    values = tl.reshape(values * factor[:, None, None], (ROWS, OCTETS * 8))
    halves = values.to(tl.float16)
    column = tl.program_id(1) * (OCTETS * 8) + tl.arange(0, OCTETS * 8)[None]
    y += row.to(tl.int64)[:, None] * K + column
    tl.store(y, halves, (row < count)[:, None])
    if TWICE:
        rest = values - halves.to(tl.float32)
        tl.store(y + count.to(tl.int64) * K, rest.to(tl.float16), (row < count)[:, None])
