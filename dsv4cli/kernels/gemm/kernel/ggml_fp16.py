"""Linears of many bf16 rows over GGUF blocks: each matrix is decoded once to fp16, then multiplied on tensor cores.

Decoding in the tiles of a product would decode each block once per tile of rows. A part of a matrix and a part of the
inputs, each of up to PART values, are in fp16 at a time.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from dsv4cli.kernels.gemm.kernel.tiled_bf16 import DEPTH, best_tile, described_rows
from dsv4cli.kernels.gemm.kernel.tiled_fp8 import add, parts, place
from dsv4cli.kernels.ggml.kernel.fp16 import decoded_halves, input_halves, row_shifts, unshifted
from dsv4cli.kernels.ggml.kernel.octets import KernelBlocks
from dsv4cli.kernels.ggml.scratch import PART
from dsv4cli.kernels.launch import cdiv, described, launched

# fewest rows of x for which decoding to memory is faster (H200, Q8_0, 64 rows, in us: 4,096 x 8,192 78 instead of 189;
# 1,024 x 4,096 21 instead of 98; 32,768 x 1,024 67 instead of 61)
LEAST = 17


def takes(x: torch.Tensor) -> bool:
    """Return whether `multiply` supports x [T, G, K], and is the fastest for it."""
    tokens, groups, width = x.shape
    return x.dtype == torch.bfloat16 and tokens >= LEAST and width % (8 if groups == 1 else DEPTH) == 0


def multiply(x: torch.Tensor, pairs: Sequence[tuple[KernelBlocks, torch.Tensor]]) -> None:
    """Compute y [T, G, N] = x [T, G, K] times each matrix [G * N, K].

    For y in bf16, products have an error of up to 2 ** -11, an eighth of the result's rounding; for y in fp32, which is
    not rounded, values are the sums of two fp16 numbers, and products have an error of up to 2 ** -22.
    """
    (tokens, groups, width), most = x.shape, PART // (x.shape[1] * x.shape[2])
    together = max(most // 128 * 128, 128)
    inputs = input_halves(x) if tokens <= together else None
    for blocks, y in pairs:
        features, shifts = y.shape[2], row_shifts(blocks, width).view(groups, -1)
        numbers = 2 if y.dtype == torch.float32 else 1
        rows = max(most // numbers // 256 * 256, 256)
        for first in range(0, features, rows):
            some = shifts[:, first : first + rows].contiguous()
            weight = torch.empty(numbers, *some.shape, width, dtype=torch.float16, device=x.device)
            decoded_halves(blocks, some, weight, first)
            for start in range(0, tokens, together):
                part = y[start : start + together, :, first : first + rows]
                # no part outlives its call, so that one of each is in memory
                _multiply_part(*(inputs or input_halves(x[start : start + together])), weight, some, part)
            del weight


def _multiply_part(
    x: torch.Tensor, x_shifts: torch.Tensor, weight: torch.Tensor, shifts: torch.Tensor, y: torch.Tensor
) -> None:
    (tokens, groups, width), features = x.shape, y.shape[2]
    twice = len(weight) == 2
    rows, columns, warps, stages = (128 if tokens > 64 else 64, 128, 8, 3) if twice else best_tile(*y.shape)
    tiles, steps = cdiv(tokens, rows) * cdiv(features, columns), cdiv(width, DEPTH)
    splits = parts(tiles * groups, steps) if y.is_contiguous() else 1
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    matrix = weight.view(-1, width)
    _half_tiles[tiles, groups, splits](
        described_rows(x, rows, DEPTH), x_shifts, described(matrix, matrix.shape, matrix.stride(), [columns, DEPTH]),
        shifts, sums, tokens, y.stride(0), y.stride(1), features, width, twice, rows, columns, DEPTH, steps // splits,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    add(sums, y)


@launched(do_not_specialize=["tokens"])
def _half_tiles(
    x,  # descriptor of fp16 [tokens, G * K]
    x_shifts,  # int32 [tokens, G]
    weight,  # descriptor of fp16 [G * N, K]; if TWICE, of two such parts
    shifts,  # int32 [G * N]
    y,  # [tokens, G, N], or such sums of STEPS blocks of columns each, one after the other
    tokens,
    y_row,
    y_group,
    N: tl.constexpr,
    K: tl.constexpr,
    TWICE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
):
    m, n = place(tl.program_id(0), tl.cdiv(tokens, BM), tl.cdiv(N, BN), 8)
    group, groups, part = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(part * STEPS * BK, (part + 1) * STEPS * BK, BK):
        a, b = x.load([m * BM, group * K + k]), weight.load([group * N + n * BN, k])
        total = tl.dot(a, b.T, total)
        if TWICE:
            rest = weight.load([(groups + group) * N + n * BN, k])
            total = tl.dot(a, rest.T, total)
    token, feature = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    x_shift = tl.load(x_shifts + token * groups + group, token < tokens, other=0)
    shift = tl.load(shifts + group * N + feature, feature < N, other=0)
    total = unshifted(total, x_shift[:, None] + shift[None])
    y += ((part * tokens + token).to(tl.int64) * y_row + group * y_group)[:, None] + feature[None]
    tl.store(y, total.to(y.dtype.element_ty), (token < tokens)[:, None] & (feature < N)[None])
