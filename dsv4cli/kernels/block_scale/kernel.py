"""Block scales in Triton. Codes are computed on fp32 bits, so a GPU without FP8 produces the same values."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import E2M1_MAX, E4M3_MAX, FP4_AMAX_FLOOR, FP8_AMAX_FLOOR
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.rows import rows, tile

FP8_FLOOR, FP8_LARGEST = tl.constexpr(FP8_AMAX_FLOOR), tl.constexpr(E4M3_MAX)
FP4_FLOOR, FP4_LARGEST = tl.constexpr(FP4_AMAX_FLOOR), tl.constexpr(E2M1_MAX)


def fp8_round(x: torch.Tensor, block: int) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_round_blocks, x, block, (y,), (FP8_AMAX_FLOOR, E4M3_MAX, 3, -6))
    return y


def fp4_round(x: torch.Tensor, block: int) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_round_blocks, x, block, (y,), (FP4_AMAX_FLOOR, E2M1_MAX, 1, 0))
    return y


def fp8_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), _scale(x, block)
    times = 4 if scale.numel() >= 1 << 15 else 1  # 15 to 20 % faster (H200)
    _launch(_fp8_codes, x, block, (codes.view(torch.uint8), scale.view(torch.uint8)), (FP8_AMAX_FLOOR, E4M3_MAX), times)
    return codes, scale


def fp4_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8, device=x.device)
    scale = _scale(x, block)
    _launch(_fp4_codes, x, block, (codes.view(torch.uint8), scale.view(torch.uint8)), (FP4_AMAX_FLOOR, E2M1_MAX))
    return codes, scale


def _scale(x: torch.Tensor, block: int) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // block), dtype=torch.float8_e8m0fnu, device=x.device)


def _launch(
    kernel: triton.JITFunction,
    x: torch.Tensor,
    block: int,
    results: tuple[torch.Tensor, ...],
    constants: tuple[float, ...],
    times: int = 1,
) -> None:
    """Launch a kernel over the blocks of x, with `times` as many blocks per program as `tile` says."""
    given, (per_program, _, warps) = _blocks(x, block), tile(block)
    count, per_program = x.numel() // block, per_program * times
    if count:
        kernel[(cdiv(count, per_program),)](
            given, *results, count, given.stride(0), x.shape[-1] // block, *constants, block, per_program,
            num_warps=warps, **overlap(x),
        )  # fmt: skip


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return x as rows. Raises KernelUnsupported unless `block` is a power of two that divides the columns."""
    if block & (block - 1) or x.shape[-1] % block:
        raise KernelUnsupported(
            f"the Triton rounding requires a power of two as block that divides {x.shape[-1]} columns, not {block}"
        )
    return rows(x)


@triton.jit
def power_of_two_ceil(x):
    """Return the bits (int32) of the smallest power of two >= x. x: fp32, positive, normal and below 2 ** 127."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000


@triton.jit
def round_to_code(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round x (fp32) to MANTISSA mantissa bits, ties to even; below 2 ** LOWEST with the spacing at 2 ** LOWEST."""
    magnitude = tl.abs(x)
    power = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    # in the sum with this power of two, the last bit is the format's last bit, so the addition rounds
    large = (tl.maximum(power, (127 + LOWEST) << 23) + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    rounded = (magnitude + large) - large
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def scaled_blocks(values, FLOOR: tl.constexpr, LARGEST: tl.constexpr):
    """Return values (fp32 [n, block]) divided by each row's scale, and the scales as bits (int32 [n, 1])."""
    amax = tl.maximum(tl.max(tl.abs(values), 1, keep_dims=True), FLOOR)
    scale = power_of_two_ceil(amax * (1.0 / LARGEST))
    # multiplying by 1 / scale is exact; a division may not be. At most LARGEST, because the scale is rounded up
    return values * ((254 << 23) - scale).to(tl.float32, bitcast=True), scale


@triton.jit
def code_blocks(
    values, FLOOR: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr
):  # fmt: skip
    """Return the codes of values (fp32 [n, block]) as fp32 numbers, and each row's scale as bits (int32 [n, 1])."""
    values, scale = scaled_blocks(values, FLOOR, LARGEST)
    return round_to_code(values, MANTISSA, LOWEST), scale


@triton.jit
def through_fp8(values):
    """Return fp8_round of values (fp32 [n, block]), each row one block, in fp32."""
    codes, scale = code_blocks(values, FP8_FLOOR, FP8_LARGEST, 3, -6)
    return codes * scale.to(tl.float32, bitcast=True)


@triton.jit
def through_fp4(values):
    """Return fp4_round of values (fp32 [n, block]), each row one block, in fp32."""
    codes, scale = code_blocks(values, FP4_FLOOR, FP4_LARGEST, 1, 0)
    return codes * scale.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_bits(x):
    """Return the codes (uint8) of fp32 numbers that are e4m3 values, by integer arithmetic; infinities become NaN."""
    # with the exponent bias changed from 127 to 7 the upper bits are the code, also of e4m3's subnormals
    moved = (tl.abs(x) * 2.0**-120).to(tl.int32, bitcast=True) >> 20
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.minimum(moved, 0x7F) | sign).to(tl.uint8)


@triton.jit
def _load_blocks(x, count, stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Load the program's BLOCKS blocks from rows of GROUPS blocks each.

    Returns the block numbers, int64 [BLOCKS, 1], and the values, fp32 [BLOCKS, BLOCK], 0 from block `count` on.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    place = number // GROUPS * stride + number % GROUPS * BLOCK + tl.arange(0, BLOCK)[None]
    return number, tl.load(x + place, number < count, other=0.0).to(tl.float32)


@launched(do_not_specialize=["count"])
def _round_blocks(
    x,  # rows of GROUPS blocks; count blocks in all
    y,  # as x, contiguous
    count,
    stride,
    GROUPS: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    number, values = _load_blocks(x, count, stride, GROUPS, BLOCK, BLOCKS)
    codes, scale = code_blocks(values, FLOOR, LARGEST, MANTISSA, LOWEST)
    rounded = codes * scale.to(tl.float32, bitcast=True)
    tl.store(y + number * BLOCK + tl.arange(0, BLOCK)[None], rounded.to(y.dtype.element_ty), number < count)


@launched(do_not_specialize=["count"])
def _fp8_codes(
    x,  # rows of GROUPS blocks; count blocks in all
    y,  # uint8, as x, contiguous
    scales,  # uint8 [count]
    count,
    stride,
    GROUPS: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    number, values = _load_blocks(x, count, stride, GROUPS, BLOCK, BLOCKS)
    codes, scale = code_blocks(values, FLOOR, LARGEST, 3, -6)
    tl.store(y + number * BLOCK + tl.arange(0, BLOCK)[None], e4m3_bits(codes), number < count)
    tl.store(scales + number, (scale >> 23).to(tl.uint8), number < count)


@triton.jit
def e2m1_pairs(x):
    """Return the packed codes of fp32 numbers [n, m] that e2m1 can represent: uint8 [n, m / 2], low nibble first.

    The codes of other numbers are arbitrary.
    """
    # with the exponent bias changed from 127 to 1 the upper bits are the code, also of the subnormal
    moved = (tl.abs(x) * 2.0**-126).to(tl.int32, bitcast=True) >> 22
    codes = (moved & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(codes, [x.shape[0], x.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)


@launched(do_not_specialize=["count"])
def _fp4_codes(
    x,  # rows of GROUPS blocks; count blocks in all
    y,  # uint8, as x with half the columns, contiguous
    scales,  # uint8 [count]
    count,
    stride,
    GROUPS: tl.constexpr,
    FLOOR: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    number, values = _load_blocks(x, count, stride, GROUPS, BLOCK, BLOCKS)
    codes, scale = code_blocks(values, FLOOR, LARGEST, 1, 0)
    tl.store(y + number * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None], e2m1_pairs(codes), number < count)
    tl.store(scales + number, (scale >> 23).to(tl.uint8), number < count)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    given, y = rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, width = given.shape
    if width & (width - 1):
        raise KernelUnsupported(f"a Hadamard rotation requires a power of two, not {width} columns")
    per_program, _, warps = tile(width)
    if count:
        _hadamard[(cdiv(count, per_program),)](
            given, y, count, given.stride(0), width**-0.5, width.bit_length() - 1, width, per_program, num_warps=warps
        )
    return y


@triton.jit
def butterflies(values, STAGES: tl.constexpr):
    """Multiply rows of 2 ** STAGES values (fp32 [n, 2 ** STAGES]) by the unnormalized Hadamard matrix."""
    ROWS: tl.constexpr = values.shape[0]
    for _ in tl.static_range(STAGES):
        # a butterfly over the index's lowest bit, which becomes the highest: after all stages the order is restored
        even, odd = tl.split(tl.reshape(values, [ROWS, 2 ** (STAGES - 1), 2]))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [ROWS, 2**STAGES])
    return values


@launched(do_not_specialize=["count"])
def _hadamard(
    x,  # [count, WIDTH]
    y,  # as x, contiguous
    count,
    stride,
    factor,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None]
    inside = (row < count) & (column < WIDTH)
    values = tl.load(x + row * stride + column, inside, other=0.0).to(tl.float32)
    rotated = butterflies(values, STAGES) * factor
    tl.store(y + row * WIDTH + column, rotated.to(y.dtype.element_ty), inside)
