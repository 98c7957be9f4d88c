"""Block scales: FP8 and FP4 rounding of activations, dequantization of weights, the Hadamard rotation.

A scale is the smallest power of two (e8m0) for which amax / scale is representable: it is rounded up, never to nearest.
Source: official kernel.py (`act_quant`, `fp4_act_quant`), OCP Microscaling.
Triton: supports rows with any even stride and consecutive columns (kernels/rows.py), and blocks of a power of two.
Results are contiguous and bit-identical to the reference.
"""

import torch

from dsv4cli.kernels.block_scale import ref
from dsv4cli.kernels.dispatch import choose


def fp8_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """Round x to e4m3 with one e8m0 scale per row and `block` consecutive columns, and dequantize it.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Returns x's shape and dtype. Every value is q * 2**k for an e4m3
    code q, so it is exact in bf16. Codes are rounded to nearest even; amax is at least 1e-4.
    """
    return choose(x, ref).fp8_round(x, block)


def fp8_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of fp8_round; codes * scale equals it, bit for bit if x is finite.

    x: as for fp8_round. Returns codes e4m3 of x's shape and scale e8m0 [..., D / block], both contiguous.
    """
    return choose(x, ref).fp8_codes(x, block)


def fp4_round(x: torch.Tensor, block: int) -> torch.Tensor:
    """Round x to e2m1 with one e8m0 scale per row and `block` consecutive columns, and dequantize it.

    x: [..., D] bf16 or fp32, D a multiple of `block`. Rounds to nearest, ties to the even code. Returns x's shape and
    dtype.
    """
    return choose(x, ref).fp4_round(x, block)


def fp4_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of fp4_round; dequantise(codes, scale) equals it, bit for bit if x is finite.

    x: as for fp4_round. Returns codes int8 [..., D / 2] (two codes per byte, low nibble = even column) and scale e8m0
    [..., D / block], both contiguous. e2m1 has no NaN.
    """
    return choose(x, ref).fp4_codes(x, block)


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 values of a weight. Its dtype determines the storage format.

    Args:
        weight: one of
            e4m3 [..., N, K] with scale e8m0 or fp32 [..., ceil(N/128), ceil(K/128)];
            int8 [..., N, K/2] (FP4: two e2m1 codes per byte, low nibble = even column) with scale e8m0 [..., N, K/32];
            uint8 [..., N, K/2] (NVFP4: the same codes) with scale e4m3 [..., N, K/16]; scale_2 is not applied;
            bf16 or fp16 [..., N, K] without scale;
            fp32 [..., N, K], returned unchanged: a scale is ignored, because the values already include it.

    Returns fp32 [..., N, K]. Every value of a quantized weight is exact in bf16, except with fp32 scales.
    """
    return ref.dequantise(weight, scale)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return x @ H / sqrt(D), with H the Hadamard matrix in Sylvester order.

    x: [..., D], D a power of two. Computed in fp32 and rounded once to x's dtype.
    """
    return choose(x, ref).hadamard(x)
