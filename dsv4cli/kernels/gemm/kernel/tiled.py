"""Linears of many rows in Triton: tiles of the result on tensor cores.

The functions of ref.py for more rows than gemv.py supports. Rounded inputs use FP8 tensor cores, whose less precise
sums are accepted for their speed: tiled_fp8.py, or warp_specialized.py on Hopper if hopper.py selects it. Everything
else is multiplied in bf16 by tiled_bf16.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale import kernel as block_scale
from dsv4cli.kernels.card import has_fp8
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel import hopper, tiled_bf16, tiled_fp8
from dsv4cli.kernels.gemm.kernel.dequant import bits, block_scales, e2m1_values, e4m3_values, e8m0_values
from dsv4cli.kernels.gemm.kernel.tiled_fp8 import place
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.stored_matrix import StoredMatrix

# above this many tokens, a launch that converts an FP8 weight to bf16 pays off (H200, wo_a of Flash); for FP4 it always
# does
MANY = 512


def linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _product(x[:, None], matrix, x.dtype)[:, 0]


def rounded_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return linears(x, [matrix], (), ())[0][0]


def linear_fp32(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _product(x[:, None], matrix, torch.float32)[:, 0]


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _product(x, matrix, x.dtype)


def linears(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
    fp32: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    codes = rounding = None
    results = []
    for matrix in rounded:
        weight, scale, _ = matrix
        if weight.dtype == torch.float8_e4m3fn and tiled_fp8.multiplies(x):
            assert scale is not None
            codes = block_scale.fp8_codes(x, FP8_BLOCK) if codes is None else codes
            product = hopper if hopper.suits(codes[0], weight) else tiled_fp8
            results.append(product.linear(*codes, weight, scale))
        else:
            rounding = block_scale.fp8_round(x, FP8_BLOCK) if rounding is None else rounding
            results.append(linear(rounding, matrix))
    return results, [linear(x, matrix) for matrix in plain], [linear_fp32(x, matrix) for matrix in fp32]


def _product(x: torch.Tensor, matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return x [T, G, K] times each group of a matrix without scale_2, as grouped_linear, in `dtype`."""
    weight, scale, _ = matrix
    (tokens, groups, width), features = x.shape, weight.shape[0] // x.shape[1]
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise KernelUnsupported(f"the Triton linear requires whole weights and consecutive columns, not {x.stride()}")
    y = torch.empty(tokens, groups, features, dtype=dtype, device=x.device)
    if not tokens:
        return y
    bf16 = x.dtype == torch.bfloat16 and weight.dtype != torch.float32
    # codes times fp32 scales are not exact in bf16, so the scales multiply the sums
    late = scale is not None and scale.dtype == torch.float32
    if bf16 and (has_fp8(x) or not late) and tiled_bf16.takes(x, weight):
        if scale is None:
            return tiled_bf16.linear(x, weight, y)
        if late or (weight.dtype != torch.int8 and tokens <= MANY and has_fp8(x)):
            return tiled_bf16.coded(x, weight, scale, y)
        return tiled_bf16.linear(x, widened(weight, scale), y)
    factor = tl.bfloat16 if bf16 and not late else tl.float32
    _tiles[cdiv(features, 64) * cdiv(tokens, 64), groups](
        x, bits(weight), bits(scale), y, tokens, x.stride(0), x.stride(1), features, width,
        scale is not None, has_fp8(x), factor, 64, 64, 32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the bf16 values of a quantized weight; for NVFP4 without scale_2."""
    rows, width = weight.shape[0], weight.shape[1] * (1 if weight.dtype == torch.float8_e4m3fn else 2)
    if weight.dtype == torch.uint8:
        weight, scale = weight.view(torch.int8), scale.view(torch.int8)
    values = torch.empty(rows, width, dtype=torch.bfloat16, device=weight.device)
    _widen[cdiv(rows, 64), cdiv(width, 128)](
        bits(weight), bits(scale), values, rows, width, has_fp8(weight), 64, 128, num_warps=4
    )
    return values


@launched
def _widen(weight, scale, y, ROWS, K: tl.constexpr, HAS_FP8: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK
    values = _weights(weight, scale, row, k, row < ROWS, K, True, HAS_FP8, BN, BK)
    column = k + tl.arange(0, BK)
    tl.store(y + row[:, None] * K + column[None], values.to(tl.bfloat16), (row < ROWS)[:, None] & (column < K)[None])


@launched(do_not_specialize=["tokens"])
def _tiles(
    x,  # [tokens, G, K] with strides x_row, x_group, 1
    weight,  # [G * N, K] as stored
    scale,
    y,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    FACTOR: tl.constexpr,  # what both are multiplied as: bf16 where that is exact
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    n, t = place(tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(tokens, BT), 8)
    group = tl.program_id(1)
    feature, token = n * BN + tl.arange(0, BN), t * BT + tl.arange(0, BT).to(tl.int64)
    row = group.to(tl.int64) * N + feature
    x += token[None] * x_row + group * x_group
    total = tl.zeros([BN, BT], tl.float32)
    for k in range(0, K, BK):
        column = k + tl.arange(0, BK)[:, None]
        values = tl.load(x + column, (token < tokens)[None] & (column < K), other=0.0).to(FACTOR)  # [BK, BT]
        a = _weights(weight, scale, row, k, feature < N, K, SCALED, HAS_FP8, BN, BK).to(FACTOR)
        total += tl.dot(a, values, input_precision="ieee")  # not dot(a, values, total): see tiled_bf16.py
    y += (token * tl.num_programs(1) * N)[:, None] + row[None]
    tl.store(y, tl.trans(total).to(y.dtype.element_ty), (token < tokens)[:, None] & (feature < N)[None])


@triton.jit
def _weights(
    weight,
    scale,
    row,
    k,
    inside,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Load values [BN, BK] of a weight, fp32 or as stored: of the rows `row` that are `inside`, columns from k on."""
    if not SCALED:
        values = _columns(weight, row, inside, k, K, BK)
    elif weight.dtype.element_ty == tl.int8:
        pairs = _columns(weight, row, inside, k // 2, K // 2, BK // 2)
        # here, int8 scales are e4m3 and uint8 scales are e8m0
        BLOCK: tl.constexpr = 16 if scale.dtype.element_ty == tl.int8 else 32
        factor = _columns(scale, row, inside, k // BLOCK, K // BLOCK, BK // BLOCK)
        factor = e4m3_values(factor.to(tl.uint8, bitcast=True), False) if BLOCK == 16 else e8m0_values(factor)
        values = tl.reshape(tl.join(e2m1_values(pairs), e2m1_values(pairs >> 4)), [BN, BK // BLOCK, BLOCK])
        values = tl.reshape(values * factor[:, :, None], [BN, BK])
    else:
        factor = block_scales(tl.load(scale + row // 128 * tl.cdiv(K, 128) + k // 128, inside, other=0))
        values = e4m3_values(_columns(weight, row, inside, k, K, BK), HAS_FP8) * factor[:, None]
    return values


@triton.jit
def _columns(matrix, row, inside, first, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT columns from `first` on of the rows `row` of a matrix with WIDTH columns, 0 beyond its end."""
    column = first + tl.arange(0, COUNT)
    return tl.load(matrix + row[:, None] * WIDTH + column[None], inside[:, None] & (column < WIDTH)[None], other=0)
