"""Linears of bf16 rows in Triton: exact products on tensor cores, summed in fp32; weights in bf16 or FP8."""

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel.dequant import bits, block_scales
from dsv4cli.kernels.gemm.kernel.tiled_fp8 import FULL, add, parts, place
from dsv4cli.kernels.launch import cdiv, described, launched

DEPTH = 64


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether tensor descriptors support x [T, G, K].

    Rows must be multiples of 16 bytes, and groups must be adjacent in whole blocks.
    """
    groups, width = x.shape[1:]
    beside = groups == 1 or (x.stride(1) == width and width % FP8_BLOCK == 0)
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return beside and aligned and width % 16 == 0 and x.stride(0) % 8 == 0


def linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute y [T, G, N] = x [T, G, K] times the matrices of weight [G * N, K]."""
    (tokens, groups, width), features = x.shape, y.shape[2]
    rows, columns, warps, stages = best_tile(tokens, groups, features)
    tiles, steps = cdiv(tokens, rows) * cdiv(features, columns), cdiv(width, DEPTH)
    splits = parts(tiles * groups, steps)
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    _tiles[tiles, groups, splits](
        described_rows(x, rows, DEPTH), described(weight, weight.shape, weight.stride(), [columns, DEPTH]), sums,
        tokens, features, width, rows, columns, DEPTH, steps // splits, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return add(sums, y)


def coded(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute `linear` with a weight of e4m3 codes and its scale, on a GPU with FP8."""
    (tokens, groups, width), features = x.shape, y.shape[2]
    columns, stages = (64, 4) if tokens <= 64 else (128, 3)  # measured on an H200 at wo_a of Flash
    tiles, steps = cdiv(features, 64) * cdiv(tokens, columns), cdiv(width, FP8_BLOCK)
    splits = parts(tiles * groups, steps)
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    _coded_tiles[tiles, groups, splits](
        described_rows(x, columns, FP8_BLOCK), described(weight, weight.shape, weight.stride(), [64, FP8_BLOCK]),
        bits(scale), sums, tokens, features, width, 64, columns, steps // splits,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return add(sums, y)


def described_rows(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of x [T, G, K] as a matrix of blocks [rows, columns]."""
    tokens, groups, width = x.shape
    return described(x, (tokens, groups * width), (x.stride(0), 1), [rows, columns])


def best_tile(tokens: int, groups: int, features: int) -> tuple[int, int, int, int]:
    """Return a tile's tokens, features, warps and stages, measured on an H200 with the widths of Flash."""
    if cdiv(tokens, 128) * cdiv(features, 256) * groups >= FULL:
        return 128, 256, 8, 3
    return (128 if tokens > 64 else 64), 128, 4, 4


@launched(do_not_specialize=["tokens"])
def _tiles(
    x,  # descriptor of [tokens, G * K]
    weight,  # descriptor of [G * N, K]
    y,  # [tokens, G, N], or such sums of STEPS blocks of columns each, one after the other
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
):
    m, n = place(tl.program_id(0), tl.cdiv(tokens, BM), tl.cdiv(N, BN), 8)
    group, part = tl.program_id(1), tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(part * STEPS * BK, (part + 1) * STEPS * BK, BK):
        a, b = x.load([m * BM, group * K + k]), weight.load([group * N + n * BN, k])
        total = tl.dot(a, b.T, total)
    token, feature = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    y += (((part * tokens + token).to(tl.int64) * tl.num_programs(1) + group) * N)[:, None] + feature[None]
    tl.store(y, total.to(y.dtype.element_ty), (token < tokens)[:, None] & (feature < N)[None])


@launched(do_not_specialize=["tokens"])
def _coded_tiles(
    x,  # descriptor of [tokens, G * K]
    weight,  # descriptor of e4m3 [G * N, K]
    scale,  # [ceil(G * N / 128), ceil(K / 128)]
    y,  # [tokens, G, N], or such sums of STEPS blocks of columns each, one after the other
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STEPS: tl.constexpr,
):
    n, t = place(tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(tokens, BT), 8)
    group, part = tl.program_id(1), tl.program_id(2)
    feature, token = n * BN + tl.arange(0, BN), t * BT + tl.arange(0, BT)
    scale += (group * N + feature) // 128 * tl.cdiv(K, 128)
    total = tl.zeros([BN, BT], tl.float32)
    for block in range(part * STEPS, (part + 1) * STEPS):
        factor = block_scales(tl.load(scale + block, feature < N, other=0))
        a, b = weight.load([group * N + n * BN, block * 128]), x.load([t * BT, group * K + block * 128])
        # not dot(a, b, total): with a in registers, Triton 3.6 overwrites what the tensor cores are still reading
        total += tl.dot(a.to(tl.float32).to(tl.bfloat16), b.T) * factor[:, None]
    y += (((part * tokens + token).to(tl.int64) * tl.num_programs(1) + group) * N)[:, None] + feature[None]
    tl.store(y, tl.trans(total).to(y.dtype.element_ty), (token < tokens)[:, None] & (feature < N)[None])
