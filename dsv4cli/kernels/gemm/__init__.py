"""Linears over weights as stored: products summed in fp32, one rounding to the activation's dtype.

FP8, FP4 and NVFP4 linears quantise their input first (block_scale.fp8_round with 128 columns); the rounded input and,
but for fp32 scales, the dequantised weight are exact in bf16: the official per-block accumulation differs from these
sums in order only. Scales that bf16 does not have, fp32 ones of FP8 and scale_2 of NVFP4, multiply sums.
Source: official kernel.py (`fp8_gemm`, `fp4_gemm`).
Triton: consecutive columns of x, for few rows up to 16,384, and whole weights. FP8 tensor cores, which multiply a
rounded bf16 input of more than 64 rows with FP8 weights, sum 128 columns with about 13 bits below their largest
product, as everywhere on Hopper (`SHORT_SUM`): 1.2e-4 of a result's size before its rounding, 6e-4 too small where all
products have one sign.
"""

from collections.abc import Sequence

import torch

from dsv4cli.kernels.card import BLACKWELL, HOPPER, card_of
from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.gemm import ref

# how far, of its size, a sum of Hopper's FP8 tensor cores lies from that of fp32, before its rounding (H200: 1.2e-4)
SHORT_SUM = 2**-13


def sums_shortly(device: torch.device) -> bool:
    """Whether Triton's rounded_linear of bf16 rows and FP8 weights sums so on this device, where it has more than
    ROWS_ALIKE rows."""
    return device.type == "cuda" and HOPPER <= card_of(device).capability < BLACKWELL


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ dequantise(weight, scale).T * scale_2.

    x: [T, K] bf16 or fp32, already rounded where the format asks for it. weight, scale: as block_scale.dequantise.
    scale_2: fp32 [], of NVFP4; it multiplies the sum in fp32. Returns [T, N] in x's dtype, summed in fp32 without TF32
    and rounded once.
    """
    return choose(x, ref).linear(x, weight, scale, scale_2)


def rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """linear(block_scale.fp8_round(x, 128), weight, scale, scale_2): x [T, K], K a multiple of 128."""
    return choose(x, ref).rounded_linear(x, weight, scale, scale_2)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32(x) @ fp32(weight).T not rounded to the activation's dtype: x [T, K], weight [N, K] -> fp32 [T, N]."""
    return choose(x, ref).linear_fp32(x, weight)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """One linear per group: x [T, G, K], weight [G * N, K] (rows of group g from g * N) -> [T, G, N] in x's dtype."""
    return choose(x, ref).grouped_linear(x, weight, scale)


def linears(
    x: torch.Tensor,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = (),
    fp32: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Several linears over one input x [T, K], of few tokens in one or two launches, of many with x rounded once.

    Returns rounded_linear of each weight and scale of `rounded`, linear of each of `plain`, linear_fp32 of each weight
    of `fp32`.
    """
    return choose(x, ref).linears(x, rounded, plain, fp32)


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Several linears over norm.rms_norm(x, norm_weight, eps), x [T, K], of one token in one launch.

    Returns rounded_linear of each weight and scale of `rounded` and linear of each of `plain`.
    """
    return choose(x, ref).normed_linears(x, norm_weight, eps, rounded, plain)
