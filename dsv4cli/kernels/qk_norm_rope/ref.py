"""Queries and keys in plain PyTorch: norm, rope and block_scale one after another."""

import torch

from dsv4cli.kernels.block_scale.ref import fp4_round, fp8_round, hadamard
from dsv4cli.kernels.formats import FP4_BLOCK, KV_BLOCK
from dsv4cli.kernels.norm.ref import head_norm, rms_norm
from dsv4cli.kernels.qk_norm_rope.types import KeyCells, KeyNorm
from dsv4cli.kernels.rope.ref import rotate


def queries_and_keys(
    q: torch.Tensor, kv: torch.Tensor, norm: KeyNorm, rotation: torch.Tensor, stored: KeyCells
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = rotate(rms_norm(kv, norm.weight, norm.eps), rotation)
    if norm.rounded:
        keys = rounded(keys, 2 * rotation.shape[-1])
    known = stored.cells >= 0
    if known.is_cpu and known.all():  # on a GPU, testing this would synchronize
        ring = placed(stored.ring, stored.cells, keys)
    else:
        ring = placed(stored.ring, stored.cells[known], keys[known])
    # the drafter stores keys without queries
    q = rotate(head_norm(q, norm.eps), rotation) if q.numel() else q
    return q, keys, ring


def queries_keys_and_index(
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    norm: KeyNorm,
    rotation: torch.Tensor,
    stored: KeyCells,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index_q = rotate(index_q, rotation[first : first + len(index_q)])
    if norm.rounded:
        index_q = fp4_round(hadamard(index_q), FP4_BLOCK)
    return *queries_and_keys(q, kv, norm, rotation, stored), index_q


def rounded(keys: torch.Tensor, turned: int) -> torch.Tensor:
    """Round the leading dims of keys [n, d] to FP8; the last `turned`, the rotated ones, are unchanged."""
    return torch.cat((fp8_round(keys[..., :-turned], KV_BLOCK), keys[..., -turned:]), -1)


def placed(buffer: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Write `rows` at `cells` of buffer [cells, d], in place; or to a new tensor if a gradient is recorded."""
    rows = rows.to(buffer.dtype)
    if rows.requires_grad and torch.is_grad_enabled():
        return buffer.index_copy(0, cells, rows)
    return buffer.index_copy_(0, cells, rows)
