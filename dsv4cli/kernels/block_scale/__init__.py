"""Block scales: FP8 and FP4 rounding of activations, dequantisation of stored weights, the Hadamard rotation.

Scales are powers of two (e8m0), the smallest with amax / scale inside the format: rounded up, never to nearest.
Source: official kernel.py (`act_quant`, `fp4_act_quant`), OCP Microscaling.
Triton: rows of any even spacing with consecutive columns (kernels/rows.py), blocks of a power of two; the same bits as
the reference; the result is contiguous.
"""

import torch

from dsv4cli.kernels.block_scale import ref
from dsv4cli.kernels.dispatch import choose


def fp8_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """x rounded through e4m3 with one e8m0 scale per row and `block` consecutive columns.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Returns x's shape and dtype; every value is q * 2**k with q an
    e4m3 code, so exact in bf16. Codes round to nearest even; amax is at least 1e-4.
    """
    return choose(x, ref).fp8_round(x, block)


def fp8_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of fp8_round: codes * scale == fp8_round(x, block), bit for bit where x is finite.

    x: as fp8_round. Returns codes e4m3 of x's shape and scale e8m0 [..., D / block], both contiguous.
    """
    return choose(x, ref).fp8_codes(x, block)


def fp4_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """x rounded through e2m1 with one e8m0 scale per row and `block` consecutive columns.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Nearest, ties to the even code. Returns x's shape and dtype.
    """
    return choose(x, ref).fp4_round(x, block)


def fp4_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of fp4_round: dequantise(codes, scale) is fp4_round(x, block), bit for bit if x is finite.

    x: as fp4_round. Returns codes int8 [..., D / 2] (two a byte, low nibble = even column) and scale e8m0
    [..., D / block], both contiguous; e2m1 has no NaN.
    """
    return choose(x, ref).fp4_codes(x, block)


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The fp32 values of a stored weight; the storage format follows from its dtype.

    weight: e4m3 [..., N, K] with scale e8m0 or fp32 [..., ceil(N/128), ceil(K/128)]; int8 [..., N, K/2] (FP4: two e2m1
    codes a byte, low nibble = even column) with scale e8m0 [..., N, K/32]; uint8 [..., N, K/2] (NVFP4: the same codes)
    with scale e4m3 [..., N, K/16], its scale_2 left out; bf16 [..., N, K] without scale; or fp32 [..., N, K], which is
    returned as it is: a scale beside it is already in its values.
    Returns fp32 [..., N, K]; every value of a quantised weight is exact in bf16, but with fp32 scales.
    """
    return ref.dequantise(weight, scale)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H / sqrt(D), H the Hadamard matrix in Sylvester order.

    x: [..., D], D a power of two. Computed in fp32 and rounded once to x's dtype.
    """
    return choose(x, ref).hadamard(x)
