"""The compressor in plain PyTorch: pooling, then norm, rope and block_scale one after another."""

from dataclasses import replace
from typing import NamedTuple

import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.compressor.types import Compression, EntryPlan, State
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.norm.ref import rms_norm
from dsv4cli.kernels.qk_norm_rope import ref as key_ref
from dsv4cli.kernels.rope.ref import rotate


class KeptRows(NamedTuple):
    """The step's rows that are stored in the rings, int64 [n] or None for all, and their cells, int64 [n]."""

    rows: torch.Tensor | None
    cells: torch.Tensor


def compress_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> State:
    return _with_keys(own, plan, _kept(own, plan), round_keys)


def compress_index_keys(own: Compression, plan: EntryPlan) -> State:
    return _with_index_keys(own, plan, _kept(own, plan))


def compress_both(own: Compression, index: Compression, plan: EntryPlan, round_keys: bool) -> tuple[State, State]:
    kept = _kept(own, plan)  # the same rows for both compressors
    index_state = _with_index_keys(index, plan, kept) if round_keys else _with_keys(index, plan, kept, round_keys)
    return _with_keys(own, plan, kept, round_keys), index_state


def _with_keys(own: Compression, plan: EntryPlan, kept: KeptRows, round_keys: bool) -> State:
    state, pooled, complete = _pooled(own, plan, kept)
    if pooled is None:
        return state
    keys = rotate(rms_norm(pooled.to(state.entries.dtype), own.norm, own.eps), plan.rotation[complete])
    if round_keys:
        keys = key_ref.rounded(keys, 2 * plan.rotation.shape[-1])
    return replace(state, entries=key_ref.placed(state.entries, plan.entries[complete], keys))


def _with_index_keys(own: Compression, plan: EntryPlan, kept: KeptRows) -> State:
    state, pooled, complete = _pooled(own, plan, kept)
    if pooled is None:
        return state
    cells, dtype = plan.entries[complete], state.entries.dtype if state.scale is None else torch.bfloat16
    keys = block_scale.hadamard(rotate(rms_norm(pooled.to(dtype), own.norm, own.eps), plan.rotation[complete]))
    if state.scale is None:
        return replace(state, entries=key_ref.placed(state.entries, cells, block_scale.fp4_round(keys, FP4_BLOCK)))
    codes, scale = block_scale.fp4_codes(keys, FP4_BLOCK)
    state.scale.view(torch.uint8).index_copy_(0, cells, scale.view(torch.uint8))
    return replace(state, entries=key_ref.placed(state.entries, cells, codes))


def _pooled(own: Compression, plan: EntryPlan, kept: KeptRows) -> tuple[State, torch.Tensor | None, torch.Tensor]:
    """Return the state with the raw rows stored, the pooled complete groups, and the mask of complete groups, bool [G].

    The pooled groups are fp32 [G', d], or None if no group is complete (checked on a CPU only).
    """
    kv, state, complete, pooled = own.kv, own.state, plan.entries >= 0, None
    score = own.score + own.ape[plan.positions % len(own.ape)]
    if not complete.is_cpu or complete.any():  # on a GPU, testing this would synchronize
        # rings are read before they are written
        every_kv, every_score = torch.cat((state.kv.flatten(0, 1), kv)), torch.cat((state.score.flatten(0, 1), score))
        members, halves = _members(own, plan.groups[complete]), _halves_of(own)
        pooled = pool(_halves(every_kv[members], halves), _halves(every_score[members], halves))
    if kept.rows is not None:
        kv, score = kv[kept.rows], score[kept.rows]
    state = replace(state, kv=_stored(state.kv, kept.cells, kv), score=_stored(state.score, kept.cells, score))
    return state, pooled, complete


def _halves_of(own: Compression) -> int:
    """Return the number of groups that contribute channels to an entry: 2 with overlap, else 1."""
    return own.kv.shape[1] // _width(own.state)


def _width(state: State) -> int:
    """Return the width d of an entry."""
    return state.entries.shape[1] * (1 if state.scale is None else 2)


def _stored(ring: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return key_ref.placed(ring.flatten(0, 1), cells, rows).view(ring.shape)


def _kept(own: Compression, plan: EntryPlan) -> KeptRows:
    overlap, capacity = (_halves_of(own) - 1) * len(own.ape), own.state.kv.shape[1]
    _, first, start, _, _ = plan.groups.unbind(1)
    slots, _, start, end, _ = plan.groups[first + overlap <= start].unbind(1)
    count = end - start
    slot = slots.repeat_interleave(count)
    if len(plan.positions) <= capacity:
        return KeptRows(None, slot * capacity + plan.positions % capacity)
    end = end.repeat_interleave(count)
    rows = (plan.positions >= end - capacity).nonzero()[:, 0]
    return KeptRows(rows, slot[rows] * capacity + plan.positions[rows] % capacity)


def _members(own: Compression, groups: torch.Tensor) -> torch.Tensor:
    """Return the rows of complete groups' members in [all rings, fresh rows]: int64 [G', 5] -> [G', members]."""
    slots, capacity = own.state.kv.shape[:2]
    slot, first, start, _, row = groups.unbind(1)
    positions = first[:, None] + torch.arange(_halves_of(own) * len(own.ape), device=first.device)
    ring = slot[:, None] * capacity + positions % capacity
    return torch.where(positions >= start[:, None], slots * capacity + (row - start)[:, None] + positions, ring)


def _halves(rows: torch.Tensor, halves: int) -> torch.Tensor:
    """Return the channels of each member: with overlap, the previous group's first half and its own second half."""
    if halves == 1:
        return rows
    (first, second), ratio = rows.chunk(2, -1), rows.shape[1] // 2
    return torch.cat((first[:, :ratio], second[:, ratio:]), 1)


def pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of softmax(score) * kv, with a softmax per channel: fp32 [G, R, D] -> [G, D].

    R is the number of tokens per group. Missing tokens have kv 0 and score -inf; each channel has a finite score.
    """
    return (score.softmax(1) * kv).sum(1)
