"""Stages of 64 columns for `ggml_wgmma`: inputs that are loaded to shared memory, weights that are decoded there."""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from dsv4cli.kernels.ggml.kernel.fields import blocks, stored_words, tile_rows
from dsv4cli.kernels.ggml.kernel.fp16 import power
from dsv4cli.kernels.ggml.kernel.fp16_pairs import half_pairs
from dsv4cli.kernels.ggml.kernel.row_words import TILE_ROWS, by_row, row_layout, row_words, step_words
from dsv4cli.kernels.ggml.types import TYPES
from dsv4cli.kernels.gluon_barriers import await_freed, tell

# pairs of a tile, columns of a step, rows that a group of four warps multiplies, and rows of a unit
PAIRS, STEP, ROWS, LINES = gl.constexpr(256), gl.constexpr(64), gl.constexpr(64), gl.constexpr(128)
# slots of 48 KiB; steps of a pass over whole blocks of 256 columns, and groups of warps that decode them in turn
SLOTS, PASS, DECODERS = gl.constexpr(4), gl.constexpr(4), gl.constexpr(2)
# octets of 32 columns of a unit's lines over four warps: eight threads store in different banks
OCTETS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[32, 0], [64, 0]], [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]], [[8, 0], [16, 0]], [], [128, 4]
    )
)
# fp16 and pairs of it in shared memory
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PAIRED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def unit_of(unit, tiles, N: gl.constexpr, BOTH: gl.constexpr):
    """Return a unit's number of pairs, their first position, the row of its expert in the stacks, and its first row."""
    tile_row, tile_start, tile_size = tiles
    height: gl.constexpr = ROWS if BOTH else LINES
    tile = unit // (N // height)
    return (
        gl.load(tile_size + tile), gl.load(tile_start + tile), gl.load(tile_row + tile), unit % (N // height) * height
    )  # fmt: skip


@constexpr_function
def _octets(kind):
    """Return the layout of octets: a row per thread, or four threads per row."""
    return row_layout(4) if by_row(kind) else OCTETS


@constexpr_function
def _block(kind, number):
    """Return which block of 256 columns has group `number` of 32 columns."""
    return number * 32 // TYPES[kind].values


@constexpr_function
def _group(kind, number):
    """Return the number in its block of group `number` of 256 columns."""
    return number % (TYPES[kind].values // 32)


@gluon.jit
def _lines(
    first, second, shifts, expert, row, N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    """Return the rows of a unit's lines, [LINES] as of `tile_rows`, and the factors of their values, [LINES, 1].

    A line's bits: half of the unit, two of the warp, matrix (or the lowest of the row), three of the row.
    """
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, _octets(KIND)))
    low, odd, warp = line & 7, line >> 3 & 1, line >> 4
    begin = expert.to(gl.int64) * N + row
    if BOTH:
        own = begin + (warp * 8 + low)
        tile, place = tile_rows(first, own, K, KIND, TILE_ROWS)
        rows = gl.where(odd > 0, tile_rows(second, own, K, KIND, TILE_ROWS)[0], tile), place
        shift = gl.load(gl.where(odd > 0, shifts[1] + own, shifts[0] + own))
    else:
        own = begin + (warp * 16 + low * 2 + odd)
        rows = tile_rows(first, own, K, KIND, TILE_ROWS)
        shift = gl.load(shifts[0] + own)
    return rows, gl.expand_dims(power(shift), 1)


@gluon.jit
def _stored(rows, b, lane, K: gl.constexpr, KIND: gl.constexpr, NUMBER: gl.constexpr):
    """Load what is stored of step NUMBER of 256 columns b."""
    count: gl.constexpr = blocks(KIND, K)
    if by_row(KIND):
        words = row_words(rows, b, NUMBER, KIND, count)
    else:
        own, first = (gl.expand_dims(rows[0], 1), gl.expand_dims(rows[1], 1)), b * blocks(KIND, 256)
        left, right = first + _block(KIND, NUMBER * 2), first + _block(KIND, NUMBER * 2 + 1)
        words = (
            stored_words(own, left, _group(KIND, NUMBER * 2), lane, KIND, count, TILE_ROWS),
            stored_words(own, right, _group(KIND, NUMBER * 2 + 1), lane, KIND, count, TILE_ROWS),
        )
    return words


@gluon.jit
def _decoded(words, lane, table, factor, KIND: gl.constexpr, NUMBER: gl.constexpr):
    """Decode step NUMBER of 256 columns: pairs of fp16, int32 [LINES, STEP / 2]."""
    if by_row(KIND):
        left, right = step_words(words, NUMBER, 0, KIND), step_words(words, NUMBER, 1, KIND)
    else:
        left, right = words
    a, b, c, d = half_pairs(left, _group(KIND, NUMBER * 2), lane, table, factor, KIND)
    near = gl.join(gl.join(a, c), gl.join(b, d))
    a, b, c, d = half_pairs(right, _group(KIND, NUMBER * 2 + 1), lane, table, factor, KIND)
    both = gl.join(near, gl.join(gl.join(a, c), gl.join(b, d)))  # [line, octet, word / 2, word % 2, group]
    return gl.reshape(gl.permute(both, (0, 4, 1, 2, 3)), [LINES, STEP // 2])


@gluon.jit
def decode(
    first, second, shifts, table, steps, tiles, total,
    N: gl.constexpr, K: gl.constexpr, BOTH: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Decode weights of one in DECODERS of units' steps into shared memory."""
    _inputs, weights, filled, freed = steps
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, _octets(KIND))), 0)
    pairs = weights._reinterpret(gl.int32, [SLOTS, LINES, STEP // 2], PAIRED)
    number = PART
    for unit in range(gl.program_id(0), total, gl.num_programs(0)):
        _count, _start, expert, row = unit_of(unit, tiles, N, BOTH)
        rows, factor = _lines(first, second, shifts, expert, row, N, K, BOTH, KIND)
        words = _stored(rows, 0, lane, K, KIND, PART)
        following = _stored(rows, 0, lane, K, KIND, PART + DECODERS)
        for b in range(K // 256):
            # after the last columns, they are loaded again, and not used
            later = gl.minimum(b + 1, K // 256 - 1)
            for step in gl.static_range(PART, PASS, DECODERS):
                found = _decoded(words, lane, table, factor, KIND, step)
                await_freed(freed, number)
                pairs.index(number % SLOTS).store(found)
                fence_async_shared()
                tell(filled, number)
                # the fence waits for loads, so these begin after it
                words, following = following, _stored(rows, later, lane, K, KIND, step)
                number += DECODERS


@gluon.jit
def bring_tile(x, inputs, barrier, slot, start, column, FIRST: gl.constexpr, MORE: gl.constexpr):
    """Load a step's inputs of FIRST + MORE pairs."""
    mbarrier.expect(barrier, (FIRST + MORE) * STEP * 2)
    boxes = inputs._reinterpret(gl.float16, [SLOTS * 4, 64, STEP], HALVES)
    halves = inputs._reinterpret(gl.float16, [SLOTS * 2, 128, STEP], HALVES)
    if FIRST == 64:
        tma.async_copy_global_to_shared(x[0], [start, column], barrier, boxes.index(slot * 4))
    elif MORE == 128:
        tma.async_copy_global_to_shared(x[2], [start, column], barrier, inputs.index(slot))
    else:
        tma.async_copy_global_to_shared(x[1], [start, column], barrier, halves.index(slot * 2))
        if MORE:
            tma.async_copy_global_to_shared(x[0], [start + 128, column], barrier, boxes.index(slot * 4 + 2))


@gluon.jit
def bring(x, steps, number, tile, column):
    """Load the inputs of a step of a tile, the step `number` of all, once its slot is free."""
    inputs, _weights, filled, freed = steps
    start, count = tile
    await_freed(freed, number)
    slot = number % SLOTS
    barrier = filled.index(slot)
    if count <= 64:
        bring_tile(x, inputs, barrier, slot, start, column, 64, 0)
    elif count <= 128:
        bring_tile(x, inputs, barrier, slot, start, column, 128, 0)
    elif count <= 192:
        bring_tile(x, inputs, barrier, slot, start, column, 128, 64)
    else:
        bring_tile(x, inputs, barrier, slot, start, column, 128, 128)
