"""Linears over FP8 codes in Triton: products on FP8 tensor cores, block scales applied in fp32.

Hopper's FP8 tensor cores keep about 14 bits of a sum that they accumulate. So a tile's products are summed there over
128 columns only, then scaled and added to an fp32 sum outside, as in the official kernel and in DeepGEMM.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4cli.kernels.card import HOPPER, is_from
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel.dequant import bits, block_scales, e8m0_values
from dsv4cli.kernels.launch import cdiv, described, launched

# programs that fill the GPU, and the fewest tokens for larger tiles
FULL, MANY = 128, 1024
# most steps over columns that are not split, because of the second launch, and the fewest steps of a part
SHORT, LEAST = 16, 8


def multiplies(x: torch.Tensor) -> bool:
    """Return whether codes of x use FP8 tensor cores: bf16 on NVIDIA GPUs since Hopper, and in the interpreter."""
    return is_from(x.device, HOPPER) and x.dtype == torch.bfloat16


def linear(codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return (codes * scale) @ dequantise(weight, weight_scale).T in bf16.

    codes, scale: from fp8_codes with blocks of 128.
    """
    (tokens, width), features = codes.shape, weight.shape[0]
    y = torch.empty(tokens, features, dtype=torch.bfloat16, device=codes.device)
    if not tokens:
        return y
    rows, columns, halves, warps, stages = _tile(tokens, features, width)
    tiles, blocks = cdiv(tokens, rows) * cdiv(features, columns), width // FP8_BLOCK
    splits = parts(tiles, blocks)
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    _tiles[tiles, splits](
        _described(codes, rows), scale.view(torch.uint8), _described(weight, columns // halves),
        bits(weight_scale), sums, tokens, features, width, rows, columns // halves, halves == 2,
        blocks // splits, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return add(sums, y)


def _described(codes: torch.Tensor, rows: int) -> TensorDescriptor:
    if not codes.is_contiguous() or codes.data_ptr() % 16:
        raise KernelUnsupported("the Triton FP8 linear requires whole matrices that start at a multiple of 16 bytes")
    return described(codes, codes.shape, codes.stride(), [rows, FP8_BLOCK])


def _tile(tokens: int, features: int, width: int) -> tuple[int, int, int, int, int]:
    """Return a tile's tokens and features, the number of parts of its features, its warps and stages.

    Measured on an H200 with the widths of Flash. With two halves of 64 features, two programs of 8 warps have enough
    registers to share a multiprocessor. If rows are short, start and end of a program weigh more, and smaller programs
    win.
    """
    if tokens <= 128:
        return (64, 128, 1, 4, 4) if features >= 128 * FULL else (64, 64, 1, 4, 5)
    full = cdiv(tokens, 128) * cdiv(features, 128) >= FULL
    if width <= 1024:
        return 64, 128, 1, 4, 3
    return (128, 128, 2, 8, 3) if tokens >= MANY and full else (64, 128, 1, 4, 4)


def parts(tiles: int, steps: int) -> int:
    """Return into how many equal parts to split the steps over columns so that the tiles fill the GPU."""
    most = 1 if steps <= SHORT else max(1, min(cdiv(FULL, tiles), steps // LEAST))
    return next(count for count in range(most, 0, -1) if steps % count == 0)


def add(sums: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return y. Unless `sums` is y itself, fill y with the sums [parts, ...], added in order and rounded once."""
    if sums is not y:
        _add[cdiv(y.numel(), 1024),](sums, y, y.numel(), sums.shape[0], 1024, num_warps=4)
    return y


@triton.jit
def place(number, rows, columns, GROUP: tl.constexpr):
    """Return the row and column of a tile.

    Numbers run down GROUP rows, then to the next column, so that tiles with close numbers share data.
    """
    first = number // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inner = number % (GROUP * columns)
    return first + inner % height, inner // height


@launched(do_not_specialize=["tokens"])
def _tiles(
    x,  # descriptor of e4m3 [tokens, K]
    x_scale,  # [tokens, K / 128]
    weight,  # descriptor of e4m3 [N, K]
    weight_scale,  # [ceil(N / 128), K / 128]
    y,  # [tokens, N], or such sums of BLOCKS blocks of columns each, one after the other
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TWICE: tl.constexpr,  # whether a program takes another BN features
    BLOCKS: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * BN if TWICE else BN  # divides 128: a program has features of one block
    m, n = place(tl.program_id(0), tl.cdiv(tokens, BM), tl.cdiv(N, WIDTH), 64)
    row, column = m * BM + tl.arange(0, BM), n * WIDTH + tl.arange(0, BN)
    part = tl.program_id(1) if BLOCKS < K // 128 else 0
    x_scale += row * (K // 128)
    weight_scale += n * WIDTH // 128 * (K // 128)
    total, more = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for block in range(part * BLOCKS, (part + 1) * BLOCKS):
        a, b = x.load([m * BM, block * 128]), weight.load([n * WIDTH, block * 128])
        factor = e8m0_values(tl.load(x_scale + block, row < tokens, other=0))
        factor = (factor * block_scales(tl.load(weight_scale + block)))[:, None]
        if TWICE:
            c = weight.load([n * WIDTH + BN, block * 128])
            total += tl.dot(a, b.T) * factor
            more += tl.dot(a, c.T) * factor
        else:
            total += tl.dot(a, b.T) * factor
    y += (part * tokens + row).to(tl.int64)[:, None] * N + column[None]
    tl.store(y, total.to(y.dtype.element_ty), (row < tokens)[:, None] & (column < N)[None])
    if TWICE:
        tl.store(y + BN, more.to(y.dtype.element_ty), (row < tokens)[:, None] & (column + BN < N)[None])


@launched(do_not_specialize=["count"])
def _add(sums, y, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums + at, at < count, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * count.to(tl.int64) + at, at < count, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), at < count)
