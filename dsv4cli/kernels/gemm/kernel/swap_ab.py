"""Linears of up to 64 rows in Triton on tensor cores, with swapped operands: the weight's rows are the product's rows.

FP8 codes are multiplied as fp16 or bf16, which hold them exactly, and summed over 128 columns, then in fp32. FP8 tensor
cores would be 3 to 10 % faster, but keep only about 13 bits of their sums (H200: an error of 1.25e-4 of the result
instead of 1e-6). With them, the tests' recorded models differ three times as much from their recordings as rounding
explains.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale import kernel as block_scale
from dsv4cli.kernels.block_scale.kernel import FP8_FLOOR, FP8_LARGEST, scaled_blocks
from dsv4cli.kernels.card import has_fp8
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel.dequant import (
    Product,
    add_exact_products,
    bits,
    block_scales,
    first_programs,
    one_of,
    runs_alike,
)
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.workspace import words

# most tokens: one tile
MOST = 64
# most tokens for which each program rounds its input itself
OWN = 16
# columns of a step: one block of FP8 scales
_STEP = tl.constexpr(128)
# most tiles of a launch that several programs share: `swap_tiles` splits up to 512, and each product may end with one
_MOST_SHARED = 1024


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether x [T, G, K] times the matrices of `weight` is supported: bf16 with 16 bits or FP8, whole tiles."""
    if x.dtype != torch.bfloat16 or x.shape[0] > MOST:
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16) and not (weight.dtype == torch.float8_e4m3fn and has_fp8(x)):
        return False
    return x.shape[1] == 1 or weight.shape[0] // x.shape[1] % 128 == 0


def multiply(x: torch.Tensor, products: Sequence[Product], results: list[torch.Tensor], tiles: "SwapTiles") -> None:
    """Multiply x bf16 [T, G, K] by each weight [G * N, K] into its result [T, G, N]."""
    tokens, groups, width = x.shape
    rows, splits, stages, warps = tiles
    numbers = tuple(y.shape[-1] for y in results)
    starts = first_programs(cdiv(n, rows) for n in numbers)
    columns = max(16, next_power_of_2(tokens))
    parts = torch.empty(starts[-1] * groups * splits if splits > 1 else 0, rows, columns, device=x.device)
    coded = block_scale.fp8_round(x[:, 0], FP8_BLOCK) if tokens > OWN and any(p.rounded for p in products) else None
    _swap_ab[(starts[-1], groups, splits)](
        x, coded, tuple(p.matrix.weight for p in products), tuple(bits(p.matrix.scale) for p in products),
        tuple(results), parts, words(x.device, _MOST_SHARED), tokens, x.stride(0), x.stride(1), starts, numbers,
        runs_alike(products), width, tuple(p.rounded for p in products), cdiv(cdiv(width, _STEP.value), splits), rows,
        columns, splits, stages, num_warps=warps, **overlap(x),
    )  # fmt: skip


class SwapTiles(NamedTuple):
    """Rows of a tile, programs that share a tile, stages and warps."""

    rows: int
    splits: int
    stages: int
    warps: int


def swap_tiles(x: torch.Tensor, products: Sequence[Product]) -> SwapTiles:
    """Return the fastest tiles measured on an H200."""
    tokens, steps = x.shape[0], cdiv(x.shape[2], _STEP.value)
    coded = [p.matrix.scale is not None for p in products]
    tiles = sum(cdiv(p.matrix.weight.shape[0], 128) for p in products)
    if tokens <= OWN and any(coded) and tiles * steps >= 1024:
        splits = _splits(tiles, 256, steps // 4 if steps > 8 else 1)
        return SwapTiles(128, splits, 3 if all(coded) else 2, 8)
    if tokens > 32 and coded == [True] and tiles * steps >= 1024:
        return SwapTiles(128, _splits(tiles, 128, steps // 4), 3, 8)
    if tokens > 32 and any(coded) and not all(coded):
        rows, warps = (128, 8) if tiles > 24 else (64, 4)
        return SwapTiles(rows, _splits(tiles * (128 // rows), 128, steps // 8), 3, warps)
    splits = _splits(2 * tiles, 512, steps // 8)
    splits = splits if 2 * tiles * splits >= 256 else _splits(2 * tiles, 256, steps // 4)
    return SwapTiles(64, splits, 3, 4)


def _splits(tiles: int, programs: int, most: int) -> int:
    """Return the smallest power of two with at least this many programs, or the largest up to `most`."""
    splits = 1
    while tiles * splits < programs and 2 * splits <= most:
        splits *= 2
    return splits


@launched(do_not_specialize=["tokens"])
def _swap_ab(
    x,  # [tokens, G, K]
    coded,  # contiguous [tokens, K]: x rounded, where programs do not round it
    weights,  # of each product [G * N, K]
    scales,
    ys,  # [tokens, G, N]
    parts,  # [G, tiles, SPLITS, BN, BT] fp32
    arrived,  # int32 [_MOST_SHARED], zeros: of each shared tile, how many of its programs are done
    tokens,
    x_row,
    x_group,
    STARTS: tl.constexpr,  # the first tile of each product, and of none
    NS: tl.constexpr,
    RUNS: tl.constexpr,  # as of runs_alike
    K: tl.constexpr,
    ROUNDED: tl.constexpr,
    STEPS: tl.constexpr,  # of a program
    BN: tl.constexpr,
    BT: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.arange(0, BT)
    given = x + token[:, None] * x_row + group * x_group
    shared = group * tl.num_programs(0) + tile
    wait_for_inputs(OVERLAP)
    parts += shared.to(tl.int64) * (SPLITS * BN * BT) + tl.arange(0, BN)[:, None] * BT + token[None]
    OWN: tl.constexpr = coded is None
    for i in tl.static_range(len(RUNS) - 1):
        if (tile >= STARTS[RUNS[i]]) & (tile < STARTS[RUNS[i + 1]]):
            weight = one_of(weights, tile, STARTS, RUNS[i], RUNS[i + 1])
            scale = None if scales[RUNS[i]] is None else one_of(scales, tile, STARTS, RUNS[i], RUNS[i + 1])
            y = one_of(ys, tile, STARTS, RUNS[i], RUNS[i + 1])
            n = one_of(NS, tile, STARTS, RUNS[i], RUNS[i + 1])
            start = one_of(STARTS, tile, STARTS, RUNS[i], RUNS[i + 1])
            row = (tile - start) * BN + tl.arange(0, BN)
            if scale is not None:
                # all rows are in one block of 128
                scale += (group * n + (tile - start) * BN) // 128 * ((K + 127) // 128)
            source = given if OWN or not ROUNDED[RUNS[i]] else coded + token[:, None] * K
            total = _sums(
                source, weight + (group * n + row).to(tl.int64)[:, None] * K, scale, split * STEPS, token < tokens,
                row < n, K, ROUNDED[RUNS[i]] and OWN, STEPS, STAGES,
            )  # fmt: skip
            y += (token[None] * tl.num_programs(1) + group).to(tl.int64) * n + row[:, None]
            inside = (token < tokens)[None] & (row < n)[:, None]
            if SPLITS == 1:
                tl.store(y, total.to(y.dtype.element_ty), inside)
            else:
                tl.store(parts + split * (BN * BT), total)
                tl.debug_barrier()  # until all threads have stored, before the count
                if tl.atomic_add(arrived + shared, 1, sem="acq_rel") == SPLITS - 1:
                    total = tl.zeros([BN, BT], tl.float32)
                    for j in tl.static_range(SPLITS):
                        total += tl.load(parts + j * (BN * BT), cache_modifier=".cg")
                    tl.store(y, total.to(y.dtype.element_ty), inside)
                    tl.store(arrived + shared, 0)


@triton.jit
def _sums(
    x,  # [BT, 1] pointers to the tokens
    weight,  # [BN, 1] pointers to the rows
    scale,
    first,
    is_token,
    is_row,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return fp32 [BN, BT]: the sums over STEPS steps from `first` on."""
    total = tl.zeros([weight.shape[0], x.shape[0]], tl.float32)
    for step in tl.range(first, tl.minimum(first + STEPS, (K + 127) // 128), num_stages=STAGES):
        column = step * _STEP + tl.arange(0, _STEP)[None]
        values = tl.load(weight + column, is_row[:, None] & (column < K), other=0.0)
        given = tl.load(x + column, is_token[:, None] & (column < K), other=0.0)
        if scale is None:
            total += add_exact_products(values, tl.trans(given), tl.zeros_like(total))
        elif ROUND:
            given, power = scaled_blocks(given.to(tl.float32), FP8_FLOOR, FP8_LARGEST)
            factor = power.to(tl.float32, bitcast=True) * block_scales(tl.load(scale + step))
            # fp16 can represent all e4m3 values, and the GPU has an instruction for the conversion
            codes = tl.trans(given.to(tl.float8e4nv).to(tl.float16))
            total += tl.dot(values.to(tl.float16), codes) * tl.trans(factor)
        else:
            # through fp32, which has fast instructions
            values = values.to(tl.float32).to(tl.bfloat16)
            total += tl.dot(values, tl.trans(given)) * block_scales(tl.load(scale + step))
    return total
