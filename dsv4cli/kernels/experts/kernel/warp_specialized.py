"""Experts of many tokens on Hopper: loading inputs and weights, converting weights to bf16 and multiplying overlap.

A program is persistent: it stays on its multiprocessor and computes units in turn. A unit is a tile of up to 64 or 128
pairs of one expert, and 256 rows of its weights. Four of its warps load inputs and codes into slots of shared memory, a
few steps of 128 columns ahead. Two groups of four warps convert 128 rows each to bf16 in registers, the left operand,
while tensor cores multiply the previous ones. With small tiles the weights are the bottleneck: a slot then has two
steps, because memory delivers 128 bytes of a row faster than twice 64. Products, rounding, summation order and the
order of input columns are those of `grouped_gemm`. Triton cannot specialize warps, so this is written in Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.experts.kernel.grouped_operands import FP4_FACTOR, fp4_factor, fp4_pairs
from dsv4cli.kernels.experts.kernel.sort_by_expert import Groups
from dsv4cli.kernels.experts.kernel.warp_layouts import (
    EACH,
    HALVED,
    INPUTS,
    READ,
    SCALES,
    held,
    lined,
    row_in,
    stored,
)
from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from dsv4cli.kernels.gluon_launch import gluon_launched

# columns of a step; steps whose scales are loaded at a time: 16 bytes of a row
STEP, GROUP = gl.constexpr(128), gl.constexpr(4)
# rows of a product, of the two products of four warps, and of a unit
ROWS, OWN, LINES = gl.constexpr(64), gl.constexpr(128), gl.constexpr(256)
# units in flight; a number above the pairs of a tile
TURNS, MANY = gl.constexpr(2), gl.constexpr(256)
# threads of four warps; registers per thread of warps that multiply and of warps that load
THREADS, MULTIPLYING, BRINGING = gl.constexpr(128), gl.constexpr(208), gl.constexpr(88)


def products(x, groups: Groups, routing, first, second, out, limit, pairs) -> None:
    """Compute `grouped_gemm.gate_up` of both matrices with routing, `grouped_gemm.down` of the first without.

    Args:
        first, second: the words of matrices [E, N, K], each with the words of its scales; the same twice without
        routing.
        pairs: pairs in a tile, 64 or 128.
    """
    (_, rows, _), tiles, both = first[0].shape, len(groups.rows), routing is not None
    programs = min(tiles * (rows // (OWN if both else LINES).value), multiprocessors(x.device))
    _warp_specialized[programs,](
        x, groups.order, groups.row, groups.start, groups.rows, tiles, routing, groups.turns, *first, *second, out,
        limit, rows, x.shape[1], routing.shape[1] if both else 1, both, pairs, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _unit(unit, tile_expert, tile_start, tile_rows, tiles, N: gl.constexpr, BOTH: gl.constexpr):
    """Return a unit's number of pairs, their first position, and the first row of its weights."""
    height: gl.constexpr = OWN if BOTH else LINES
    tile = unit // (N // height)
    count = gl.load(tile_rows + tile, tile < tiles, other=0)
    start, expert = gl.load(tile_start + tile, tile < tiles), gl.load(tile_expert + tile, tile < tiles)
    # unused tiles have neither
    start, expert = gl.where(count > 0, start, 0), gl.where(count > 0, expert, 0)
    return count, start, expert * N + unit % (N // height) * height


@gluon.jit
def _sources(order, start, count, PER_TOKEN: gl.constexpr, BOTH: gl.constexpr, PAIRS: gl.constexpr):
    """Return the rows of x for a tile, and the number of each pair."""
    column, each = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, INPUTS)), gl.arange(0, PAIRS, layout=EACH)
    source = start + column
    if BOTH:
        source = gl.load(order + source, column < count, other=0) // PER_TOKEN
    return source, gl.load(order + start + each, each < count, other=0)


@gluon.jit
def _both(first, second, line):
    """Select each line's pointer: lines with the bit ROWS are the second matrix's."""
    return gl.where((line & ROWS) > 0, second, first)


@gluon.jit
def _scales(first, second, begin, step, K: gl.constexpr, BOTH: gl.constexpr):
    """Load the scales of GROUP steps, from row `begin` on: int32 [LINES, GROUP]."""
    line = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, SCALES)), 1)
    word = gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, SCALES)), 0)
    place = begin.to(gl.int64) * (K // STEP) + step
    return gl.load(_both(first + place, second + place, line) + (row_in(line, BOTH) * (K // STEP) + word))


@gluon.jit
def _keep(scales, values, group):
    """Store the scales of this group in shared memory, by step."""
    even, odd = gl.split(gl.reshape(values, [LINES, 2, 2]))
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    begin = group % 2 * GROUP
    scales.index(begin).store(zero)
    scales.index(begin + 1).store(one)
    scales.index(begin + 2).store(two)
    scales.index(begin + 3).store(three)


@gluon.jit
def _bring(
    x, first, first_scale, second, second_scale, order, tile_expert, tile_start, tile_rows, tiles, routing, turns,
    steps, results, units, unit_filled, N: gl.constexpr, K: gl.constexpr, PER_TOKEN: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """Take units in turn, and load the data that the other warps need into shared memory."""
    inputs, words, scales, filled, freed = steps
    places, factors, unit_freed = results
    PAIRS: gl.constexpr = places.shape[1]
    DEPTH: gl.constexpr = words.shape[2] * 8 // STEP
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8 // DEPTH, 4 * DEPTH], [4, 1], [1, 0])
    column = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, INPUTS))
    value = gl.expand_dims(gl.arange(0, STEP // 2, layout=gl.SliceLayout(0, INPUTS)), 0)
    line = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, WORDS)), 1)
    word = gl.expand_dims(gl.arange(0, words.shape[2], layout=gl.SliceLayout(0, WORDS)), 0)
    each, within = gl.arange(0, PAIRS, layout=EACH), row_in(line, BOTH) * (K // 8) + word
    turn, number = 0, 0
    unit = gl.program_id(0)
    next_unit = unit + gl.num_programs(0)
    count, start, begin = _unit(unit, tile_expert, tile_start, tile_rows, tiles, N, BOTH)
    next_count, next_start, next_begin = _unit(next_unit, tile_expert, tile_start, tile_rows, tiles, N, BOTH)
    source, pair = _sources(order, start, count, PER_TOKEN, BOTH, PAIRS)
    factor = gl.load(routing + pair, each < count, other=0.0) if BOTH else each.to(gl.float32)
    scale = _scales(first_scale, second_scale, begin, 0, K, BOTH)
    while count > 0:
        await_freed(unit_freed, turn)
        units.index(turn % TURNS).store(gl.full([1], unit * MANY + count, gl.int32, EACH))
        places.index(turn % TURNS).store(start + each if BOTH else pair)
        if BOTH:
            factors.index(turn % TURNS).store(factor)
        tell(unit_filled, turn)
        turn += 1
        near, some = gl.expand_dims(source * K, 1) + value, gl.expand_dims(column < count, 1)
        offset = begin.to(gl.int64) * (K // 8)
        codes = _both(first + offset, second + offset, line) + within
        # prefetch data of the next unit and of the one after it, so that nothing waits for loads
        source, pair = _sources(order, next_start, next_count, PER_TOKEN, BOTH, PAIRS)
        later = 2 * gl.num_programs(0) + gl.atomic_add(turns + (0 if BOTH else 1), 1, sem="relaxed")
        later_count, later_start, later_begin = _unit(later, tile_expert, tile_start, tile_rows, tiles, N, BOTH)
        if BOTH:
            factor = gl.load(routing + pair, each < next_count, other=0.0)
        for group in range(K // (STEP * GROUP)):
            more = group + 1 < K // (STEP * GROUP)
            for part in range(GROUP // DEPTH):
                await_freed(freed, number)
                if part == 0:
                    # the last reader of these scales' place has finished: it came before the slot that was freed
                    _keep(scales, scale, number // (GROUP // DEPTH))
                    following = gl.where(more, group + 1, 0) * GROUP
                    scale = _scales(
                        first_scale, second_scale, gl.where(more, begin, next_begin), following, K, BOTH
                    )  # fmt: skip
                slot = number % filled.shape[0]
                for half in gl.static_range(2 * DEPTH):
                    place = inputs.index(slot * (2 * DEPTH) + half)
                    async_copy.async_copy_global_to_shared(place, x + (near + half * (STEP // 2)), some)
                async_copy.async_copy_global_to_shared(words.index(slot), codes)
                async_copy.mbarrier_arrive(filled.index(slot), increment_count=False)
                tell(filled, number)
                near, codes, number = near + DEPTH * STEP, codes + words.shape[2], number + 1
        unit, count, start, begin = next_unit, next_count, next_start, next_begin
        next_unit, next_count, next_start, next_begin = later, later_count, later_start, later_begin
    await_freed(unit_freed, turn)
    units.index(turn % TURNS).store(gl.full([1], 0, gl.int32, EACH))
    tell(unit_filled, turn)


@gluon.jit
def _codes(words, scales, number, part: gl.constexpr, line: gl.constexpr):
    """Read lines from `line` on of one step of a slot.

    Returns their words in two halves [ROWS, 4, 2] and the factors of their columns [ROWS, 4, 1].
    """
    slots: gl.constexpr = words.shape[0]
    each: gl.constexpr = words.shape[2] * 8 // STEP
    codes = words.index(number % slots).slice(line, ROWS).slice(part * (STEP // 8), STEP // 8, 1).load(READ)
    left, right = gl.split(gl.permute(gl.reshape(codes, [ROWS, 4, 2, 2]), (0, 1, 3, 2)))
    left = gl.convert_layout(left, HALVED, assert_trivial=True)
    right = gl.convert_layout(right, HALVED, assert_trivial=True)
    of_line: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, HALVED))
    scale = scales.index((number * each + part) % (2 * GROUP)).slice(line, ROWS)
    scale = gl.expand_dims(scale.load(of_line), 1)
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVED))), 0)
    return left, right, gl.expand_dims(fp4_factor((scale >> (8 * lane)) & 255), 2)


@gluon.jit
def _values(words, factor, tile: gl.constexpr):
    """Decode half a step's codes to a left operand: bf16 [ROWS, STEP / 2]."""
    upper = words >> 8
    even = gl.join(fp4_pairs(words, factor, 0), fp4_pairs(upper, factor, 0))
    odd = gl.join(fp4_pairs(words, factor, 4), fp4_pairs(upper, factor, 4))
    values = gl.permute(gl.join(even, odd), (0, 2, 4, 5, 1, 3))  # word, q1, q0, lane, h: `ordered`
    operand: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    return gl.convert_layout(gl.reshape(values, [ROWS, STEP // 2]), operand, assert_trivial=True)


@gluon.jit
def _added(sums, more, weights, given, FIRST: gl.constexpr, MORE: gl.constexpr):
    """Add half a step's products to the sums of FIRST pairs, and of MORE. The products are asynchronous."""
    sums = warpgroup_mma(weights, given.slice(0, FIRST).permute((1, 0)), sums, is_async=True)
    if MORE:
        weights = gl.convert_layout(weights, gl.DotOperandLayout(0, held(MORE), 2), assert_trivial=True)
        more = warpgroup_mma(weights, given.slice(FIRST, MORE).permute((1, 0)), more, is_async=True)
    return sums, more


@gluon.jit
def _ended(one, two, more_one, more_two, PENDING: gl.constexpr, MORE: gl.constexpr):
    """Wait until at most PENDING of the last added products are still running, and return the sums."""
    if MORE:
        one, two, more_one, more_two = warpgroup_mma_wait(2 * PENDING, deps=[one, two, more_one, more_two])
    else:
        one, two = warpgroup_mma_wait(PENDING, deps=[one, two])
    return one, two, more_one, more_two


@gluon.jit
def _products(steps, number, K: gl.constexpr, line: gl.constexpr, FIRST: gl.constexpr, MORE: gl.constexpr):
    """Multiply lines from `line` on by a tile's pairs.

    Returns fp32 [ROWS, FIRST] of both halves of the lines, then [ROWS, MORE] of both.
    """
    inputs, words, scales, filled, freed = steps
    SLOTS: gl.constexpr = words.shape[0]
    DEPTH: gl.constexpr = words.shape[2] * 8 // STEP
    tile: gl.constexpr = held(FIRST)
    one, two = gl.full([ROWS, FIRST], 0.0, gl.float32, tile), gl.full([ROWS, FIRST], 0.0, gl.float32, tile)
    rest: gl.constexpr = MORE if MORE else 16
    more_one = gl.full([ROWS, rest], 0.0, gl.float32, held(rest))
    more_two = gl.full([ROWS, rest], 0.0, gl.float32, held(rest))
    await_filled(filled, number)
    left, right, factor = _codes(words, scales, number, 0, line)
    weights = _values(left, factor, tile)
    for step in range(0, K // STEP, DEPTH):
        for part in gl.static_range(DEPTH):
            near = inputs.index((number % SLOTS * DEPTH + part) * 2)
            one, more_one = _added(one, more_one, weights, near, FIRST, MORE)
            second_left, second_right, second_factor = _codes(words, scales, number, part, line + ROWS)
            two, more_two = _added(two, more_two, _values(second_left, second_factor, tile), near, FIRST, MORE)
            one, two, more_one, more_two = _ended(one, two, more_one, more_two, 1, MORE)
            near = inputs.index((number % SLOTS * DEPTH + part) * 2 + 1)
            one, more_one = _added(one, more_one, _values(right, factor, tile), near, FIRST, MORE)
            one, two, more_one, more_two = _ended(one, two, more_one, more_two, 1, MORE)
            two, more_two = _added(two, more_two, _values(second_right, second_factor, tile), near, FIRST, MORE)
            one, two, more_one, more_two = _ended(one, two, more_one, more_two, 1, MORE)
            if part + 1 < DEPTH:
                left, right, factor = _codes(words, scales, number, part + 1, line)
                weights = _values(left, factor, tile)
        # ptxas keeps no product running across loop iterations; what is read after the last step is not used
        after = number + 1
        mbarrier.wait(filled.index(after % SLOTS), after // SLOTS & 1, pred=step + DEPTH < K // STEP)
        left, right, factor = _codes(words, scales, after, 0, line)
        weights = _values(left, factor, tile)
        one, two, more_one, more_two = _ended(one, two, more_one, more_two, 0, MORE)
        tell(freed, number)
        number = after
    return one, two, more_one, more_two


@gluon.jit
def _store(
    one, two, out, limit, places, factors, first: gl.constexpr, count, column, N: gl.constexpr, BOTH: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """Store the results of pairs from `first` on, as columns from `column` on."""
    dtype: gl.constexpr = out.dtype.element_ty
    one, two = (one * FP4_FACTOR).to(dtype), (two * FP4_FACTOR).to(dtype)
    if BOTH:
        factor = factors.slice(first, PAIRS).load(gl.SliceLayout(0, held(PAIRS)))
        values = gated_values(one.to(gl.float32), two.to(gl.float32), limit) * gl.expand_dims(factor, 0)
        values = gl.permute(gl.reshape(values.to(dtype), [2, 2, 2, 2, 2, 2, PAIRS]), (6, 0, 1, 5, 3, 4, 2))
    else:
        values = gl.permute(gl.reshape(gl.join(one, two), [4, 2, 8, PAIRS, 2]), (3, 0, 2, 4, 1))
    width: gl.constexpr = ROWS if BOTH else OWN
    layout: gl.constexpr = stored(PAIRS, BOTH)
    values = gl.convert_layout(gl.reshape(values, [PAIRS, width]), layout, assert_trivial=True)
    place = places.slice(first, PAIRS).load(gl.SliceLayout(1, layout)).to(gl.int64) * N
    inside = first + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, layout)) < count
    column += gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    gl.store(out + (gl.expand_dims(place, 1) + gl.expand_dims(column, 0)), values, gl.expand_dims(inside, 1))


@gluon.jit
def _multiply_tile(
    out, limit, steps, results, number, turn, count, column, N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr,
    line: gl.constexpr, FIRST: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Compute one warp group's part of a unit of up to FIRST + MORE pairs."""
    places, factors, unit_freed = results
    one, two, more_one, more_two = _products(steps, number, K, line, FIRST, MORE)
    place, factor = places.index(turn % TURNS), factors.index(turn % TURNS)
    _store(one, two, out, limit, place, factor, 0, count, column, N, BOTH, FIRST)
    if MORE:
        _store(more_one, more_two, out, limit, place, factor, FIRST, count, column, N, BOTH, MORE)
    tell(unit_freed, turn)


@gluon.jit
def _next(units, unit_filled, turn):
    await_filled(unit_filled, turn)
    return gl.max(units.index(turn % TURNS).load(EACH), 0)


@gluon.jit
def _multiply(
    out, limit, steps, results, units, unit_filled, N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Multiply the left half (HALF 0) or the right (1) of units' lines, with as many columns as there are pairs."""
    line: gl.constexpr = HALF * OWN
    height: gl.constexpr = OWN if BOTH else LINES
    PAIRS: gl.constexpr = results[0].shape[1]
    slots: gl.constexpr = K // (steps[1].shape[2] * 8)
    turn = 0
    unit = _next(units, unit_filled, turn)
    while unit > 0:
        count, number = unit % MANY, turn * slots
        begin = unit // MANY % (N // height) * height + HALF * (height // 2)
        if count <= 32:
            _multiply_tile(out, limit, steps, results, number, turn, count, begin, N, K, BOTH, line, 32, 0)
        elif PAIRS == 64 or count <= 64:
            _multiply_tile(out, limit, steps, results, number, turn, count, begin, N, K, BOTH, line, 64, 0)
        elif count <= 96:
            _multiply_tile(out, limit, steps, results, number, turn, count, begin, N, K, BOTH, line, 64, 32)
        else:
            _multiply_tile(out, limit, steps, results, number, turn, count, begin, N, K, BOTH, line, 128, 0)
        turn += 1
        unit = _next(units, unit_filled, turn)


@gluon_launched(do_not_specialize=["tiles"])
def _warp_specialized(
    x,  # [.., K] in the order of `ordered`
    order,  # pairs by expert, and the tiles of them: sort_by_expert
    tile_expert,
    tile_start,
    tile_rows,
    tiles,
    routing,  # fp32 [T, PER_TOKEN], or None
    turns,  # how many units were taken, of both and of one
    first,  # int32 words of e2m1 [E, N, K / 8]
    first_scale,  # int32 words of e8m0 [E, N, K / 128]
    second,  # as first, where BOTH another matrix
    second_scale,
    out,  # [P, N]: of both by position, of one by pair
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    PER_TOKEN: gl.constexpr,
    BOTH: gl.constexpr,
    PAIRS: gl.constexpr,
):
    # steps in a slot, slots: 192 KiB in all
    DEPTH: gl.constexpr = 128 // PAIRS
    SLOTS: gl.constexpr = 3 if DEPTH == 2 else 4
    of_inputs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIRS, STEP // 2], gl.bfloat16)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * DEPTH * 2, PAIRS, STEP // 2], of_inputs)
    lines: gl.constexpr = lined(DEPTH)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, LINES, DEPTH * STEP // 8], lines)
    scales = gl.allocate_shared_memory(gl.int32, [2 * GROUP, LINES], plain)
    units = gl.allocate_shared_memory(gl.int32, [TURNS, 1], plain)
    places = gl.allocate_shared_memory(gl.int32, [TURNS, PAIRS], plain)
    factors = gl.allocate_shared_memory(gl.float32, [TURNS, PAIRS], plain)
    # every thread signals its copies; for everything else one thread signals for all
    filled, freed = ring(SLOTS, THREADS + 1, 2)
    unit_filled, unit_freed = ring(TURNS, 1, 2)
    steps, results = (inputs, words, scales, filled, freed), (places, factors, unit_freed)
    gl.warp_specialize(
        [
            (_multiply, (out, limit, steps, results, units, unit_filled, N, K, BOTH, 0)),
            (_multiply, (out, limit, steps, results, units, unit_filled, N, K, BOTH, 1)),
            (_bring, (
                x, first, first_scale, second, second_scale, order, tile_expert, tile_start, tile_rows, tiles, routing,
                turns, steps, results, units, unit_filled, N, K, PER_TOKEN, BOTH,
            )),
        ],
        [4, 4],
        [MULTIPLYING, BRINGING],
    )  # fmt: skip
