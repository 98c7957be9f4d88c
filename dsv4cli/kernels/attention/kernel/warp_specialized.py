"""Attention of many tokens on Hopper: gathering, scoring and multiplying rows overlap.

A program is persistent: it stays on its multiprocessor and computes tokens in turn, up to 64 heads of one at a time.
Four of its warps gather rows into shared memory, four score them, and four each multiply their left and right half.
Barriers signal which buffers are full and which are free. Triton cannot specialize warps, so this is written in Gluon,
which Triton's interpreter does not support.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4cli.kernels.attention.kernel.gather import FLOOR, LOG2E
from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from dsv4cli.kernels.gluon_launch import gluon_launched
from dsv4cli.kernels.launch import cdiv
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

# heads of a program; rows of a block; values of a row; values of a row that are gathered and multiplied at a time
HEADS, ROWS, WIDTH, PART = gl.constexpr(64), gl.constexpr(64), gl.constexpr(512), gl.constexpr(128)
# ring buffers in shared memory: parts of blocks of rows, blocks of probabilities
PARTS, BLOCKS = gl.constexpr(9), gl.constexpr(2)
# columns of a list that are searched at a time for its end
AHEAD = gl.constexpr(1024)
# threads of four warps; registers per thread that multiplies and that gathers; threads that score get the rest of 512
THREADS, MULTIPLYING, GATHERING = gl.constexpr(128), gl.constexpr(160), gl.constexpr(88)


def attended(inputs, sink, turns, o, turned, shape) -> None:
    """Compute attention into o [T, H, d].

    Args:
        inputs: the arguments that every kernel here takes, up to `scale`.
        turns: [T, turned, 2] or None.
        shape: the constants of every kernel, up to WIDTH.
    """
    tokens, heads, _ = o.shape
    units = tokens * cdiv(heads, HEADS.value)
    _warp_specialized[min(units, multiprocessors(o.device)),](
        *inputs, sink, turns, o, units, turned, *shape[:3], num_warps=4, **overlap(o)
    )


@gluon.jit
def _column_of(number: gl.constexpr):
    """Return the first column of the part with this number.

    Each half's first part comes first, then each half's second.
    """
    return (number % 2 * 2 + number // 2) * PART


@gluon.jit
def _gather(
    q, window, entries, index, units, q_stride, window_rows, length, queries, parts, ends,
    query_filled, query_freed, part_filled, part_freed, end_filled, end_freed,
    WINDOW_STRIDE: gl.constexpr, ENTRIES_STRIDE: gl.constexpr, TOTAL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Load queries, rows and the ends of lists into shared memory."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    step = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))
    column = gl.expand_dims(gl.arange(0, PART, layout=gl.SliceLayout(0, copied)), 0)
    ahead = gl.arange(0, AHEAD, layout=line)
    turn, block, unit = 0, 0, gl.program_id(0)
    row = gl.load(index + (unit // GROUPS).to(gl.int64) * length + step, step < length, other=-1).to(gl.int32)
    while unit < units:
        token, after = (unit // GROUPS).to(gl.int64), unit + gl.num_programs(0)
        listed, listed_after = token * length, (after // GROUPS).to(gl.int64) * length
        names = gl.load(index + listed + ahead, ahead < length, other=-1)
        # the end is known once the first rows are being copied
        start, end = 0, ROWS + 1
        while start < end:
            entry = row - window_rows
            place = gl.where(
                entry < 0, window + row.to(gl.int64) * WINDOW_STRIDE, entries + entry.to(gl.int64) * ENTRIES_STRIDE
            )
            place, some = gl.expand_dims(place, 1) + column, gl.expand_dims(row >= 0, 1)
            # row numbers of the next block, which may be the next token's
            more = start + ROWS < end
            limit = gl.where(more, length - start - ROWS, gl.where(after < units, length, 0))
            following = index + gl.where(more, listed + start + ROWS, listed_after)
            row = gl.load(following + step, step < limit, other=-1).to(gl.int32)
            for number in gl.static_range(WIDTH // PART):
                part = block * (WIDTH // PART) + number
                await_freed(part_freed, part)
                async_copy.async_copy_global_to_shared(parts.index(part % PARTS), place + _column_of(number), some)
                async_copy.mbarrier_arrive(part_filled.index(part % PARTS), increment_count=False)
            block += 1
            if start == 0:
                head = unit % GROUPS * HEADS + step
                near = gl.expand_dims(q + (token * TOTAL + head) * q_stride, 1) + column
                held = gl.expand_dims(head < TOTAL, 1)
                await_freed(query_freed, turn)
                for number in gl.static_range(WIDTH // PART):
                    async_copy.async_copy_global_to_shared(queries.index(number), near + number * PART, held)
                async_copy.mbarrier_arrive(query_filled.index(0), increment_count=False)
                # an empty list is one block long
                end = gl.max(gl.where(names >= 0, ahead + 1, 1), 0)
                for first in range(AHEAD, length, AHEAD):
                    later = first + ahead
                    named = gl.load(index + listed + later, later < length, other=-1) >= 0
                    end = gl.maximum(end, gl.max(gl.where(named, later + 1, 1), 0))
                await_freed(end_freed, turn)
                ends.index(turn % ends.shape[0]).store(gl.full([1], end, gl.int32, line))
                tell(end_filled, turn)
                if end <= ROWS:
                    row = gl.load(
                        index + listed_after + step, (step < length) & (after < units), other=-1
                    ).to(gl.int32)  # fmt: skip
            start += ROWS
        turn += 1
        unit = after


@gluon.jit
def _end(ends, filled, freed, turn):
    """Return the end of the row list of the token that is computed in this turn."""
    await_filled(filled, turn)
    end = gl.max(ends.index(turn % ends.shape[0]).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    tell(freed, turn)
    return end


@gluon.jit
def _score(
    index, sink, units, length, scale, queries, parts, kept, query_filled, query_freed, part_filled, barriers,
    TOTAL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Compute a block's probabilities relative to the maximum so far, and the factor for the sums of earlier blocks."""
    filled, freed, factor_filled, factor_freed, end_filled, end_freed = barriers
    chances, shrinks, factors, ends = kept
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_head: gl.constexpr = gl.SliceLayout(1, tile)
    step = gl.arange(0, ROWS, layout=gl.SliceLayout(0, tile))
    turn, block = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        listed = index + (unit // GROUPS).to(gl.int64) * length
        head = unit % GROUPS * HEADS + gl.arange(0, HEADS, layout=of_head)
        logit = gl.load(sink + head, head < TOTAL, other=0.0).to(gl.float32) * LOG2E
        end = _end(ends, end_filled, end_freed, turn)
        maximum = gl.full([HEADS], FLOOR, gl.float32, of_head)
        sums = gl.full([HEADS], 0.0, gl.float32, of_head)
        await_filled(query_filled, turn)
        for start in range(0, end, ROWS):
            row = gl.load(listed + start + step, start + step < length, other=-1)
            scores = gl.full([HEADS, ROWS], 0.0, gl.float32, tile)
            for number in gl.static_range(WIDTH // PART):
                part = block * (WIDTH // PART) + number
                await_filled(part_filled, part)
                query, keys = queries.index(_column_of(number) // PART), parts.index(part % PARTS).permute((1, 0))
                scores = warpgroup_mma(query, keys, scores, use_acc=number > 0, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if start + ROWS >= end:
                tell(query_freed, turn)
            scores = gl.where(gl.expand_dims(row >= 0, 0), scores * scale, float("-inf"))
            larger = gl.maximum(maximum, gl.max(scores, 1))
            shrink, exact = gl.exp2(maximum - larger), gl.exp2(scores - gl.expand_dims(larger, 1))
            sums, maximum = sums * shrink + gl.sum(exact, 1), larger
            await_freed(freed, block)
            chances.index(block % BLOCKS).store(exact.to(gl.bfloat16))
            shrinks.index(block % BLOCKS).store(shrink)
            fence_async_shared()
            tell(filled, block)
            block += 1
        await_freed(factor_freed, turn)
        # the denominator is at least 1 if a row is listed
        factors.store(1.0 / gl.maximum(sums + gl.exp2(logit - maximum), 1.0))
        tell(factor_filled, turn)
        turn += 1


@gluon.jit
def _multiply(
    turns, o, units, parts, kept, part_freed, barriers,
    TOTAL: gl.constexpr, GROUPS: gl.constexpr, TURNED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Sum rows times probabilities, of the left half (HALF 0) or the right (1), and store the rounded results."""
    filled, freed, factor_filled, factor_freed, end_filled, end_freed = barriers
    chances, shrinks, factors, ends = kept
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    of_head: gl.constexpr = gl.SliceLayout(1, tile)
    turn, block = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        end = _end(ends, end_filled, end_freed, turn)
        first = gl.full([HEADS, PART], 0.0, gl.float32, tile)
        second = gl.full([HEADS, PART], 0.0, gl.float32, tile)
        for _start in range(0, end, ROWS):
            await_filled(filled, block)
            shrink, given = (
                gl.expand_dims(shrinks.index(block % BLOCKS).load(of_head), 1),
                chances.index(block % BLOCKS),
            )
            part = block * (WIDTH // PART) + HALF
            first = warpgroup_mma(given, parts.index(part % PARTS), first * shrink, is_async=True)
            second = warpgroup_mma(given, parts.index((part + 2) % PARTS), second * shrink, is_async=True)
            first = warpgroup_mma_wait(1, deps=[first])
            tell(part_freed, part)
            second = warpgroup_mma_wait(0, deps=[second])
            tell(part_freed, part + 2)
            tell(freed, block)
            block += 1
        await_filled(factor_filled, turn)
        factor = gl.expand_dims(factors.load(of_head), 1)
        tell(factor_freed, turn)
        turn += 1
        token, head, column = (unit // GROUPS).to(gl.int64), unit % GROUPS * HEADS, HALF * (WIDTH // 2)
        _store(o, (first * factor).to(gl.bfloat16), token, head, column, TOTAL)
        last = (second * factor).to(gl.bfloat16)
        if HALF == 1 and TURNED > 0:
            last = _unrotated(last, turns, token, TURNED)
        _store(o, last, token, head, column + PART, TOTAL)


@gluon.jit
def _unrotated(values, turns, token, TURNED: gl.constexpr):
    """Rotate the last TURNED pairs of heads by the conjugate.

    values: [HEADS, PART], rounded, the last columns of heads.
    """
    real, imaginary = gl.split(gl.reshape(values, [HEADS, PART // 2, 2]))
    layout: gl.constexpr = real.type.layout
    pair = gl.arange(0, PART // 2, layout=gl.SliceLayout(0, layout)) - (PART // 2 - TURNED)
    turn = turns + token * (2 * TURNED) + pair * 2
    cosine = gl.expand_dims(gl.load(turn, pair >= 0, other=1.0), 0)
    sine = gl.expand_dims(gl.load(turn + 1, pair >= 0, other=0.0), 0)
    some, real, imaginary = gl.expand_dims(pair >= 0, 0), real.to(gl.float32), imaginary.to(gl.float32)
    # selected instead of multiplied by one, so that values that are not rotated keep signed zeros and infinities
    turned_real = gl.where(some, real * cosine + imaginary * sine, real).to(values.dtype)
    turned_imaginary = gl.where(some, imaginary * cosine - real * sine, imaginary).to(values.dtype)
    return gl.reshape(gl.join(turned_real, turned_imaginary), [HEADS, PART])


@gluon.jit
def _store(o, values, token, first, begin, TOTAL: gl.constexpr):
    """Store values [HEADS, PART] as columns `begin` on of heads `first` on."""
    # two of four lanes exchange 4 bytes, so that each has 8; Triton would do two such exchanges through shared memory
    stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )  # fmt: skip
    head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, stored))
    column = begin + gl.arange(0, PART, layout=gl.SliceLayout(0, stored))
    place = gl.expand_dims(o + (token * TOTAL + head) * WIDTH, 1) + gl.expand_dims(column, 0)
    gl.store(place, gl.convert_layout(values, stored), gl.expand_dims(head < TOTAL, 1))


@gluon_launched(do_not_specialize=["window_rows", "length", "units"])
def _warp_specialized(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    sink,  # [TOTAL]
    turns,  # [T, TURNED, 2]: cosine, sine
    o,  # as q, contiguous
    units,  # tokens times groups of heads
    TURNED: gl.constexpr,
    WINDOW_STRIDE: gl.constexpr,
    ENTRIES_STRIDE: gl.constexpr,
    TOTAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    groups: gl.constexpr = (TOTAL + HEADS - 1) // HEADS
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], gl.bfloat16)
    of_chances: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, ROWS], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [WIDTH // PART, HEADS, PART], of_rows)
    parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, PART], of_rows)
    chances = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, HEADS, ROWS], of_chances)
    shrinks = gl.allocate_shared_memory(gl.float32, [BLOCKS, HEADS], plain)
    factors = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    ends = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    # every thread signals its copies; for everything else one thread signals for all
    query_filled, query_freed = ring(1, THREADS, 1)
    part_filled, part_freed = ring(PARTS, THREADS, 1)
    filled, freed = ring(BLOCKS, 1, 2)
    factor_filled, factor_freed = ring(1, 1, 2)
    end_filled, end_freed = ring(2, 1, 3)
    wait_for_inputs(OVERLAP)
    barriers = (filled, freed, factor_filled, factor_freed, end_filled, end_freed)
    kept = (chances, shrinks, factors, ends)
    gl.warp_specialize(
        [
            (_score, (
                index, sink, units, length, scale, queries, parts, kept, query_filled, query_freed, part_filled,
                barriers, TOTAL, groups,
            )),
            (_multiply, (turns, o, units, parts, kept, part_freed, barriers, TOTAL, groups, TURNED, 0)),
            (_multiply, (turns, o, units, parts, kept, part_freed, barriers, TOTAL, groups, TURNED, 1)),
            (_gather, (
                q, window, entries, index, units, q_stride, window_rows, length, queries, parts, ends,
                query_filled, query_freed, part_filled, part_freed, end_filled, end_freed,
                WINDOW_STRIDE, ENTRIES_STRIDE, TOTAL, groups,
            )),
        ],
        [4, 4, 4],
        [MULTIPLYING, MULTIPLYING, GATHERING],
    )  # fmt: skip
