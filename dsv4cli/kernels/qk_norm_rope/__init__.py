"""Norm, rotation and FP8 rounding of queries and keys in one operation, which also stores keys in the window ring.

It can include the indexer's queries. Source: official model.py (`Attention.forward`, `Indexer.forward`).
Triton requires: one dtype, consecutive columns, a contiguous ring; an even width with an FP8 part in whole blocks of
64, for the indexer a power of two of at least 32. Results are contiguous.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.qk_norm_rope import ref
from dsv4cli.kernels.qk_norm_rope.types import KeyCells, KeyNorm

__all__ = ["KeyCells", "KeyNorm", "queries_and_keys", "queries_keys_and_index"]


def queries_and_keys(
    q: torch.Tensor, kv: torch.Tensor, norm: KeyNorm, rotation: torch.Tensor, stored: KeyCells
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply head_norm and rotate to queries; rms_norm, rotate and fp8_round to keys.

    q: [T, H, d], H may be 0; kv: [T, d], both bf16 or fp32; rotation: complex64 [T, R], of the last 2 * R dims. Every
    operation rounds as it does alone.
    Returns the queries [T, H, d], the keys [T, d] and the ring: the same one, or a new one if a gradient is recorded.
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
    """Run `queries_and_keys`, and apply rotate and, if rounded, hadamard and fp4_round to the indexer's queries.

    index_q: [R, Hi, D] in kv's dtype, with any row stride, for the R rows from `first` on; the other arguments as in
    queries_and_keys. Returns the results of queries_and_keys and the indexer's queries [R, Hi, D].
    """
    return choose(kv, ref).queries_keys_and_index(q, kv, index_q, norm, rotation, stored, first)
