"""Experts with a few tokens each on Hopper's FP8 tensor cores: codes of FP4 become e5m2, inputs are e4m3.

A program is persistent. A unit is a chunk of up to TOKENS pairs of one expert, and 128 rows of weights: 64 of w1 and 64
of w3, or 128 of w2. One warp loads stages of 512 columns by TMA, in their stored form. Eight warps decode 16 rows
each in registers, 7 instructions for 8 codes, and multiply each block of 32 columns into a new accumulator, which is
multiplied by the block's scale in fp32. A third partition, one warp, rounds the results of w1 and w3 for w2 as soon as
128 inner values are stored.

The product of a chunk of up to NARROW pairs has NARROW columns, any other one TOKENS. Sums depend neither on the other
tokens of a chunk nor on the number of columns of the product.

The shared expert's chunks come first, but its units are computed after the first batches (`fp8_units.unit_of`). Its
e4m3 weights need no decoding, and their stages have 256 columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dsv4cli.kernels.block_scale.kernel import FP8_FLOOR, FP8_LARGEST, power_of_two_ceil
from dsv4cli.kernels.experts.kernel.fp8_inputs import place
from dsv4cli.kernels.experts.kernel.fp8_layouts import EACH_WARP, INNER, INPUTS, ONE, PLAIN, held
from dsv4cli.kernels.experts.kernel.fp8_stages import ROWS, STAGE, steps, unit_sums
from dsv4cli.kernels.experts.kernel.fp8_units import batch, chunk_of, unit_of
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell, wait_for_inputs
from dsv4cli.kernels.gluon_launch import gluon_launched

# rows of a matrix in a tile of shared memory, and of a block of inner values
HALF, BLOCK = gl.constexpr(64), gl.constexpr(128)
# bytes of a row in a tile, words of scales of a row in a stage, and rows of inputs in a TMA, of 32 bytes
TILE, WORDS, INPUT_ROWS = gl.constexpr(128), gl.constexpr(4), gl.constexpr(128)
# units whose results the rounding warp may still have to read
TICKETS = gl.constexpr(4)
# registers per thread of the warp that brings stages, and of the one that rounds
BRINGING, ROUNDING = gl.constexpr(40), gl.constexpr(88)


@gluon.jit
def _bring_codes(first, second, row, later, column, at, codes, barrier):
    """Load 256 bytes of HALF rows of both matrices. The rows of the second begin at `row + later`."""
    tma.async_copy_global_to_shared(first, [row, column], barrier, codes.index(at * 4))
    tma.async_copy_global_to_shared(second, [row + later, column], barrier, codes.index(at * 4 + 1))
    tma.async_copy_global_to_shared(first, [row, column + TILE], barrier, codes.index(at * 4 + 2))
    tma.async_copy_global_to_shared(second, [row + later, column + TILE], barrier, codes.index(at * 4 + 3))


@gluon.jit
def _bring_inputs(
    inputs, input_scales, chunk, size, number, of_inputs, NARROW: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Load the inputs of a chunk of `size` pairs into the next buffer, and their scales.

    Of a narrow chunk's inputs, it loads the first parts only.
    """
    given, factors, input_filled, input_freed = of_inputs
    buffers: gl.constexpr = input_filled.shape[0]
    parts: gl.constexpr = given.shape[0] // buffers
    narrow: gl.constexpr = parts * NARROW // TOKENS
    some: gl.constexpr = factors.shape[0] // buffers
    await_freed(input_freed, number)
    slot = number % buffers
    barrier = input_filled.index(slot)
    needed = parts
    if size <= NARROW:
        needed = narrow
        mbarrier.expect(barrier, narrow * INPUT_ROWS * 32 + some * TOKENS * 16)
    else:
        mbarrier.expect(barrier, parts * INPUT_ROWS * 32 + some * TOKENS * 16)
    for part in range(needed):
        tma.async_copy_global_to_shared(
            inputs, [(chunk * parts + part) * INPUT_ROWS, 0], barrier, given.index(slot * parts + part)
        )
    for part in range(some):
        tma.async_copy_global_to_shared(
            input_scales, [(chunk * some + part) * TOKENS, 0], barrier, factors.index(slot * some + part)
        )


@gluon.jit
def _wait_once(before, BOTH: gl.constexpr, OVERLAP: gl.constexpr):
    """Wait for the inputs of w2, before a program's first chunk only."""
    if before < 0 and not BOTH:
        wait_for_inputs(OVERLAP)


@gluon.jit
def _late(is_first, BUFFERS: gl.constexpr, LATE: gl.constexpr, BOTH: gl.constexpr):
    """Return the step of a unit in which a new chunk's inputs are loaded.

    Normally the first step. It is the last one whose stage fits in shared memory if loading would wait: for w2's first
    inputs, which may not exist yet, and for a single buffer, which may still be in use.
    """
    late = 0
    if is_first:
        late = 0 if BOTH else LATE
    elif BUFFERS == 1:
        late = LATE
    return late


@gluon.jit
def _bring(
    routed, shared, inputs, input_scales, chunks, turns, total, own, stages, of_inputs,
    N: gl.constexpr, K: gl.constexpr, NARROW: gl.constexpr, TOKENS: gl.constexpr, BOTH: gl.constexpr,
    SHARED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Take batches of units in turn, and load their weights and inputs.

    The first weights of w2 are loaded before its inputs exist.
    """
    first, first_scale, second, second_scale = routed
    codes, scales, units, filled, freed = stages
    BUFFERS: gl.constexpr = of_inputs[3].shape[0]
    SLOTS: gl.constexpr = filled.shape[0]
    EACH: gl.constexpr = HALF if BOTH else ROWS
    LATER: gl.constexpr = 0 if BOTH else HALF
    STEPS: gl.constexpr = K // 2 // STAGE
    LATE: gl.constexpr = (STEPS if STEPS < SLOTS else SLOTS) - 1
    number, buffer, before = 0, 0, -1
    programs = gl.num_programs(0)
    begin, end = batch(gl.program_id(0), total, programs)
    start = begin
    while begin < end:
        for turn in range(begin, end):
            mine = unit_of(turn, total, own, programs)
            chunk = mine // (N // EACH)
            is_own, expert, position, size = chunk_of(chunks, chunk, TOKENS)
            row = expert * N + mine % (N // EACH) * EACH
            late = _late(turn == start, BUFFERS, LATE, BOTH)
            for step in range(steps(is_own, K, SHARED)):
                await_freed(freed, number)
                at = number % SLOTS
                if step == 0:
                    units.index(at * 2).store(gl.full([1], mine, gl.int32, ONE))
                    units.index(at * 2 + 1).store(gl.full([1], position << 8 | size, gl.int32, ONE))
                barrier = filled.index(at)
                if SHARED and is_own:
                    mbarrier.expect(barrier, ROWS * STAGE)
                    _bring_codes(shared[0], shared[1], row, LATER, step * STAGE, at, codes, barrier)
                else:
                    mbarrier.expect(barrier, ROWS * (STAGE + 4 * WORDS))
                    _bring_codes(first, second, row, LATER, step * STAGE, at, codes, barrier)
                    near, further = scales.index(at * 2), scales.index(at * 2 + 1)
                    tma.async_copy_global_to_shared(first_scale, [row, step * WORDS], barrier, near)
                    tma.async_copy_global_to_shared(second_scale, [row + LATER, step * WORDS], barrier, further)
                if step == late and chunk != before:
                    _wait_once(before, BOTH, OVERLAP)
                    _bring_inputs(inputs, input_scales, chunk, size, buffer, of_inputs, NARROW, TOKENS)
                    buffer += 1
                    before = chunk
                number += 1
        begin, end = batch(programs + gl.atomic_add(turns, 1, sem="relaxed"), total, programs)
    await_freed(freed, number)
    units.index(number % SLOTS * 2).store(gl.full([1], -1, gl.int32, ONE))
    tell(filled, number)


@gluon.jit
def _store_unit(
    sums, out, factor, unit, row, position, size, of_rounding, ended, limit, N: gl.constexpr, BOTH: gl.constexpr
):  # fmt: skip
    """Store a unit's results of w2, or, if BOTH, of w1 and w3, and signal `_round`.

    Args:
        sums: fp32 [ROWS, width of the chunk].
        factor: the chunk's routing weights; None for w2.
        row: first row of the results.
        position, size: first position of the chunk's pairs, and their number.
        ended: the number of units of this program before this one.
    """
    WIDTH: gl.constexpr = sums.shape[1]
    if BOTH:
        tickets, stored, read = of_rounding
        gate, up = gl.split(gl.permute(gl.reshape(sums, [8, 2, 8, WIDTH]), (0, 2, 3, 1)))
        gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        value = gl.reshape(gated_values(gate, up, limit), [HALF, WIDTH])
        kept: gl.constexpr = value.type.layout
        token = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, kept))
        value *= gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, kept)), 0)
        lines = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, kept))
        to = out + (gl.expand_dims((position + token).to(gl.int64) * N, 0) + gl.expand_dims(lines, 1))
        await_freed(read, ended)
        tickets.index(ended % TICKETS).store(gl.full([1], unit, gl.int32, EACH_WARP))
        gl.store(to, value.to(gl.bfloat16), gl.expand_dims(token < size, 0))
        tell(stored, ended)
    else:
        token = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, held(WIDTH)))
        line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, held(WIDTH)))
        lines = row + line % 16 // 8 * HALF + line // 16 * 8 + line % 8
        to = out + (gl.expand_dims((position + token).to(gl.int64) * N, 0) + gl.expand_dims(lines, 1))
        gl.store(to, sums.to(gl.bfloat16), gl.expand_dims(token < size, 0))


@gluon.jit
def _next_unit(units, number):
    """Return the unit that begins with stage `number`, or -1, and the first position and size of its chunk."""
    at = number % (units.shape[0] // 2) * 2
    unit = gl.max(units.index(at).load(EACH_WARP), 0)
    place = gl.max(units.index(at + 1).load(EACH_WARP), 0)
    return unit, place >> 8, place & 255


@gluon.jit
def _compute_unit(
    item, given, scales, number, buffer, routing, out, own_scales, stages, of_rounding, limit,
    N: gl.constexpr, K: gl.constexpr, TIMES: gl.constexpr, BOTH: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Compute a unit from stage `number` on, and store it.

    Args:
        item: the unit; whether it is one of the shared expert; first row of results; first position and size of its
            chunk; the number of units of this program before this one.
        given, scales: inputs and their scales, as views with the width of the product.
        buffer: where the chunk's inputs are.
        routing: pointer to the chunk's routing weights, if BOTH.
        TIMES: how often the width of the product fits into that of the widest.
    """
    unit, is_own, row, position, size, ended = item
    WIDTH: gl.constexpr = given.shape[1]
    factor = None
    if BOTH:
        factor = gl.load(routing + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, held(WIDTH))))
    sums = unit_sums(
        is_own, row, number, buffer * (K // 32) * TIMES, stages, given, scales, own_scales, K, TIMES, SHARED
    )  # fmt: skip
    _store_unit(sums, out, factor, unit, row, position, size, of_rounding, ended, limit, N, BOTH)


@gluon.jit
def _multiply(
    out, routing, own, own_scales, stages, of_inputs, of_rounding, limit,
    N: gl.constexpr, K: gl.constexpr, NARROW: gl.constexpr, TOKENS: gl.constexpr, BOTH: gl.constexpr,
    SHARED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Multiply the units that `_bring` loads, and store bf16 results by position."""
    _codes, _scales, units, filled, _freed = stages
    buffers, scales, input_filled, input_freed = of_inputs
    BUFFERS: gl.constexpr = input_filled.shape[0]
    EACH: gl.constexpr = HALF if BOTH else ROWS
    TIMES: gl.constexpr = TOKENS // NARROW
    given = buffers._reinterpret(gl.float8e4nv, [BUFFERS * (K // 32), TOKENS, 32], INPUTS)
    narrow = buffers._reinterpret(gl.float8e4nv, [BUFFERS * (K // 32) * TIMES, NARROW, 32], INPUTS)
    factors = scales._reinterpret(gl.float32, [BUFFERS * (K // 128), TOKENS], PLAIN)
    narrow_factors = scales._reinterpret(gl.float32, [BUFFERS * (K // 128) * TIMES, NARROW], PLAIN)
    number, buffer, ended, before = 0, -1, 0, -1
    if not BOTH:
        wait_for_inputs(OVERLAP)
    await_filled(filled, 0)
    unit, position, size = _next_unit(units, 0)
    while unit >= 0:
        chunk, row = unit // (N // EACH), unit % (N // EACH) * EACH
        is_own = chunk < (own + TOKENS - 1) // TOKENS
        if chunk != before:
            if before >= 0:
                tell(input_freed, buffer)
            buffer += 1
            before = chunk
            await_filled(input_filled, buffer)
        slot, item = buffer % BUFFERS, (unit, is_own, row, position, size, ended)
        weights = routing + chunk * TOKENS if BOTH else None
        if TOKENS > NARROW and size > NARROW:
            _compute_unit(
                item, given, factors, number, slot, weights, out, own_scales, stages, of_rounding, limit, N, K, 1,
                BOTH, SHARED,
            )  # fmt: skip
        else:
            _compute_unit(
                item, narrow, narrow_factors, number, slot, weights, out, own_scales, stages, of_rounding, limit, N, K,
                TIMES, BOTH, SHARED,
            )  # fmt: skip
        number += steps(is_own, K, SHARED)
        ended += 1
        unit, position, size = _next_unit(units, number)
    if BOTH:
        tickets, stored, read = of_rounding
        await_freed(read, ended)
        tickets.index(ended % TICKETS).store(gl.full([1], -1, gl.int32, EACH_WARP))
        tell(stored, ended)


@gluon.jit
def _round_block(
    inner, chunks, inputs, input_scales, block, N: gl.constexpr, NARROW: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Round a block of 128 inner values of a chunk's pairs. block: its index among the blocks of all chunks."""
    slot = gl.arange(0, 8, layout=gl.SliceLayout(1, INNER))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, INNER))
    chunk, part = block // (N // BLOCK), block % (N // BLOCK)
    is_own, _expert, position, size = chunk_of(chunks, chunk, TOKENS)
    width = gl.where(size > NARROW, TOKENS, NARROW)
    at = gl.where(is_own, place(column, width, False), place(column, width, True))
    for eight in range((size + 7) // 8):
        some = eight * 8 + slot
        begin = (position + some).to(gl.int64) * N + part * BLOCK
        values = gl.load(
            inner + (gl.expand_dims(begin, 1) + gl.expand_dims(column, 0)), gl.expand_dims(some < size, 1),
            other=0.0, cache_modifier=".cg",
        ).to(gl.float32)  # fmt: skip
        scale = power_of_two_ceil(gl.maximum(gl.max(gl.abs(values), 1), FP8_FLOOR) * (1.0 / FP8_LARGEST))
        inverse = ((254 << 23) - scale).to(gl.float32, bitcast=True)
        codes = (values * gl.expand_dims(inverse, 1)).to(gl.float8e4nv).to(gl.int8, bitcast=True)
        to = gl.expand_dims(some * 32, 1) + gl.expand_dims(at, 0)
        gl.store(inputs + (chunk * (N * TOKENS) + part * (BLOCK * width) + to), codes)
        gl.store(input_scales + block * TOKENS + some, scale.to(gl.float32, bitcast=True))


@gluon.jit
def _round(
    inner, chunks, inputs, input_scales, counters, of_rounding, N: gl.constexpr, NARROW: gl.constexpr,
    TOKENS: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """Round blocks of 128 inner values to w2's inputs, each once both of its units are stored. Idle for w2."""
    if BOTH:
        tickets, stored, read = of_rounding
        ended = 0
        await_filled(stored, 0)
        unit = gl.max(tickets.index(0).load(ONE), 0)
        while unit >= 0:
            tell(read, ended)
            ended += 1
            block = unit // (BLOCK // HALF)
            if gl.atomic_add(counters + block, 1, sem="acq_rel") == BLOCK // HALF - 1:
                _round_block(inner, chunks, inputs, input_scales, block, N, NARROW, TOKENS)
            await_filled(stored, ended)
            unit = gl.max(tickets.index(ended % TICKETS).load(ONE), 0)


@gluon_launched(do_not_specialize=["pairs", "own"])
def products(
    first, first_scale, second, second_scale,  # descriptors of codes [E * N, K / 2] and of words of scales
    own_first, own_second,  # descriptors of the shared expert's codes [N, K], if SHARED
    own_first_scale, own_second_scale,  # uint8 [N / 128, K / 128] e8m0
    inputs,  # descriptor of e4m3 [chunks * K / 32 * TOKENS, 32], as `fp8_inputs` stores them
    input_scales,  # descriptor of fp32 [chunks * K / 512 * TOKENS, 4] with dimensions [chunks, K / 128, TOKENS]
    words,  # int64, chunks of routed experts as few_tokens_prepare.chunk_parts reads them
    count,  # int32: how many there are
    pairs,
    own,  # tokens of the shared expert, or 0
    routing,  # fp32 [chunks, TOKENS], if BOTH
    out,  # bf16 [pairs + own, N] by position
    next_inputs, next_scales,  # of w2, int8 and fp32 in the form of inputs and input_scales, if BOTH
    counters,  # int32 [chunks, N / 128] zeros, if BOTH
    turns,  # int32, 0: batches that were taken
    limit,
    N: gl.constexpr, K: gl.constexpr, NARROW: gl.constexpr, TOKENS: gl.constexpr, SLOTS: gl.constexpr,
    BUFFERS: gl.constexpr, BOTH: gl.constexpr, SHARED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute the gated product of w1 and w3 if BOTH, otherwise the product of one matrix."""
    codes = gl.allocate_shared_memory(gl.int8, [SLOTS * 4, HALF, TILE], first.layout)
    scales = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, HALF, WORDS], first_scale.layout)
    parts: gl.constexpr = K * TOKENS // (INPUT_ROWS * 32)
    given = gl.allocate_shared_memory(gl.int8, [BUFFERS * parts, INPUT_ROWS, 32], inputs.layout)
    factors = gl.allocate_shared_memory(gl.float32, [BUFFERS * (K // 512), TOKENS, 4], input_scales.layout)
    units = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, 1], PLAIN)
    tickets = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], PLAIN)
    filled, freed = ring(SLOTS, 1, 1)
    input_filled, input_freed = ring(BUFFERS, 1, 1)
    stored, read = ring(TICKETS, 1, 1)
    if BOTH:
        # the previous launch lists the chunks; w2's starts after that one has ended, see `pdl.wait_for_inputs`
        wait_for_inputs(OVERLAP)
    each: gl.constexpr = N // (HALF if BOTH else ROWS)
    own_units = (own + TOKENS - 1) // TOKENS * each
    total = gl.load(count, cache_modifier=".cg") * each + own_units
    stages, of_inputs = (codes, scales, units, filled, freed), (given, factors, input_filled, input_freed)
    chunks, routed, shared = (words, pairs, own), (first, first_scale, second, second_scale), (own_first, own_second)
    of_rounding = (tickets, stored, read)
    gl.warp_specialize(
        [
            (_multiply, (
                out, routing, own, (own_first_scale, own_second_scale), stages, of_inputs, of_rounding,
                limit, N, K, NARROW, TOKENS, BOTH, SHARED, OVERLAP,
            )),
            (_bring, (
                routed, shared, inputs, input_scales, chunks, turns, total, own_units, stages, of_inputs, N, K, NARROW,
                TOKENS, BOTH, SHARED, OVERLAP,
            )),
            (_round, (out, chunks, next_inputs, next_scales, counters, of_rounding, N, NARROW, TOKENS, BOTH)),
        ],
        [1, 1],
        [BRINGING, ROUNDING],
    )  # fmt: skip
