"""Compression in plain PyTorch: pooling, then norm, rope and block_scale one after another."""

from dataclasses import replace

import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.compressor.types import Compression, EntryPlan, State
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.norm.ref import rms_norm
from dsv4cli.kernels.qk_norm_rope import ref as key_ref
from dsv4cli.kernels.rope.ref import rotate


def compress_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> State:
    state, pooled = _pooled(own, plan)
    keys = rotate(rms_norm(pooled.to(state.entries.dtype), own.norm, own.eps), plan.rotation[plan.entries >= 0])
    if round_keys:
        keys = key_ref.rounded(keys, 2 * plan.rotation.shape[-1])
    return replace(state, entries=key_ref.placed(state.entries, plan.entries[plan.entries >= 0], keys))


def compress_index_keys(own: Compression, plan: EntryPlan) -> State:
    state, pooled = _pooled(own, plan)
    complete = plan.entries >= 0
    cells, dtype = plan.entries[complete], state.entries.dtype if state.scale is None else torch.bfloat16
    keys = block_scale.hadamard(rotate(rms_norm(pooled.to(dtype), own.norm, own.eps), plan.rotation[complete]))
    if state.scale is None:
        return replace(state, entries=key_ref.placed(state.entries, cells, block_scale.fp4_round(keys, FP4_BLOCK)))
    codes, scale = block_scale.fp4_codes(keys, FP4_BLOCK)
    state.scale.view(torch.uint8).index_copy_(0, cells, scale.view(torch.uint8))
    return replace(state, entries=key_ref.placed(state.entries, cells, codes))


def compress_both(own: Compression, index: Compression, plan: EntryPlan, round_keys: bool) -> tuple[State, State]:
    index_state = compress_index_keys(index, plan) if round_keys else compress_keys(index, plan, round_keys)
    return compress_keys(own, plan, round_keys), index_state


def _pooled(own: Compression, plan: EntryPlan) -> tuple[State, torch.Tensor]:
    """The state with the raw rows stored, and the pooled complete groups, fp32 [G', d]."""
    kv, state, ratio, capacity = own.kv, own.state, len(own.ape), own.state.kv.shape[1]
    score = own.score + own.ape[plan.positions % ratio]
    # rings are read before they are written
    every_kv, every_score = torch.cat((state.kv.flatten(0, 1), kv)), torch.cat((state.score.flatten(0, 1), score))
    halves = kv.shape[1] // _width(state)
    members = _members(plan, ratio, halves, state.kv.shape[:2])
    rows, cells = _kept(plan, ratio, halves, capacity)
    state = replace(state, kv=_stored(state.kv, cells, kv[rows]), score=_stored(state.score, cells, score[rows]))
    return state, pool(_halves(every_kv[members], halves), _halves(every_score[members], halves))


def _width(state: State) -> int:
    """The width d of an entry."""
    return state.entries.shape[1] * (1 if state.scale is None else 2)


def _stored(ring: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return key_ref.placed(ring.flatten(0, 1), cells, rows).view(ring.shape)


def _kept(plan: EntryPlan, ratio: int, halves: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the step that stay in the rings, and their cells: int64 [n]."""
    _, first, start, _, _ = plan.groups.unbind(1)
    slots, _, start, end, _ = plan.groups[first + (halves - 1) * ratio <= start].unbind(1)
    slot, end = slots.repeat_interleave(end - start), end.repeat_interleave(end - start)
    rows = (plan.positions >= end - capacity).nonzero()[:, 0]
    return rows, slot[rows] * capacity + plan.positions[rows] % capacity


def _members(plan: EntryPlan, ratio: int, halves: int, rings: torch.Size) -> torch.Tensor:
    """The rows of the members of each complete group in [all rings, fresh rows]: int64 [G', halves * ratio]."""
    slot, first, start, _, row = plan.groups[plan.entries >= 0].unbind(1)
    positions = first[:, None] + torch.arange(halves * ratio, device=first.device)
    ring = slot[:, None] * rings[1] + positions % rings[1]
    return torch.where(positions >= start[:, None], rings.numel() + (row - start)[:, None] + positions, ring)


def _halves(rows: torch.Tensor, halves: int) -> torch.Tensor:
    """The channels that each member gives: with overlap, the previous group's first half, its own second half."""
    if halves == 1:
        return rows
    (first, second), ratio = rows.chunk(2, -1), rows.shape[1] // 2
    return torch.cat((first[:, :ratio], second[:, ratio:]), 1)


def pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """sum over tokens of softmax(score) * kv, each channel with its own softmax: fp32 [G, R, D] -> [G, D].

    R: the tokens that a group pools; rows of absent ones have kv 0 and score -inf, at least one of a channel is finite.
    """
    return (score.softmax(1) * kv).sum(1)
