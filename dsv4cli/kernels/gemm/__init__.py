"""Linears over weights as stored: products summed in fp32, one rounding to the activation's dtype.

FP8 and FP4 linears quantise their input first (block_scale.fp8_round with 128 columns); the rounded input and the
dequantised weight are exact in bf16, so the official per-block accumulation differs from these sums in order only.
Source: official kernel.py (`fp8_gemm`, `fp4_gemm`).
"""

import torch

from dsv4cli.kernels.gemm import ref


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x @ dequantise(weight, scale).T.

    x: [T, K] bf16 or fp32, already rounded where the format asks for it. weight, scale: as block_scale.dequantise.
    Returns [T, N] in x's dtype, summed in fp32 without TF32 and rounded once.
    """
    return ref.linear(x, weight, scale)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32(x) @ fp32(weight).T not rounded to the activation's dtype: x [T, K], weight [N, K] -> fp32 [T, N]."""
    return ref.linear_fp32(x, weight)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """One linear per group: x [T, G, K], weight [G * N, K] (rows of group g from g * N) -> [T, G, N] in x's dtype."""
    return ref.grouped_linear(x, weight, scale)
