"""The compressor in Triton: each program computes one entry.

The program of a sequence's first group also computes the second if both read the rings, then stores the raw rows; no
other program accesses the sequence's rings. For groups with many members, most of them complete, each program pools a
few channels, and a second launch computes the entries.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from dsv4cli.kernels.compressor.kernel.entries import FP4, FP8, NOTHING, PACKED, make_entries, store_pooled
from dsv4cli.kernels.compressor.kernel.pool import keep_rows, plan_of, pooled_of
from dsv4cli.kernels.compressor.types import Compression, EntryPlan, State
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP4_BLOCK, KV_BLOCK
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import FEW, overlap
from dsv4cli.kernels.rows import rows, tile

# fewest members per group for which a group's channels are divided among programs, if most groups are complete
MANY = 32


class EntryTiles(NamedTuple):
    """Tile sizes of a program.

    size: members loaded at once, or channels if channels are divided. kept: rows stored at once. warps: warps.
    """

    size: int
    kept: int
    warps: int


# tile sizes of programs that pool some channels each
SLICE = EntryTiles(32, 64, 4)


@dataclass(frozen=True)
class CompressorLaunch:
    """Kernel arguments of one compression, with the width and format of its entries."""

    own: Compression
    width: int
    form: tl.constexpr

    @property
    def capacity(self) -> int:
        """Rows per ring."""
        return self.own.state.kv.shape[1]

    @property
    def ratio(self) -> int:
        return len(self.own.ape)

    @property
    def members(self) -> int:
        return self.ratio * self.own.state.kv.shape[2] // self.width

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order of the kernels' arguments."""
        own, state = self.own, self.own.state
        scale = state.entries if state.scale is None else state.scale
        inputs = rows(own.kv), rows(own.score), own.ape.contiguous(), state.kv, state.score
        return *inputs, own.norm.contiguous(), state.entries, scale.view(torch.uint8)

    def shape(self) -> tuple[int, ...]:
        """Return the raw rows' strides and channels, the entry's width and format, and the padded column count."""
        strides = rows(self.own.kv).stride(0), rows(self.own.score).stride(0)
        return *strides, self.own.state.kv.shape[2], self.width, self.form, tile(self.width).columns


def compress_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> State:
    _compress(_of_keys(own, plan, round_keys), plan)
    return own.state


def compress_index_keys(own: Compression, plan: EntryPlan) -> State:
    _compress(_of_index_keys(own, plan), plan)
    return own.state


def compress_both(own: Compression, index: Compression, plan: EntryPlan, round_keys: bool) -> tuple[State, State]:
    job = _of_keys(own, plan, round_keys)
    other = _of_index_keys(index, plan) if round_keys else _of_keys(index, plan, round_keys)
    if len(own.kv) <= max(FEW, len(plan.entries)) and job.members == other.members < MANY:
        _launch(job, other, plan)
    else:
        _compress(job, plan)
        _compress(other, plan)
    return own.state, index.state


def _of_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> CompressorLaunch:
    width = own.state.entries.shape[1]
    rounded = width - 2 * plan.rotation.shape[1]
    if width % 2 or (round_keys and rounded % KV_BLOCK):
        raise KernelUnsupported(f"the Triton kernel rounds {KV_BLOCK} columns at once, not {rounded}")
    check(own, plan, width)
    return CompressorLaunch(own, width, FP8 if round_keys else NOTHING)


def _of_index_keys(own: Compression, plan: EntryPlan) -> CompressorLaunch:
    width = own.state.entries.shape[1] * (1 if own.state.scale is None else 2)
    if width & (width - 1) or width < FP4_BLOCK:
        raise KernelUnsupported(f"a Hadamard rotation takes a power of two from {FP4_BLOCK} on, not {width} columns")
    check(own, plan, width)
    return CompressorLaunch(own, width, FP4 if own.state.scale is None else PACKED)


def _compress(job: CompressorLaunch, plan: EntryPlan) -> None:
    groups = len(plan.entries)
    if groups and job.members >= MANY and len(job.own.kv) >= groups * MANY // 2:
        _compress_in_parts(job, plan)
    else:
        _launch(job, None, plan)


def _launch(job: CompressorLaunch, other: CompressorLaunch | None, plan: EntryPlan) -> None:
    """Launch the kernel for one compressor, or for two with the same number of members per group."""
    groups, turns = len(plan.entries), torch.view_as_real(plan.rotation)
    if not groups:
        return
    second = other or job
    at_once, kept, warps = entry_tiles(job.members, job.width, len(job.own.kv), groups)
    make_entries[(groups, 1 if other is None else 2)](
        *job.tensors(), *second.tensors(), plan.groups, plan.entries, turns, turns.stride(0), job.own.eps, *job.shape(),
        *second.shape(), other is not None, job.capacity, second.capacity, job.ratio, job.members,
        turns.shape[1], at_once, kept, **overlap(job.own.kv), num_warps=warps,
    )  # fmt: skip


def _compress_in_parts(job: CompressorLaunch, plan: EntryPlan) -> None:
    groups, turns, (part, kept, warps) = len(plan.entries), torch.view_as_real(plan.rotation), SLICE
    *inputs, weight, results, scales = job.tensors()
    *strides, channels, width, form, columns = job.shape()
    pooled = torch.empty(groups, width, dtype=torch.float32, device=job.own.kv.device)
    _pool[(cdiv(width, part), groups)](
        *inputs, plan.groups, plan.entries, pooled, *strides, job.capacity, job.ratio, job.members,
        channels, width, part, next_power_of_2(job.members), kept, num_warps=warps,
    )  # fmt: skip
    store_pooled[(groups,)](
        pooled, plan.entries, weight, turns, results, scales, turns.stride(0), job.own.eps, width, turns.shape[1], form,
        columns, num_warps=4,
    )  # fmt: skip


def entry_tiles(members: int, width: int, tokens: int, groups: int) -> EntryTiles:
    """Return the tile sizes of a program that computes a whole entry, for a step of `tokens` and `groups`.

    Measured on an H200 with 4,096 tokens of ratio 4: 13.8 us at width 512 (with 8 members at once 14.8), 7.2 at width
    128. A thread has all members of four columns; twice as many warps take 23 and 10 us.
    """
    warps, kept = min(max(width // 128, 1), 4), 1 if tokens <= groups else 4
    if members >= MANY:
        return EntryTiles(32, kept, 8)
    if tokens <= max(FEW, groups):
        return EntryTiles(8, kept, warps)
    return EntryTiles(4, 4, warps) if width > 128 else EntryTiles(8, 8, warps)


def check(own: Compression, plan: EntryPlan, width: int) -> None:
    """Raise KernelUnsupported for arguments that the kernel does not support."""
    kv, state = own.kv, own.state
    if not kv.dtype == own.score.dtype == state.kv.dtype == state.score.dtype == torch.float32:
        raise KernelUnsupported("raw rows and their rings are fp32")
    if not all(one.is_contiguous() for one in (*vars(state).values(), *vars(plan).values()) if one is not None):
        raise KernelUnsupported("the Triton kernel takes a contiguous state and plan")
    if kv.shape[1] not in (width, 2 * width):
        raise KernelUnsupported(f"raw rows are as wide as an entry or twice, not {kv.shape[1]} for {width}")


@launched
def _pool(
    kv,  # this and the next six as in `make_entries`
    score,
    ape,
    ring_kv,
    ring_score,
    groups,
    entries,
    pooled,  # fp32 [G, WIDTH]
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    cell = tl.load(entries + group)
    slot, first, start, end, row = plan_of(groups, group)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    fresh_kv, fresh_score = kv + (row - start) * KV_STRIDE, score + (row - start) * SCORE_STRIDE
    old_kv, old_score = ring_kv + slot * CAPACITY * CHANNELS, ring_score + slot * CAPACITY * CHANNELS
    if cell >= 0:
        if first >= start:
            values = pooled_of(
                fresh_kv, fresh_score, ape, old_kv, old_score, first, start, column, KV_STRIDE, SCORE_STRIDE, CAPACITY,
                RATIO, MEMBERS, CHANNELS, WIDTH, True, ROWS,
            )  # fmt: skip
        else:
            values = pooled_of(
                fresh_kv, fresh_score, ape, old_kv, old_score, first, start, column, KV_STRIDE, SCORE_STRIDE, CAPACITY,
                RATIO, MEMBERS, CHANNELS, WIDTH, False, ROWS,
            )  # fmt: skip
        tl.store(pooled + group * WIDTH + column, values, column < WIDTH)
    # without overlap no other group reads these columns of the rings
    if first <= start:
        keep_rows(
            fresh_kv, fresh_score, ape, old_kv, old_score, start, end, column, KV_STRIDE, SCORE_STRIDE,
            CAPACITY, RATIO, CHANNELS, KEPT,
        )  # fmt: skip
