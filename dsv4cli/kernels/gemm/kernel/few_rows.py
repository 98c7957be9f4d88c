"""Linears of one to eight rows in Triton: each weight is read once, directly into the operand of tensor cores.

A program multiplies 16 rows of a weight at a time. Each of its warps computes a part of the columns, and the partial
sums are added at the end. In the tensor core's operand a thread holds a few columns of a row in each block of 8 or 16.
To make these the 16 bytes of a single load, the columns are permuted, in the weights and in the inputs (`_left`,
`_operand`). The other operand has eight tokens; if there are fewer, the last one is repeated. So the summation order of
a row depends only on the weights' shapes: it is the same in a step of one row and of eight.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import FP8_FLOOR, FP8_LARGEST, power_of_two_ceil
from dsv4cli.kernels.card import has_fp8
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel.dequant import (
    Norm,
    Product,
    add_exact_products,
    bits,
    block_scales,
    first_programs,
    one_of,
    runs_alike,
)
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.stored_matrix import StoredMatrix

# the most rows: the columns of the tensor core
MOST = 8
# rows of a weight at a time: those of the tensor core
ROWS = 16


def takes(x: torch.Tensor, matrix: StoredMatrix) -> bool:
    """Return whether x [T, G, K] times each group of a matrix is supported: bf16 with 16 bits or FP8, whole blocks."""
    (tokens, groups, width), (weight, scale, _) = x.shape, matrix
    if tokens > MOST or x.dtype != torch.bfloat16 or x.stride(-1) != 1 or width % FP8_BLOCK:
        return False
    plain = weight.dtype in (torch.bfloat16, torch.float16) and scale is None
    coded = weight.dtype == torch.float8_e4m3fn and scale is not None and has_fp8(x)
    # all rows of a program must be in one block of 128
    return (plain or coded) and (groups == 1 or weight.shape[0] // groups % FP8_BLOCK == 0)


def multiply(
    x: torch.Tensor,
    norm: Norm | None,
    products: Sequence[Product],
    results: list[torch.Tensor],
    tiles: "FewRowsTiles",
) -> None:
    """Multiply x bf16 [T, G, K], normed if `norm` is given, by each weight [G * N, K] into its result."""
    tokens, groups, width = x.shape
    warps, ahead, times, registers = tiles
    numbers = tuple(y.shape[-1] for y in results)
    starts = first_programs(cdiv(n, ROWS * times) for n in numbers)
    _few_rows[(starts[-1], groups)](
        x, norm and norm.weight,
        tuple(p.matrix.weight for p in products), tuple(bits(p.matrix.scale) for p in products), tuple(results),
        tokens, x.stride(0), x.stride(1), norm.eps if norm else 0.0, starts, numbers,
        runs_alike(products), width, tuple(p.rounded for p in products), warps, ahead, times, num_warps=warps,
        **overlap(x), **({"maxnreg": registers} if registers else {}),
    )  # fmt: skip


class FewRowsTiles(NamedTuple):
    """The tiles of a program.

    Attributes:
        warps: warps of a program.
        ahead: how many blocks of 16 rows and 128 columns each warp prefetches.
        times: how many times a program computes 16 rows.
        registers: registers per thread, 0 for the compiler's choice.
    """

    warps: int
    ahead: int
    times: int
    registers: int


def few_rows_tiles(x: torch.Tensor, products: Sequence[Product]) -> FewRowsTiles:
    """Return the fastest tiles measured on an H200, the same for any number of rows."""
    steps = x.shape[2] // FP8_BLOCK
    tiles = sum(cdiv(p.matrix.weight.shape[0], ROWS) for p in products)
    times = 1
    if steps <= 16:
        # preparing the inputs once serves many rows
        while times < 8 and tiles >= 512 * times:
            times *= 2
    most = 8 if tiles < 512 else 4
    warps = math.gcd(steps, most if steps > 8 else max(1, steps // 2))
    coded = [p.matrix.scale is not None for p in products]
    ahead = 2
    if all(coded):
        # rounded inputs are prefetched, which takes the registers of a block
        ahead = 3 if times == 1 and all(p.rounded for p in products) else 4
    # 128 registers allow two programs of eight warps on a multiprocessor. If there are more than two programs for each
    # of 132 multiprocessors, 168 allow three of four warps
    registers = 128 if times == 1 and any(coded) else 168 if all(coded) and tiles > 256 * times else 0
    return FewRowsTiles(warps, min(ahead, steps // warps * times), times, registers)


@launched(do_not_specialize=["tokens", "eps"])
def _few_rows(
    x,  # [tokens, G, K]
    norm,  # [K], weight of the norm of x, if there is one
    weights,  # of each product [G * N, K]
    scales,
    ys,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    eps,
    STARTS: tl.constexpr,  # the first program of each product, and of none
    NS: tl.constexpr,
    RUNS: tl.constexpr,  # as of runs_alike
    K: tl.constexpr,
    ROUNDED: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the columns, one for a warp
    AHEAD: tl.constexpr,
    TIMES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    for i in tl.static_range(len(RUNS) - 1):
        if (program >= STARTS[RUNS[i]]) & (program < STARTS[RUNS[i + 1]]):
            weight = one_of(weights, program, STARTS, RUNS[i], RUNS[i + 1])
            scale = None if scales[RUNS[i]] is None else one_of(scales, program, STARTS, RUNS[i], RUNS[i + 1])
            y = one_of(ys, program, STARTS, RUNS[i], RUNS[i + 1])
            n = one_of(NS, program, STARTS, RUNS[i], RUNS[i + 1])
            start = one_of(STARTS, program, STARTS, RUNS[i], RUNS[i + 1])
            group = tl.program_id(1)
            _product(
                x + group * x_group, norm, weight, scale, y + group * n, group * n, (program - start) * (16 * TIMES),
                tokens, x_row, eps, n, K, ROUNDED[RUNS[i]], SPLITS, AHEAD, TIMES, OVERLAP,
            )  # fmt: skip


@triton.jit
def _product(
    x,
    norm,
    weight,
    scale,
    y,
    before,  # rows of the groups before this
    first,
    tokens,
    x_row,
    eps,
    n,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    TIMES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute TIMES * 16 rows of the product of one weight with all tokens, and store them to y."""
    STEPS: tl.constexpr = K // 128 // SPLITS
    BYTES: tl.constexpr = 2 if scale is None else 1
    tiles = _first_tiles(weight, before, first, n, K, SPLITS, BYTES, AHEAD)
    factors = _factors(scale, before + first, K, SPLITS)
    wait_for_inputs(OVERLAP)
    given = x + _places(tokens, x_row, K, SPLITS, BYTES)
    # inputs that are rounded are loaded a step early: rounding takes as long as a load
    EARLY: tl.constexpr = 1 if ROUND and TIMES == 1 else 0
    inputs = ()
    for j in tl.static_range(EARLY):
        inputs += (tl.load(given + j * 128),)
    root = _root(given, eps, K, SPLITS) if norm is not None else None
    rights, powers = (), ()
    for time in tl.static_range(TIMES):
        total = tl.zeros([SPLITS, 16, 8], tl.float32)
        for j in tl.static_range(STEPS):
            if time == 0:
                if j + EARLY < STEPS:
                    inputs += (tl.load(given + (j + EARLY) * 128),)
                right, power = _operand(inputs[j], norm, root, j, K, ROUND, SPLITS, BYTES)
                rights += (right,)
                powers += (power,)
            left = _left(tiles[0], scale is not None, ROUND, SPLITS, BYTES)
            if scale is None:
                total = add_exact_products(left, rights[j], total)
            elif ROUND:
                total += tl.dot(left, rights[j]) * (factors[j][:, None, None] * powers[j])
            else:
                total += tl.dot(left, rights[j]) * factors[j][:, None, None]
            waiting = ()
            for k in tl.static_range(len(tiles) - 1):
                waiting += (tiles[k + 1],)
            if time * STEPS + j + AHEAD < STEPS * TIMES:
                at = first + (time * STEPS + j + AHEAD) // STEPS * 16
                waiting += (_tile(weight, before, at, (j + AHEAD) % STEPS, n, K, SPLITS, BYTES),)
            tiles = waiting
        row, token = first + time * 16 + tl.arange(0, 16)[:, None], tl.arange(0, 8)[None]
        sums = tl.sum(total, 0).to(y.dtype.element_ty)
        place = y + token.to(tl.int64) * (tl.num_programs(1) * n) + row
        tl.store(place, sums, (token < tokens) & (row < n))


@triton.jit
def _first_tiles(
    weight,
    before,
    first,
    n,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BYTES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    STEPS: tl.constexpr = K // 128 // SPLITS
    tiles = ()
    for j in tl.static_range(AHEAD):
        tiles += (_tile(weight, before, first + j // STEPS * 16, j % STEPS, n, K, SPLITS, BYTES),)
    return tiles


@triton.jit
def _factors(scale, row, K: tl.constexpr, SPLITS: tl.constexpr):
    """Load the scales of each step [SPLITS], if there are any. All rows of a program are in one block of 128."""
    STEPS: tl.constexpr = K // 128 // SPLITS
    factors = ()
    if scale is not None:
        block = scale + row // 128 * (K // 128) + tl.arange(0, SPLITS) * STEPS
        for j in tl.static_range(STEPS):
            factors += (block_scales(tl.load(block + j)),)
    return factors


@triton.jit
def _root(given, eps, K: tl.constexpr, SPLITS: tl.constexpr):
    """Return the inverse RMS of each token, the norm's factor: [8, 1, 1]."""
    squares = tl.zeros([SPLITS, 8], tl.float32)
    for j in tl.static_range(K // 128 // SPLITS):
        values = tl.load(given + j * 128).to(tl.float32)
        squares += tl.sum(_by_token(values * values, SPLITS), 2)
    return tl.rsqrt(tl.sum(squares, 0) * (1.0 / K) + eps)[None, :, None]


@triton.jit
def _operand(
    inputs, norm, root, step, K: tl.constexpr, ROUND: tl.constexpr, SPLITS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Return a step's inputs, loaded from `_places`, as the right operand [SPLITS, 128, 8]; normed if `norm` is given.

    With ROUND the values are FP8 codes, and their scales are [SPLITS, 1, 8].
    """
    values = _by_token(inputs, SPLITS)
    power = 1.0
    if norm is not None:
        weights = _by_token(tl.load(norm + _places(1, 0, K, SPLITS, BYTES) + step * 128), SPLITS).to(tl.float32)
        values = (weights * (values.to(tl.float32) * root)).to(tl.bfloat16)
    if ROUND:
        values = values.to(tl.float32)
        scale = power_of_two_ceil(tl.maximum(tl.max(tl.abs(values), 2), FP8_FLOOR) * (1.0 / FP8_LARGEST))
        inverse = ((254 << 23) - scale).to(tl.float32, bitcast=True)
        values = (values * inverse[:, :, None]).to(tl.float8e4nv).to(tl.float16)
        power = scale.to(tl.float32, bitcast=True)[:, None]
    # [split, token, thread, piece, pair of blocks, block, columns of a thread in a block]
    by_thread = tl.reshape(values, (SPLITS, 8, 4, 2 * BYTES, 2, 2, 4 // BYTES))
    return tl.reshape(tl.permute(by_thread, (0, 3, 4, 5, 2, 6, 1)), (SPLITS, 128, 8)), power


@triton.jit
def _places(tokens, x_row, K: tl.constexpr, SPLITS: tl.constexpr, BYTES: tl.constexpr):
    """Return the offsets of a step of eight tokens from the first token, in the order of the threads that use them.

    The shape is [4 pieces * SPLITS * 8 tokens * 4 threads, 8 columns].
    """
    number = tl.arange(0, 4 * SPLITS * 32)
    piece, thread = number // (32 * SPLITS), number % 4
    column = thread * 16 + piece // 2 * 64 + piece % 2 * 8 if BYTES == 1 else thread * 8 + piece * 32
    # missing tokens repeat the last one
    token = tl.minimum(number // 4 % 8, tokens - 1)
    return (token * x_row + column + number // 32 % SPLITS * (K // SPLITS))[:, None] + tl.arange(0, 8)[None]


@triton.jit
def _by_token(values, SPLITS: tl.constexpr):
    """Reshape what was loaded from `_places` to [SPLITS, 8, 128], thread by thread."""
    shaped = tl.permute(tl.reshape(values, (4, SPLITS, 8, 4, 8)), (1, 2, 3, 0, 4))
    return tl.reshape(shaped, (SPLITS, 8, 128))


@triton.jit
def _tile(
    weight, before, first, step, n, K: tl.constexpr, SPLITS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Load a step of a weight: 16 rows in two halves, in pieces of 64 bytes: [2, 2 * BYTES, SPLITS, 8; piece]."""
    PIECE: tl.constexpr = 64 // BYTES
    number = tl.arange(0, 2 * 2 * BYTES * SPLITS * 8)
    # rows beyond the end repeat the last one
    row = before + tl.minimum(first + number // (8 * SPLITS * 2 * BYTES) * 8 + number % 8, n - 1)
    column = number // 8 % SPLITS * (K // SPLITS) + number // (8 * SPLITS) % (2 * BYTES) * PIECE + step * 128
    place = weight + row.to(tl.int64) * K + column
    return tl.load(place[:, None] + tl.arange(0, PIECE)[None], eviction_policy="evict_first")


@triton.jit
def _left(stored, CODED: tl.constexpr, ROUND: tl.constexpr, SPLITS: tl.constexpr, BYTES: tl.constexpr):
    """Return the values of a tile, [SPLITS, 16, 128].

    Codes become fp16, which can represent all e4m3 values, if the inputs are rounded, otherwise bf16.
    """
    values = stored
    if CODED:
        # to bf16 through fp32, which has fast instructions
        values = stored.to(tl.float16) if ROUND else stored.to(tl.float32).to(tl.bfloat16)
    # [half, piece, split, row, thread, pair of blocks, block, columns of a thread in a block]
    by_thread = tl.reshape(values, (2, 2 * BYTES, SPLITS, 8, 4, 2, 2, 4 // BYTES))
    return tl.reshape(tl.permute(by_thread, (2, 0, 3, 1, 5, 6, 4, 7)), (SPLITS, 16, 128))
