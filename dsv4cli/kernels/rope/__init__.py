"""Rotary position embedding of the trailing dims, pairs (2i, 2i + 1) as complex numbers.

Source: official model.py (`apply_rotary_emb`).
Triton: rows of any even spacing with consecutive columns (kernels/rows.py), d even; the result is contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.rope import ref


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The last 2 * R dims of x, rotated; the others as they are.

    x: [T, d] or [T, H, d] bf16 or fp32; rotation: complex64 [T, R], unit numbers exp(i * angle) of each token (pass the
    conjugate to un-rotate). Complex fp32 arithmetic, one rounding to x's dtype.
    """
    return choose(x, ref).rotate(x, rotation)
