"""Linears of few rows in Triton. Each weight is read once, and memory bandwidth bounds the time.

The functions of ref.py. For one token, and for what tensor cores do not support, a program multiplies a few rows of a
weight, all columns at once, by fused multiply-adds. Two to eight tokens use few_rows.py, which also computes a single
token if its bits must not depend on the batch; more tokens use swap_ab.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import FP8_FLOOR, FP8_LARGEST, scaled_blocks
from dsv4cli.kernels.card import has_fp8
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.gemm.kernel import few_rows, swap_ab
from dsv4cli.kernels.gemm.kernel.dequant import (
    Norm,
    Product,
    bits,
    block_scales,
    e2m1_values,
    e4m3_rounded,
    e4m3_values,
    e8m0_values,
    first_programs,
    one_of,
    read_once,
    runs_alike,
)
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.norm.kernel import normed
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.rows import planned_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

# widest row that a program can hold
WIDEST = 16_384
# warps that run at once, about 20 on each of 132 multiprocessors. With more warps, prefetching weights into registers
# while a program waits is slower (H200: 3 to 7 % of a chain of large linears)
_AT_ONCE = 2640
# most bytes of all weights, and of FP8 and FP4 weights, for which two tokens are multiplied here too; decoding more
# would take too long (H200)
_SMALL_BYTES, _SMALL_FP8 = 32_000_000, 12_000_000


def linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _multiply(x[:, None], [Product(matrix, False, x.dtype)])[0][:, 0]


def rounded_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _multiply(x[:, None], [Product(matrix, True, x.dtype)])[0][:, 0]


def linear_fp32(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _multiply(x[:, None], [Product(matrix, False, torch.float32)])[0][:, 0]


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _multiply(x, [Product(matrix, False, x.dtype)])[0]


def linears(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
    fp32: Sequence[StoredMatrix],
    norm: Norm | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Compute ref.linears, of x normalized first if `norm` is given.

    A norm requires one token, or products that few_rows.py supports.
    """
    products = [Product(matrix, True, x.dtype) for matrix in rounded]
    products += [Product(matrix, False, x.dtype) for matrix in plain]
    products += [Product(matrix, False, torch.float32) for matrix in fp32]
    results = [y[:, 0] for y in _multiply(x[:, None], products, norm)]
    first, second = len(rounded), len(rounded) + len(plain)
    return results[:first], results[first:second], results[second:]


def _multiply(x: torch.Tensor, products: Sequence[Product], norm: Norm | None = None) -> list[torch.Tensor]:
    """Multiply x [T, G, K], normed if `norm` is given, by each weight [G * N, K]: [T, G, N] in the product's dtype."""
    tokens, groups, width = x.shape
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1 or width > WIDEST:
        raise KernelUnsupported(
            f"the Triton linear supports bf16 and fp32 rows of up to {WIDEST} consecutive columns, "
            f"not {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    if any(p.rounded for p in products) and width % 128:
        raise KernelUnsupported(f"rounding an input requires whole blocks of 128 columns, not {width}")
    if not all(part is None or part.is_contiguous() for p in products for part in p.matrix):
        raise KernelUnsupported("the Triton linear requires whole weights, not slices of columns")
    results = [
        torch.empty(tokens, groups, p.matrix.weight.shape[0] // groups, dtype=p.dtype, device=x.device)
        for p in products
    ]
    if not tokens or not products:
        return results
    if planned_rows(tokens) > 1 and all(few_rows.takes(x, p.matrix) for p in products):
        few_rows.multiply(x, norm, products, results, few_rows.few_rows_tiles(x, products))
    elif planned_rows(tokens) > _few(products) and all(swap_ab.takes(x, p.matrix.weight) for p in products):
        swap_ab.multiply(x, products, results, swap_ab.swap_tiles(x, products))
    else:
        _launch(x, norm, products, results, gemv_tiles(x, products))
    return results


def _few(products: Sequence[Product]) -> int:
    """Return how many tokens are multiplied here even if tensor cores support the products."""
    size = sum(p.matrix.weight.nbytes for p in products)
    coded = sum(p.matrix.weight.nbytes for p in products if p.matrix.scale is not None)
    return 2 if size <= _SMALL_BYTES and coded <= _SMALL_FP8 else 1


def _launch(
    x: torch.Tensor,
    norm: Norm | None,
    products: Sequence[Product],
    results: list[torch.Tensor],
    tiles: "GemvTiles",
) -> None:
    tokens, groups, width = x.shape
    rows, warps, together, size = tiles
    numbers = tuple(y.shape[-1] for y in results)
    times = tuple(max(1, size // (rows * width * p.matrix.weight.itemsize)) for p in products)
    starts = first_programs(cdiv(n, rows * each) for n, each in zip(numbers, times, strict=True))
    _rows[(starts[-1], groups, cdiv(tokens, together))](
        x, norm and norm.weight, tuple(bits(p.matrix.weight) for p in products),
        tuple(bits(p.matrix.scale) for p in products), tuple(results), tokens, x.stride(0), x.stride(1),
        norm.eps if norm else 0.0, starts, times, numbers, runs_alike(products), width,
        tuple(p.rounded for p in products), has_fp8(x), rows, max(128, next_power_of_2(width)), together,
        together == 1 and starts[-1] * groups * warps <= _AT_ONCE, num_warps=warps, **overlap(x),
    )  # fmt: skip


class GemvTiles(NamedTuple):
    """Rows at a time, warps, tokens and bytes of weights of a program."""

    rows: int
    warps: int
    tokens: int
    nbytes: int


def gemv_tiles(x: torch.Tensor, products: Sequence[Product]) -> GemvTiles:
    """Return the fastest tiles measured on an H200."""
    tokens, groups, columns = x.shape
    alone = planned_rows(tokens) == 1
    width = max(128, next_power_of_2(columns)) * max(p.matrix.weight.itemsize for p in products)
    size = sum(p.matrix.weight.nbytes for p in products)
    rows, warps, each = (8, 4, 0) if width <= 1024 else (4, min(16, max(4, width // 1024)), 0)
    if alone and width <= 1024 and size > 16e6:
        rows, warps, each = (8, 4, 65_536) if size > 35e6 else (8, 2, 32_768) if size > 32e6 else (8, 4, 16_384)
    elif alone and width == 4096 and len(products) == 1 and size > 16e6:
        rows, each = (4, 65_536) if size > 32e6 else (2, 32_768)
    elif alone and width == 8192 and len(products) > 1:
        rows, each = 2, 16_384
    # all rows of a program must be in one group
    while groups > 1 and any(p.matrix.weight.shape[0] // groups % rows for p in products):
        rows //= 2
    return GemvTiles(rows, warps, min(2, tokens), each)


@launched(do_not_specialize=["tokens", "eps"])
def _rows(
    x,  # [tokens, G, K]
    norm,  # [K], weight of the norm of x, if there is one
    weights,  # of each product [G * N, K] as stored
    scales,
    ys,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    eps,
    STARTS: tl.constexpr,  # the first program of each product, and of none
    TIMES: tl.constexpr,  # how often a program of each product takes ROWS rows: alike of a run
    NS: tl.constexpr,
    RUNS: tl.constexpr,  # as of runs_alike
    K: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least K
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,  # whether weights are asked for before the inputs are there
    OVERLAP: tl.constexpr,
):
    program, group = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TOKENS
    x += token.to(tl.int64) * x_row + group * x_group
    for i in tl.static_range(len(RUNS) - 1):
        if (program >= STARTS[RUNS[i]]) & (program < STARTS[RUNS[i + 1]]):
            weight = one_of(weights, program, STARTS, RUNS[i], RUNS[i + 1])
            scale = None if scales[RUNS[i]] is None else one_of(scales, program, STARTS, RUNS[i], RUNS[i + 1])
            y = one_of(ys, program, STARTS, RUNS[i], RUNS[i + 1])
            n = one_of(NS, program, STARTS, RUNS[i], RUNS[i + 1])
            start = one_of(STARTS, program, STARTS, RUNS[i], RUNS[i + 1])
            y += (token * tl.num_programs(1) + group).to(tl.int64) * n
            _product(
                x, norm, weight, scale, y, program - start, group, x_row * (token + 1 < tokens), eps, n, TIMES[RUNS[i]],
                K, ROUNDED[RUNS[i]], HAS_FP8, ROWS, COLUMNS, TOKENS, EARLY, OVERLAP,
            )  # fmt: skip


@triton.jit
def _product(
    x,
    norm,
    weight,
    scale,
    y,
    program,
    group,
    apart,  # from x to the next token; 0 if there is none
    eps,
    n,
    TIMES: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute TIMES * ROWS rows of the product of one weight with one token or two, and store them to y."""
    if not EARLY:
        wait_for_inputs(OVERLAP)
    first = program * (ROWS * TIMES)
    values, factor = _tile(weight, scale, group * n, first, n, K, ROWS, COLUMNS)
    if TIMES > 1:
        values1, factor1 = _tile(weight, scale, group * n, first + ROWS, n, K, ROWS, COLUMNS)
    if EARLY:
        wait_for_inputs(OVERLAP)
    given, power = _inputs(x, norm, eps, K, ROUND, HAS_FP8, COLUMNS)
    if TOKENS == 2:
        other, power1 = _inputs(x + apart, norm, eps, K, ROUND, HAS_FP8, COLUMNS)
    for time in tl.static_range(TIMES):
        row = first + time * ROWS + tl.arange(0, ROWS)
        sums = _sums(values, factor, given, power, HAS_FP8, TIMES > 1)
        if TOKENS == 2:
            # both sums before either is stored: they share the decoded weights
            more = tl.sum(_sums(values, factor, other, power1, HAS_FP8, TIMES > 1), 1).to(y.dtype.element_ty)
            tl.store(y + tl.num_programs(1) * n + row, more, (row < n) & (apart != 0))
        tl.store(y + row, tl.sum(sums, 1).to(y.dtype.element_ty), row < n)
        if time + 1 < TIMES:
            values, factor = values1, factor1
        if time + 2 < TIMES:
            values1, factor1 = _tile(weight, scale, group * n, first + (time + 2) * ROWS, n, K, ROWS, COLUMNS)


@triton.jit
def _tile(
    weight, scale, before, first, n, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load ROWS rows from `first` on of the n-row matrix that starts at row `before`, and their scales; 0 beyond its
    end.

    The scales are fp32: [COLUMNS / 128, 1] for FP8, [ROWS, COLUMNS / 32] for FP4.
    """
    row = first + tl.arange(0, ROWS)
    place, inside = (before + row).to(tl.int64)[:, None], (row < n)[:, None]
    if weight.dtype.element_ty == tl.int8:
        values = read_once(weight, place, inside, K // 2, COLUMNS // 2)
        factor = e8m0_values(read_once(scale, place, inside, K // 32, COLUMNS // 32))
    else:
        values = read_once(weight, place, inside, K, COLUMNS)
        factor = tl.full([COLUMNS // 128, 1], 1.0, tl.float32)
        if scale is not None:
            block = tl.arange(0, COLUMNS // 128)[:, None]
            # all rows are in one block of 128
            at = scale + (before + first) // 128 * ((K + 127) // 128) + block
            factor = block_scales(tl.load(at, (block * 128 < K) & (first < n), other=0))
    return values, factor


@triton.jit
def _sums(
    values,  # [ROWS, COLUMNS] as stored; of FP4 pairs of codes [ROWS, COLUMNS / 2]
    scale,  # as of _tile
    given,  # as of _inputs
    power,
    HAS_FP8: tl.constexpr,
    AGAIN: tl.constexpr,  # whether the inputs serve further rows
):
    """Return fp32 [ROWS, n]: partial sums over the columns of each thread. The caller adds them."""
    COLUMNS: tl.constexpr = given.shape[0] * 128
    factor = power if values.dtype == tl.int8 else power * scale
    # multiplying the sums by the factors keeps the inputs narrow, which is faster if a thread holds many of them
    LATE: tl.constexpr = values.dtype == tl.uint8 and (AGAIN or COLUMNS >= 8192)
    inputs = tl.reshape(given if LATE else given * factor, [COLUMNS])
    if values.dtype == tl.int8:
        even, odd = tl.split(tl.reshape(inputs, [COLUMNS // 2, 2]))
        products = e2m1_values(values) * even[None] + e2m1_values(values >> 4) * odd[None]
    elif values.dtype == tl.uint8:
        products = e4m3_values(values, HAS_FP8) * inputs[None]
    else:
        products = values.to(tl.float32) * inputs[None]
    sums = tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 16, 16]), 2)
    if values.dtype == tl.int8:
        sums *= scale
    elif LATE:
        sums *= tl.reshape(tl.broadcast_to(factor, [COLUMNS // 128, 8]), [COLUMNS // 16])[None]
    return sums


@triton.jit
def _inputs(x, norm, eps, K: tl.constexpr, ROUND: tl.constexpr, HAS_FP8: tl.constexpr, COLUMNS: tl.constexpr):
    """Load x [K], apply the norm if there is one, and quantize to FP8 if ROUND.

    Returns values and scales in fp32: values [COLUMNS / 128, 128], 0 beyond K, and scales [COLUMNS / 128, 1], 1 if not
    ROUND.
    """
    column = tl.arange(0, COLUMNS // 128)[:, None] * 128 + tl.arange(0, 128)[None]
    values = tl.load(x + column, column < K, other=0.0).to(tl.float32)
    power = tl.full([COLUMNS // 128, 1], 1.0, tl.float32)
    if norm is not None:
        factor = tl.load(norm + column, column < K, other=0.0).to(tl.float32)
        rows = normed(tl.reshape(values, [1, COLUMNS]), tl.reshape(factor, [1, COLUMNS]), eps, K)
        values = tl.reshape(rows.to(x.dtype.element_ty).to(tl.float32), [COLUMNS // 128, 128])
    if ROUND:
        values, scale = scaled_blocks(values, FP8_FLOOR, FP8_LARGEST)
        # 0 beyond K once more: if ptxas (Triton 3.6) knows that values are 0, it reads half of their codes from a
        # register that is never set
        values = tl.where(column < K, e4m3_rounded(values, HAS_FP8), 0.0)
        power = scale.to(tl.float32, bitcast=True)
    return values, power
