"""Block scales: FP8 and FP4 rounding of activations, dequantisation of stored weights, the Hadamard rotation.

Scales are powers of two (e8m0), the smallest with amax / scale inside the format: rounded up, never to nearest.
Source: official kernel.py (`act_quant`, `fp4_act_quant`), OCP Microscaling.
"""

import torch

from dsv4cli.kernels.block_scale import ref


def fp8_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """x rounded through e4m3 with one e8m0 scale per row and `block` consecutive columns.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Returns x's shape and dtype; every value is q * 2**k with q an
    e4m3 code, so exact in bf16. Codes round to nearest even; amax is at least 1e-4.
    """
    return ref.fp8_round(x, block)


def fp4_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """x rounded through e2m1 with one e8m0 scale per row and `block` consecutive columns.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Nearest, ties to the even code. Returns x's shape and dtype.
    """
    return ref.fp4_round(x, block)


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The fp32 values of a stored weight; the storage format follows from its dtype.

    weight: e4m3 [..., N, K] with scale e8m0 [..., ceil(N/128), ceil(K/128)], or int8 [..., N, K/2] (two e2m1 codes a
    byte, low nibble = even column) with scale e8m0 [..., N, K/32], or bf16 / fp32 [..., N, K] without scale.
    Returns fp32 [..., N, K]; every value of a quantised weight is exact in bf16.
    """
    return ref.dequantise(weight, scale)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H / sqrt(D), H the Hadamard matrix in Sylvester order.

    x: [..., D], D a power of two. Computed in fp32 and rounded once to x's dtype.
    """
    return ref.hadamard(x)
