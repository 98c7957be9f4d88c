"""Linears over weights in their storage formats: products summed in fp32, one rounding to the activation's dtype.

FP8, FP4 and NVFP4 linears quantize their input first (block_scale.fp8_round with 128 columns). The rounded input and,
except with fp32 scales, the dequantized weight are exact in bf16, so the official per-block accumulation differs from
these sums only in order. Scales that bf16 cannot represent (fp32 scales of FP8, scale_2 of NVFP4) multiply the sums.
Source: official kernel.py (`fp8_gemm`, `fp4_gemm`).
Triton: requires consecutive columns of x (at most 16,384 for few rows) and contiguous weights. FP8 tensor cores
multiply a rounded bf16 input of more than 64 rows by FP8 weights. On Hopper they always sum 128 columns with only about
13 bits below the largest product (`SHORT_SUM`): the error is 1.2e-4 of a result before its rounding, and results are
6e-4 too small if all products have the same sign. On Hopper, int8 tensor cores multiply one bf16 row or two, of up to
16,384 columns, by GGUF blocks, unless rows must be exact (kernels/rows.py). They round inputs: the error is up to
2 ** -22 of the row's largest input, or 2 ** -127. A row with NaN or infinity has results of NaN.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from dsv4cli.kernels.card import BLACKWELL, HOPPER, card_of
from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.gemm import ref
from dsv4cli.kernels.norm import rms_norm
from dsv4cli.kernels.stored_matrix import StoredMatrix

# relative error of a sum of Hopper's FP8 tensor cores against fp32, before rounding (H200: 1.2e-4)
SHORT_SUM = 2**-13

# the linears of `project`: rounded_linear, linear and linear_fp32
Kind = Literal["rounded", "plain", "fp32"]


class Projection(NamedTuple):
    """One of the linears that `project` applies to the same input. An fp32 one requires a matrix without scales."""

    matrix: StoredMatrix
    kind: Kind


def sums_shortly(device: torch.device) -> bool:
    """Return whether Triton's rounded_linear has the error SHORT_SUM on this device.

    Applies to more than ROWS_ALIKE rows of bf16 and FP8 weights.
    """
    return device.type == "cuda" and HOPPER <= card_of(device).capability < BLACKWELL


def linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """Return x @ dequantise(weight, scale).T * scale_2 for the parts of a matrix.

    x: [T, K] bf16 or fp32, already rounded if the format requires it. Returns [T, N] in x's dtype, summed in fp32
    without TF32, multiplied by scale_2 in fp32 if there is one, and rounded once.
    """
    return choose(x, ref).linear(x, matrix)


def rounded_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """Return linear(block_scale.fp8_round(x, 128), matrix). x: [T, K], K a multiple of 128."""
    return choose(x, ref).rounded_linear(x, matrix)


def linear_fp32(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """Return linear(fp32(x), matrix), which is not rounded: x [T, K], a matrix [N, K] without scales -> fp32 [T, N]."""
    return choose(x, ref).linear_fp32(x, matrix)


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """Return one linear per group: x [T, G, K], matrix [G * N, K] without scale_2 -> [T, G, N] in x's dtype.

    Group g starts at row g * N of the matrix.
    """
    return choose(x, ref).grouped_linear(x, matrix)


def project_one(x: torch.Tensor, item: Projection) -> torch.Tensor:
    """Return the output of one linear over x [T, K]."""
    if item.kind == "fp32":
        return linear_fp32(x, item.matrix)
    return (rounded_linear if item.kind == "rounded" else linear)(x, item.matrix)


def project(
    x: torch.Tensor, items: Sequence[Projection], norm: tuple[torch.Tensor, float] | None = None
) -> list[torch.Tensor]:
    """Return the outputs of several linears over one input x [T, K], in the order of `items`.

    norm: weight and eps of an RMS norm, applied to x first; not with fp32 linears.
    """
    if any(one.matrix.scale_2 is not None for one in items):
        x = x if norm is None else rms_norm(x, *norm)
        return [project_one(x, one) for one in items]
    groups: dict[Kind, list[StoredMatrix]] = {"rounded": [], "plain": [], "fp32": []}
    for matrix, kind in items:
        groups[kind].append(matrix)
    rounded, plain, fp32 = groups.values()
    outputs = linears(x, rounded, plain, fp32) if norm is None else (*normed_linears(x, *norm, rounded, plain), [])
    of_kind = dict(zip(groups, map(iter, outputs), strict=True))
    return [next(of_kind[kind]) for _, kind in items]


def linears(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix] = (),
    plain: Sequence[StoredMatrix] = (),
    fp32: Sequence[StoredMatrix] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return several linears over one input x [T, K], with matrices without scale_2.

    Few tokens take one or two launches; for many, x is rounded only once.

    Returns rounded_linear of each matrix in `rounded`, linear of each in `plain`, linear_fp32 of each in `fp32`.
    """
    return choose(x, ref).linears(x, rounded, plain, fp32)


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[StoredMatrix] = (),
    plain: Sequence[StoredMatrix] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return several linears over norm.rms_norm(x, norm_weight, eps). x: [T, K]. One launch for one token.

    Returns rounded_linear of each matrix in `rounded` and linear of each in `plain`. No matrix has a scale_2.
    """
    return choose(x, ref).normed_linears(x, norm_weight, eps, rounded, plain)
