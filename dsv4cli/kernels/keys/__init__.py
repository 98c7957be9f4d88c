"""Queries and keys made ready for attention: norm, rotation and FP8 rounding at once, keys stored in the window ring.

Source: official model.py (`Attention.forward`).
Triton: consecutive columns, an even width with the FP8 part in whole blocks of 64; results are contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.keys import ref


def queries_and_keys(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    rotation: torch.Tensor,
    ring: torch.Tensor,
    cells: torch.Tensor,
    eps: float,
    round_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries through head_norm and rotate, keys through rms_norm with weight, rotate and fp8_round.

    q: [T, H, d], H may be 0; kv: [T, d], both bf16 or fp32; weight: [d]; rotation: complex64 [T, R]; ring: [cells, d]
    in kv's dtype, written in place at cells int64 [T], each at most once (-1: the key is not stored). Every operation
    rounds as it does alone. round_keys: the leading d - 2 * R dims of a key go through fp8_round with 64 columns, the
    rotated ones stay as they are.
    Returns the queries [T, H, d], the keys [T, d] and the ring: the one given, or a new one where a gradient is
    recorded.
    """
    return choose(kv, ref).queries_and_keys(q, kv, weight, rotation, ring, cells, eps, round_keys)
