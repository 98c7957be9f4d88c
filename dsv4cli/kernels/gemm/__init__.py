"""Linears over weights in their storage formats: products summed in fp32, one rounding to the activation's dtype.

FP8, FP4 and NVFP4 linears quantize their input first (block_scale.fp8_round with 128 columns). The rounded input and,
except with fp32 scales, the dequantized weight are exact in bf16, so the official per-block accumulation differs from
these sums only in order. Scales that bf16 cannot represent (fp32 scales of FP8, scale_2 of NVFP4) multiply the sums.
Source: official kernel.py (`fp8_gemm`, `fp4_gemm`).
Triton: requires consecutive columns of x (at most 16,384 for few rows) and contiguous weights. FP8 tensor cores
multiply a rounded bf16 input of more than 64 rows by FP8 weights. On Hopper they always sum 128 columns with only about
13 bits below the largest product (`SHORT_SUM`): the error is 1.2e-4 of a result before its rounding, and results are
6e-4 too small if all products have the same sign.
"""

from collections.abc import Sequence

import torch

from dsv4cli.kernels.card import BLACKWELL, HOPPER, card_of
from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.gemm import ref

# relative error of a sum of Hopper's FP8 tensor cores against fp32, before rounding (H200: 1.2e-4)
SHORT_SUM = 2**-13


def sums_shortly(device: torch.device) -> bool:
    """Return whether Triton's rounded_linear has the error SHORT_SUM on this device.

    Applies to more than ROWS_ALIKE rows of bf16 and FP8 weights.
    """
    return device.type == "cuda" and HOPPER <= card_of(device).capability < BLACKWELL


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ dequantise(weight, scale).T * scale_2.

    Args:
        x: [T, K] bf16 or fp32, already rounded if the format requires it.
        weight, scale: as for block_scale.dequantise.
        scale_2: fp32 [] of NVFP4; multiplies the sum in fp32.

    Returns [T, N] in x's dtype, summed in fp32 without TF32 and rounded once.
    """
    return choose(x, ref).linear(x, weight, scale, scale_2)


def rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """Return linear(block_scale.fp8_round(x, 128), weight, scale, scale_2). x: [T, K], K a multiple of 128."""
    return choose(x, ref).rounded_linear(x, weight, scale, scale_2)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return fp32(x) @ fp32(weight).T without rounding to x's dtype: x [T, K], weight [N, K] -> fp32 [T, N]."""
    return choose(x, ref).linear_fp32(x, weight)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return one linear per group: x [T, G, K], weight [G * N, K] -> [T, G, N] in x's dtype.

    Group g starts at row g * N of the weight.
    """
    return choose(x, ref).grouped_linear(x, weight, scale)


def linears(
    x: torch.Tensor,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = (),
    fp32: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return several linears over one input x [T, K].

    Few tokens take one or two launches; for many, x is rounded only once.

    Returns rounded_linear of each weight and scale in `rounded`, linear of each in `plain`, linear_fp32 of each weight
    in `fp32`.
    """
    return choose(x, ref).linears(x, rounded, plain, fp32)


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return several linears over norm.rms_norm(x, norm_weight, eps). x: [T, K]. One launch for one token.

    Returns rounded_linear of each weight and scale in `rounded` and linear of each in `plain`.
    """
    return choose(x, ref).normed_linears(x, norm_weight, eps, rounded, plain)
