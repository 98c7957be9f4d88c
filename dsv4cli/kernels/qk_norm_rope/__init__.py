"""Queries and keys made ready for attention: norm, rotation and FP8 rounding at once, keys stored in the window ring.

Those of the indexer at the same time. Source: official model.py (`Attention.forward`, `Indexer.forward`).
Triton: one dtype, consecutive columns, a contiguous ring; an even width with the FP8 part in whole blocks of 64, for
the indexer a power of two from 32 on; results are contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.qk_norm_rope import ref
from dsv4cli.kernels.qk_norm_rope.types import KeyCells, KeyNorm

__all__ = ["KeyCells", "KeyNorm", "queries_and_keys", "queries_keys_and_index"]


def queries_and_keys(
    q: torch.Tensor, kv: torch.Tensor, norm: KeyNorm, rotation: torch.Tensor, stored: KeyCells
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries through head_norm and rotate, keys through rms_norm, rotate and fp8_round.

    q: [T, H, d], H may be 0; kv: [T, d], both bf16 or fp32; rotation: complex64 [T, R], of the last 2 * R dims. Every
    operation rounds as it does alone.
    Returns the queries [T, H, d], the keys [T, d] and the ring: the one given, or a new one where a gradient is
    recorded.
    """
    return choose(kv, ref).queries_and_keys(q, kv, norm, rotation, stored)


def queries_keys_and_index(
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    norm: KeyNorm,
    rotation: torch.Tensor,
    stored: KeyCells,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, and the indexer's queries through rotate and, if rounded, hadamard and fp4_round.

    index_q: [R, Hi, D] in kv's dtype, rows of any spacing, of the R rows from `first` on; the other arguments as in
    queries_and_keys. Returns what queries_and_keys does and the indexer's queries [R, Hi, D].
    """
    return choose(kv, ref).queries_keys_and_index(q, kv, index_q, norm, rotation, stored, first)
