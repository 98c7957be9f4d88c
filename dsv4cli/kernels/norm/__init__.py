"""RMS norms. Source: official model.py (`RMSNorm`, the query norm of `Attention.forward`).

Triton requires: evenly spaced rows with consecutive columns (kernels/rows.py). The result is contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.norm import ref


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x * rsqrt(mean(x ** 2) + eps), over the last dimension.

    x: [..., D] bf16 or fp32; weight: [D]. Computed in fp32, rounded once to x's dtype.
    """
    return choose(x, ref).rms_norm(x, weight, eps)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    """Return q * rsqrt(mean(q ** 2) + eps), over the last dimension, without a weight.

    q: [T, H, d] bf16 or fp32. Computed in q's dtype, as in the official code: the square, the mean (summed in fp32),
    the sum with eps, the rsqrt and the product are each rounded to it.
    """
    return choose(q, ref).head_norm(q, eps)
