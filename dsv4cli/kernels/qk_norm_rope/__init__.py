"""Queries and keys made ready for attention: norm, rotation and FP8 rounding at once, keys stored in the window ring.

Those of the indexer at the same time. Source: official model.py (`Attention.forward`, `Indexer.forward`).
Triton: one dtype, consecutive columns, a contiguous ring; an even width with the FP8 part in whole blocks of 64, for
the indexer a power of two from 32 on; results are contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.qk_norm_rope import ref


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


def queries_keys_and_index(
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    weight: torch.Tensor,
    rotation: torch.Tensor,
    ring: torch.Tensor,
    cells: torch.Tensor,
    eps: float,
    round_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, and the indexer's queries through rotate and, with round_keys, hadamard and fp4_round with 32 columns.

    index_q: [T, Hi, D] in kv's dtype, rows of any spacing; the other arguments as in queries_and_keys.
    Returns what queries_and_keys does and the indexer's queries [T, Hi, D].
    """
    return choose(kv, ref).queries_keys_and_index(q, kv, index_q, weight, rotation, ring, cells, eps, round_keys)
