"""Experts of many tokens over GGUF blocks on Hopper: decoding to fp16 and multiplying overlap.

A program is persistent: it stays on its multiprocessor and computes units in turn. A unit is a tile of up to 256 pairs
of one expert, and 128 rows of weights: 64 of w1 and 64 of w3, or 128 of w2. Two groups of four warps decode blocks to
fp16 in shared memory, once for all pairs of a tile, in alternate steps of 64 columns. Two other groups multiply 64 rows
each; the first of them also loads the inputs by TMA, whose columns are in the order in which codes are decoded.
"""

import torch
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.experts.kernel.ggml_stages import (
    HALVES,
    LINES,
    PAIRS,
    ROWS,
    SLOTS,
    STEP,
    bring,
    bring_tile,
    decode,
    unit_of,
)
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.experts.kernel.sort_by_expert import Groups
from dsv4cli.kernels.ggml.kernel.fp16 import unshifted
from dsv4cli.kernels.ggml.kernel.octets import KernelBlocks
from dsv4cli.kernels.ggml.types import TILE_ROWS
from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from dsv4cli.kernels.gluon_launch import gluon_described, gluon_launched

# pairs whose results are stored at a time: factors of more would not fit in registers
BOX = gl.constexpr(64)
# registers per thread of the second group that multiplies and of those that decode; the first group gets 160 of 512
MULTIPLYING, DECODING = gl.constexpr(160), gl.constexpr(96)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# how four warps hold a value per pair
EACH = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


def products(
    x: torch.Tensor,
    x_shifts: torch.Tensor,
    groups: Groups,
    routing: torch.Tensor | None,
    first: KernelBlocks,
    second: KernelBlocks,
    shifts: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    limit: float,
) -> None:
    """Compute the gated product of both matrices with routing, the product of the first without.

    Args:
        x: fp16 [P, K] in the order of positions, columns and shifts as of `input_halves` with `paired`.
        groups: tiles of up to PAIRS pairs.
        first, second: matrices [E, N, K] of the same type, in tiles of eight rows; the same twice without routing.
        shifts: of both, int32 [E, N].
        out: bf16 [P, N], by position with routing, by pair without.
    """
    assert first.height == TILE_ROWS == second.height
    (_, rows, _), tiles, both = first.rows.shape, len(groups.rows), routing is not None
    programs = min(tiles * (rows // (ROWS if both else LINES).value), multiprocessors(x.device))
    described = [gluon_described(x, (pairs, STEP.value)) for pairs in (64, 128, PAIRS.value)]
    _products[programs,](
        *described, x_shifts, groups.order, groups.row, groups.start, groups.rows, groups.count, routing,
        first.rows, shifts[0], second.rows, shifts[1], first.table, out, limit, rows, x.shape[1], both, first.kind,
        num_warps=4,
    )  # fmt: skip


@constexpr_function
def _held(columns):
    """Return the layout in which four warps hold products [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _sums(
    x, steps, number, now, later, K: gl.constexpr, HALF: gl.constexpr, FIRST: gl.constexpr, MORE: gl.constexpr
):  # fmt: skip
    """Multiply half a unit's lines by FIRST pairs, and by MORE: fp32 [ROWS, FIRST], [ROWS, MORE].

    now, later: the tiles of this unit and of the next one, whose inputs the first group loads.
    """
    inputs, weights, filled, freed = steps
    rest: gl.constexpr = MORE if MORE else 16
    sums = gl.full([ROWS, FIRST], 0.0, gl.float32, _held(FIRST))
    more = gl.full([ROWS, rest], 0.0, gl.float32, _held(rest))
    for column in range(0, K, STEP):
        await_filled(filled, number)
        slot = number % SLOTS
        left = weights.index(slot).slice(HALF * ROWS, ROWS)
        sums = warpgroup_mma(left, inputs.index(slot).slice(0, FIRST).permute((1, 0)), sums, is_async=True)
        if MORE:
            right = inputs.index(slot).slice(FIRST, MORE).permute((1, 0))
            more = warpgroup_mma(left, right, more, is_async=True)
        if HALF == 0:
            # into the slot of the previous step, which both groups have just read
            ahead, place = column + (SLOTS - 1) * STEP, number + (SLOTS - 1)
            if ahead < K:
                await_freed(freed, place)
                slot = place % SLOTS
                bring_tile(x, inputs, filled.index(slot), slot, now[0], ahead, FIRST, MORE)
            elif later[1] > 0:
                bring(x, steps, place, later, ahead - K)
        if MORE:
            sums, more = warpgroup_mma_wait(0, deps=[sums, more])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        tell(freed, number)
        number += 1
    return sums, more


@gluon.jit
def _halved(sums):
    """Split sums [ROWS, columns] into the left and the right half."""
    half: gl.constexpr = sums.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, half]), (0, 2, 1)))
    return (
        gl.convert_layout(left, _held(half), assert_trivial=True),
        gl.convert_layout(right, _held(half), assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def _store_all(sums, result, first: gl.constexpr, N: gl.constexpr, BOTH: gl.constexpr):
    """Store the results of pairs from `first` on, BOX at a time."""
    if sums.shape[1] == BOX:
        _store(sums, result, first, N, BOTH)
    else:
        left, right = _halved(sums)
        _store(left, result, first, N, BOTH)
        _store(right, result, first + BOX, N, BOTH)


@gluon.jit
def _store(sums, result, first: gl.constexpr, N: gl.constexpr, BOTH: gl.constexpr):
    """Store the results of pairs from `first` on, [ROWS, BOX].

    result: where; the first row; shifts of the lines [ROWS]; the number of pairs; and of each pair in shared memory its
    shift, place and routing weight.
    """
    out, limit, begin, shifts, count, kept = result
    x_shifts, places, factors = kept
    tile: gl.constexpr = _held(BOX)
    dtype: gl.constexpr = out.dtype.element_ty
    shift = gl.expand_dims(x_shifts.slice(first, BOX).load(gl.SliceLayout(0, tile)), 0) + gl.expand_dims(shifts, 1)
    values = unshifted(sums, shift).to(dtype)
    # lines of a warp that differ in one bit: of both matrices, or of adjacent rows
    one, two = gl.split(gl.permute(gl.reshape(values, [4, 2, 8, BOX]), (0, 2, 3, 1)))
    if BOTH:
        gated = gl.reshape(gated_values(one.to(gl.float32), two.to(gl.float32), limit), [ROWS // 2, BOX])
        factor = factors.slice(first, BOX).load(gl.SliceLayout(0, gated.type.layout))
        values = (gated * gl.expand_dims(factor, 0)).to(dtype)
    else:
        values = gl.reshape(gl.permute(gl.join(one, two), (0, 1, 3, 2)), [ROWS, BOX])
    stored: gl.constexpr = values.type.layout
    place = places.slice(first, BOX).load(gl.SliceLayout(0, stored)).to(gl.int64) * N
    inside = first + gl.arange(0, BOX, layout=gl.SliceLayout(0, stored)) < count
    column = begin + gl.arange(0, ROWS // 2 if BOTH else ROWS, layout=gl.SliceLayout(1, stored))
    gl.store(out + (gl.expand_dims(place, 0) + gl.expand_dims(column, 1)), values, gl.expand_dims(inside, 0))


@gluon.jit
def _line_shifts(shifts, expert, row, N: gl.constexpr, BOTH: gl.constexpr, HALF: gl.constexpr):
    """Load the shifts of half a unit's lines: int32 [ROWS]."""
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _held(BOX)))
    low, odd, warp = line & 7, line >> 3 & 1, line >> 4
    begin = expert.to(gl.int64) * N + row
    if BOTH:
        own = begin + (HALF * (ROWS // 2) + warp * 8 + low)
        found = gl.load(gl.where(odd > 0, shifts[1] + own, shifts[0] + own))
    else:
        found = gl.load(shifts[0] + (begin + (HALF * ROWS + warp * 16 + low * 2 + odd)))
    return found


@gluon.jit
def _multiply_tile(
    x, result, values, steps, number, now, later, N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr,
    HALF: gl.constexpr, FIRST: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Compute one group's part of a unit of up to FIRST + MORE pairs. values: of each pair, for shared memory."""
    sums, more = _sums(x, steps, number, now, later, K, HALF, FIRST, MORE)
    x_shifts, places, factors = result[5]
    x_shifts.store(values[0])
    places.store(values[1])
    if BOTH:
        factors.store(values[2])
    _store_all(sums, result, 0, N, BOTH)
    if MORE:
        _store_all(more, result, FIRST, N, BOTH)


@gluon.jit
def _multiply(
    x, out, limit, x_shifts, order, routing, shifts, kept, steps, tiles, total,
    N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Multiply the first half of units' lines (HALF 0) or the second (1), with as many columns as there are pairs."""
    each, number, unit = gl.arange(0, PAIRS, layout=EACH), 0, gl.program_id(0)
    mine = kept[0].index(HALF), kept[1].index(HALF), kept[2].index(HALF)
    if unit < total:
        count, start, expert, row = unit_of(unit, tiles, N, BOTH)
        if HALF == 0:
            for step in gl.static_range(SLOTS - 1):
                bring(x, steps, step, (start, count), step * STEP)
        while unit < total:
            unit += gl.num_programs(0)
            # the last unit is followed by itself, but nothing is loaded for it
            after = gl.where(unit < total, unit, unit - gl.num_programs(0))
            next_count, next_start, next_expert, next_row = unit_of(after, tiles, N, BOTH)
            now, later = (start, count), (next_start, gl.where(unit < total, next_count, 0))
            place, inside = start + each, each < count
            x_shift, factor = gl.load(x_shifts + place, inside, other=0), each.to(gl.float32)
            pair = gl.load(order + place, inside, other=0)
            if BOTH:
                factor = gl.load(routing + pair, inside, other=0.0)
            else:
                place = pair
            values = x_shift, place, factor
            begin = row + HALF * (ROWS // 2 if BOTH else ROWS)
            result = out, limit, begin, _line_shifts(shifts, expert, row, N, BOTH, HALF), count, mine
            if count <= 64:
                _multiply_tile(x, result, values, steps, number, now, later, N, K, BOTH, HALF, 64, 0)
            elif count <= 128:
                _multiply_tile(x, result, values, steps, number, now, later, N, K, BOTH, HALF, 128, 0)
            elif count <= 192:
                _multiply_tile(x, result, values, steps, number, now, later, N, K, BOTH, HALF, 128, 64)
            else:
                _multiply_tile(x, result, values, steps, number, now, later, N, K, BOTH, HALF, 128, 128)
            number += K // STEP
            count, start, expert, row = next_count, next_start, next_expert, next_row


@gluon_launched
def _products(
    x,  # descriptors of fp16 [P, K] in blocks of 64, 128 and 256 rows
    x_twice,
    x_whole,
    x_shifts,  # int32 [P]
    order,  # pairs by expert, and the tiles of them: sort_by_expert
    tile_row,
    tile_start,
    tile_size,
    tile_count,
    routing,  # fp32 [T, PER_TOKEN], or None
    first,  # blocks [E, N, K]
    first_shifts,  # int32 [E, N]
    second,  # as first, if BOTH another matrix
    second_shifts,
    table,
    out,  # bf16 [P, N]
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    BOTH: gl.constexpr,
    KIND: gl.constexpr,
):
    inputs = gl.allocate_shared_memory(gl.float16, [SLOTS, PAIRS, STEP], HALVES)
    weights = gl.allocate_shared_memory(gl.float16, [SLOTS, LINES, STEP], HALVES)
    x_kept = gl.allocate_shared_memory(gl.int32, [2, PAIRS], PLAIN)
    places = gl.allocate_shared_memory(gl.int32, [2, PAIRS], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [2, PAIRS], PLAIN)
    # inputs and weights are two arrivals
    filled, freed = ring(SLOTS, 2, 2)
    total = gl.load(tile_count) * (N // (ROWS if BOTH else LINES))
    x, tiles, shifts = (x, x_twice, x_whole), (tile_row, tile_start, tile_size), (first_shifts, second_shifts)
    kept, steps = (x_kept, places, factors), (inputs, weights, filled, freed)
    gl.warp_specialize(
        [
            (_multiply, (
                x, out, limit, x_shifts, order, routing, shifts, kept, steps, tiles, total, N, K, BOTH, 0,
            )),
            (_multiply, (
                x, out, limit, x_shifts, order, routing, shifts, kept, steps, tiles, total, N, K, BOTH, 1,
            )),
            (decode, (first, second, shifts, table, steps, tiles, total, N, K, BOTH, KIND, 0)),
            (decode, (first, second, shifts, table, steps, tiles, total, N, K, BOTH, KIND, 1)),
        ],
        [4, 4, 4],
        [MULTIPLYING, DECODING, DECODING],
    )  # fmt: skip
