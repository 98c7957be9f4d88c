"""Rotary position embedding of the trailing dims, with pairs (2i, 2i + 1) as complex numbers.

Source: official model.py (`apply_rotary_emb`).
Triton requires: evenly spaced rows with consecutive columns (kernels/rows.py), d even. The result is contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.rope import ref


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2 * R dims of x; the others are unchanged.

    x: [T, d] or [T, H, d] bf16 or fp32; rotation: complex64 [T, R], unit numbers exp(i * angle) per token (pass the
    conjugate to un-rotate). Computed in complex fp32, rounded once to x's dtype.
    """
    return choose(x, ref).rotate(x, rotation)
