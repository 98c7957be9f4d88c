"""Linears of few rows in Triton: each weight is read once, and reading it is the time that they take.

The functions of ref.py. For one token, and for what tensor cores do not take, a program multiplies some rows of a
weight, all their columns at once, by fused multiply-adds; more tokens multiply in swapped.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import scaled_blocks
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import E4M3_MAX, FP8_AMAX_FLOOR
from dsv4cli.kernels.gemm import swapped
from dsv4cli.kernels.gemm.codes import (
    Product,
    bits,
    e2m1_values,
    e4m3_rounded,
    e4m3_values,
    e8m0_values,
    has_fp8,
)

# the widest row that a program holds
WIDEST = 16_384
# what a warp reads of a weight: 128 bytes a thread
_WARP_BYTES = 4096
# FP8 weights up to this size multiply two tokens here as well, where the decoding of more would take too long
_SMALL_BYTES = 12_000_000
_FLOOR, _LARGEST = tl.constexpr(FP8_AMAX_FLOOR), tl.constexpr(E4M3_MAX)


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return _multiply(x[:, None], [Product(weight, scale, False, x.dtype)])[0][:, 0]


def rounded_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _multiply(x[:, None], [Product(weight, scale, True, x.dtype)])[0][:, 0]


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _multiply(x[:, None], [Product(weight, None, False, torch.float32)])[0][:, 0]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return _multiply(x, [Product(weight, scale, False, x.dtype)])[0]


def linears(
    x: torch.Tensor,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    fp32: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    products = [Product(weight, scale, True, x.dtype) for weight, scale in rounded]
    products += [Product(weight, scale, False, x.dtype) for weight, scale in plain]
    products += [Product(weight, None, False, torch.float32) for weight in fp32]
    results = [y[:, 0] for y in _multiply(x[:, None], products)]
    first, second = len(rounded), len(rounded) + len(plain)
    return results[:first], results[first:second], results[second:]


def _multiply(x: torch.Tensor, products: Sequence[Product]) -> list[torch.Tensor]:
    """x [T, G, K] times each weight [G * N, K]: [T, G, N] in its dtype."""
    tokens, groups, width = x.shape
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1 or width > WIDEST:
        raise KernelUnsupported(
            f"the Triton linear takes bf16 or fp32 rows of up to {WIDEST} consecutive columns, "
            f"not {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    if any(p.rounded for p in products) and width % 128:
        raise KernelUnsupported(f"the rounding of an input takes whole blocks of 128 columns, not {width}")
    if not all(p.weight.is_contiguous() and (p.scale is None or p.scale.is_contiguous()) for p in products):
        raise KernelUnsupported("the Triton linear takes whole weights, not slices of columns")
    results = [
        torch.empty(tokens, groups, p.weight.shape[0] // groups, dtype=p.dtype, device=x.device) for p in products
    ]
    decoded = sum(p.weight.nbytes for p in products if p.scale is not None)
    if not tokens or not products:
        return results
    if tokens > (2 if decoded <= _SMALL_BYTES else 1) and swapped.takes(x, products):
        swapped.multiply(x, products, results, swapped.tile_shape(x, products))
    else:
        _stream(x, products, results, _shape(x, products))
    return results


def _stream(
    x: torch.Tensor, products: Sequence[Product], results: list[torch.Tensor], shape: tuple[int, int, int]
) -> None:
    tokens, groups, width = x.shape
    rows, warps, together = shape
    numbers = tuple(y.shape[-1] for y in results)
    starts = [0]
    for n in numbers:
        starts.append(starts[-1] + triton.cdiv(n, rows))
    _rows[(starts[-1], groups, triton.cdiv(tokens, together))](
        x, tuple(bits(p.weight) for p in products), tuple(bits(p.scale) for p in products), tuple(results), tokens,
        x.stride(0), x.stride(1), tuple(starts), numbers, width, tuple(p.rounded for p in products), has_fp8(x), rows,
        max(128, triton.next_power_of_2(width)), together, num_warps=warps,
    )  # fmt: skip


def _shape(x: torch.Tensor, products: Sequence[Product]) -> tuple[int, int, int]:
    """Rows of a program, its warps, its tokens: the fastest of those measured on an H200."""
    width = max(128, triton.next_power_of_2(x.shape[2])) * max(p.weight.itemsize for p in products)
    rows = 8 if width <= 1024 else 4
    # rows of a program lie in one group
    while x.shape[1] > 1 and any(p.weight.shape[0] // x.shape[1] % rows for p in products):
        rows //= 2
    return rows, min(16, max(4, rows * width // _WARP_BYTES)), min(2, x.shape[0])


@triton.jit(do_not_specialize=["tokens"])
def _rows(
    x,  # [tokens, G, K]
    weights,  # of each product [G * N, K] as stored
    scales,
    ys,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    STARTS: tl.constexpr,  # the first program of each product, and of none
    NS: tl.constexpr,
    K: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least K
    TOKENS: tl.constexpr,
):
    program, group = tl.program_id(0), tl.program_id(1)
    for i in tl.static_range(len(NS)):
        if (program >= STARTS[i]) & (program < STARTS[i + 1]):
            first = (program - STARTS[i]) * ROWS
            row = first + tl.arange(0, ROWS)
            place, inside = (group * NS[i] + row).to(tl.int64)[:, None], (row < NS[i])[:, None]
            # all rows lie in one block of 128
            scale = None if scales[i] is None else scales[i] + (group * NS[i] + first) // 128 * ((K + 127) // 128)
            if weights[i].dtype.element_ty == tl.int8:
                values = _read_once(weights[i], place, inside, K // 2, COLUMNS // 2)
                scale = e8m0_values(_read_once(scales[i], place, inside, K // 32, COLUMNS // 32))
            else:
                values = _read_once(weights[i], place, inside, K, COLUMNS)
            token = tl.program_id(2) * TOKENS
            given = x + token.to(tl.int64) * x_row + group * x_group
            sums = _sums(values, scale, given, K, ROUNDED[i], HAS_FP8, COLUMNS)
            if TOKENS == 2:
                # both before either is stored: what was decoded serves both
                other = _sums(values, scale, given + x_row * (token + 1 < tokens), K, ROUNDED[i], HAS_FP8, COLUMNS)
                y = ys[i] + ((token + 1) * tl.num_programs(1) + group).to(tl.int64) * NS[i] + row
                tl.store(y, tl.sum(other, 1).to(y.dtype.element_ty), (row < NS[i]) & (token + 1 < tokens))
            y = ys[i] + (token * tl.num_programs(1) + group).to(tl.int64) * NS[i] + row
            tl.store(y, tl.sum(sums, 1).to(y.dtype.element_ty), row < NS[i])


@triton.jit
def _read_once(matrix, place, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a matrix, 0 beyond its WIDTH; what else is in the cache shall stay there."""
    column = tl.arange(0, COLUMNS)[None]
    return tl.load(matrix + place * WIDTH + column, inside & (column < WIDTH), other=0, eviction_policy="evict_first")


@triton.jit
def _sums(
    values,  # [ROWS, COLUMNS] as stored; of FP4 pairs of codes [ROWS, COLUMNS / 2]
    scale,  # of FP8 a pointer to that of the first columns; of FP4 fp32 [ROWS, COLUMNS / 32]
    x,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """fp32 [ROWS, n]: the sums over the columns of each thread, still to be added."""
    given, factor = _inputs(x, scale if values.dtype == tl.uint8 else None, K, ROUND, HAS_FP8, COLUMNS)
    # factors times sums leave the inputs as narrow as they are, which pays where a thread holds many of them
    LATE: tl.constexpr = values.dtype == tl.uint8 and COLUMNS >= 8192
    given = tl.reshape(given if LATE else given * factor, [COLUMNS])
    if values.dtype == tl.int8:
        even, odd = tl.split(tl.reshape(given, [COLUMNS // 2, 2]))
        products = e2m1_values(values) * even[None] + e2m1_values(values >> 4) * odd[None]
    elif values.dtype == tl.uint8:
        products = e4m3_values(values, HAS_FP8) * given[None]
    else:
        products = values.to(tl.float32) * given[None]
    sums = tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 16, 16]), 2)
    if values.dtype == tl.int8:
        sums *= scale
    elif LATE:
        sums *= tl.reshape(tl.broadcast_to(factor, [COLUMNS // 128, 8]), [COLUMNS // 16])[None]
    return sums


@triton.jit
def _inputs(x, scale, K: tl.constexpr, ROUND: tl.constexpr, HAS_FP8: tl.constexpr, COLUMNS: tl.constexpr):
    """x as codes of FP8 if so wanted [COLUMNS / 128, 128], 0 beyond K, and the factor of each row, both fp32.

    The factor is the scale of the codes times that of the weight's columns, where there are such.
    """
    block = tl.arange(0, COLUMNS // 128)[:, None]
    column = block * 128 + tl.arange(0, 128)[None]
    values = tl.load(x + column, column < K, other=0.0).to(tl.float32)
    factor = tl.full([COLUMNS // 128, 1], 1.0, tl.float32)
    if scale is not None:
        factor = e8m0_values(tl.load(scale + block, block * 128 < K, other=0))
    if ROUND:
        values, power = scaled_blocks(values, _FLOOR, _LARGEST)
        values = e4m3_rounded(values, HAS_FP8)
        factor *= power.to(tl.float32, bitcast=True)
    return values, factor
