"""Products of one token or two with GGUF blocks on int8 tensor cores, in Gluon.

Codes are int8 as they are stored, or four of a word become int8 at once. An input becomes an integer of 23 bits,
relative to the largest input in a warp's pass (256 columns or fewer), and has three int8 digits, each in a column of
the right operand. Tensor cores sum their products exactly. The integers that scale parts of a block multiply these sums
exactly, too: the largest are 2 ** 27 (Q6_K). The block's scale multiplies them in fp32.

A program multiplies tiles of 16 rows; PARTS warps share the columns of each. All of them use the same digits. In the
left operand, lane [g, t] of a warp holds bytes 4 t to 4 t + 3 and 16 + 4 t to 19 + 4 t of rows g and g + 8: here
the eight codes of octet t. In the right one, it holds the same bytes of column g: digit g % 4 of token g // 4.
"""

import math

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv4cli.kernels.ggml.kernel.fields import block_and_group, blocks, octets_per_block, stored_words
from dsv4cli.kernels.ggml.kernel.int8_codes import permuted, signed_codes
from dsv4cli.kernels.ggml.kernel.octets import (
    HIGHEST,
    LOWEST,
    block_scales,
    has_codebook,
    has_halves,
    has_offset,
    has_steps,
    steps,
)

# 1.5 * 2 ** 23 in fp32: its sum with an integer of up to 2 ** 22 has that integer in its lowest bits. The largest sum
# of a block without steps is 2 ** 22 (Q3_K: 256 codes of -128 times digits of -128)
_MAGIC, _MAGIC_VALUE = gl.constexpr(0x4B400000), gl.constexpr(12582912.0)
# half of each digit's range: after it is added, an integer's three lowest bytes are its digits plus this
_HALVES = gl.constexpr(0x00808080)
# biased exponents: of the factor that makes a number of exponent 0 less than 2 ** 22, and of the largest factor whose
# inverse is no subnormal number
_EXPONENT, _LARGEST = gl.constexpr(127 + 127 + 21), gl.constexpr(253)
# all bits of fp32 but the sign
_MAGNITUDE = gl.constexpr(0x7FFFFFFF)


@constexpr_function
def _rows_layout(warps):
    """Return how warps hold words of [warp, half of 16 rows, g, t]."""
    return gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@constexpr_function
def _sums_layout(warps):
    """Return how warps hold sums of [warp, half of 16 rows, g, t, column % 2]."""
    return gl.BlockedLayout([1, 2, 1, 1, 2], [1, 1, 8, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@constexpr_function
def _products_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def _inputs_layout(passes, warps):
    """Return how warps hold inputs of [pass, warp, octet, column of it]."""
    return gl.BlockedLayout([passes, 1, 1, 8], [1, 1, 32, 1], [1, warps, 1, 1], [3, 2, 1, 0])


@constexpr_function
def _digits_layout(tiles, parts):
    """Return how warps hold digits as words of [token, group, tile, part, t, digit, half of an octet]; one group."""
    lanes = [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 2, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 2, 0], [1] + [0] * 6]
    of_parts = [[0, 0, 0, 1 << bit, 0, 0, 0] for bit in range(parts.bit_length() - 1)]
    of_tiles = [[0, 0, 1 << bit, 0, 0, 0, 0] for bit in range(tiles.bit_length() - 1)]
    shape = [2, 1, tiles, parts, 4, 4, 2]
    return gl.DistributedLinearLayout([[0] * 6 + [1]], lanes, of_parts + of_tiles, [], shape)


@constexpr_function
def _factors_layout(tiles, parts):
    """Return how warps hold factors of [tile, part, t]."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    of_parts = [[0, 1 << bit, 0] for bit in range(parts.bit_length() - 1)]
    of_tiles = [[1 << bit, 0, 0] for bit in range(tiles.bit_length() - 1)]
    return gl.DistributedLinearLayout([], lanes, of_parts + of_tiles, [], [tiles, parts, 4])


@constexpr_function
def _at_once(passes):
    """Return how many passes a thread divides at once: up to 8, 32 registers of inputs."""
    return math.gcd(passes, 8)


@constexpr_function
def _memory_layout(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank - 1, -1, -1)])


@constexpr_function
def _only(dim, rank, layout):
    """Return how numbers along one dimension of a layout are held."""
    for other in reversed([one for one in range(rank) if one != dim]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(values, DIM: gl.constexpr, RANK: gl.constexpr):
    """Return values along one dimension as a tensor of RANK dimensions."""
    for other in gl.static_range(RANK):
        if other != DIM:
            values = gl.expand_dims(values, other)
    return values


@gluon.jit
def _numbers(COUNT: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """Return 0 to COUNT - 1 along one dimension of a layout."""
    return _along(gl.arange(0, COUNT, _only(DIM, RANK, layout)), DIM, RANK)


@gluon.jit
def operand_places(TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the tile of the words' rows, [W, 1, 1, 1], the half of the tile, [1, 2, 1, 1], and the row, [1, 1, 8, 1].

    There are TILES tiles, of 16 rows each.
    """
    held: gl.constexpr = _rows_layout(TILES * PARTS)
    return _numbers(TILES * PARTS, 0, 4, held) // PARTS, _numbers(2, 1, 4, held), _numbers(8, 2, 4, held)


@gluon.jit
def operand_rows(TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the rows of `products`, 0 to TILES * 16 - 1, as words have them: [W, 2, 8, 1]."""
    tile, half, row = operand_places(TILES, PARTS)
    return tile * 16 + half * 8 + row


@gluon.jit
def _bytes(words):
    """Return the bytes of words [..] as int8 [.., 2, 2]."""
    two = gl.join(words, words)
    # an instruction for four elements: the word, as it is
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.join(two, two)], dtype=gl.int8, is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def _left(low, high, WARPS: gl.constexpr):
    """Return the codes of octets, int8, as a left operand [WARPS, 16, 32]."""
    each = _bytes(gl.join(low, high))  # [warp, half of rows, g, t, half of an octet, 2, 2]
    x = gl.reshape(gl.permute(each, (0, 1, 2, 4, 3, 5, 6)), [WARPS, 16, 32])
    return gl.convert_layout(x, gl.DotOperandLayout(0, _products_layout(WARPS), 4), assert_trivial=True)


@gluon.jit
def digits_of(
    x, places, K: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, EACH: gl.constexpr, CACHE: gl.constexpr
):  # fmt: skip
    """Divide tokens into digits, in shared memory.

    Args:
        x: bf16.
        places: int64, where each token begins.
        CACHE: the modifier of loads: ".cg" before the kernel waits for the previous one.

    Returns:
        The digits, words of four of [tokens * passes, EACH, part, t, digit, half of an octet], and the factors of their
        integers, fp32 [tokens * passes, part].
    """
    WARPS: gl.constexpr = TILES * PARTS
    # passes that a warp divides, and how many of them at once
    PASSES: gl.constexpr = K // 32 // WARPS // EACH
    ONCE: gl.constexpr = _at_once(PASSES)
    held: gl.constexpr = _inputs_layout(ONCE, WARPS)
    warp = _numbers(WARPS, 1, 4, held)
    column = (_numbers(ONCE, 0, 4, held) * TILES + warp // PARTS) * (EACH * 32) + warp % PARTS * (K // PARTS)
    column += _numbers(EACH * 4, 2, 4, held) * 8 + _numbers(8, 3, 4, held)
    TIMES: gl.constexpr = PASSES // ONCE
    shape: gl.constexpr = [len(places) * TIMES, ONCE, TILES, EACH, PARTS, 4, 4, 2]
    memory = gl.allocate_shared_memory(gl.int32, shape, _memory_layout(7))
    factors = gl.allocate_shared_memory(gl.float32, [len(places) * TIMES, ONCE, TILES, PARTS], _memory_layout(3))
    for token in gl.static_range(len(places)):
        for time in range(TIMES):
            at = x + (places[token] + (column + time * (ONCE * TILES * EACH * 32)))
            values = gl.load(at, cache_modifier=CACHE).to(gl.float32)
            # as integers: NaN is larger than infinity, and infinity than any number
            exponent = gl.max(gl.max(values.to(gl.int32, bitcast=True) & _MAGNITUDE, 3), 2) >> 23
            power = gl.minimum(_EXPONENT - exponent, _LARGEST)
            # NaN and infinity make every result NaN
            inverse = gl.where(exponent == 255, float("nan"), ((254 - power) << 23).to(gl.float32, bitcast=True))
            factors.index(token * TIMES + time).store(gl.reshape(inverse, [ONCE, TILES, PARTS]))
            factor = gl.expand_dims(gl.expand_dims((power << 23).to(gl.float32, bitcast=True), 2), 3)
            integers = (values * factor + _MAGIC_VALUE).to(gl.int32, bitcast=True) - _MAGIC
            digits = _digits(gl.reshape(integers + _HALVES, [ONCE, WARPS, EACH * 4, 2, 2, 2]))
            digits = gl.reshape(digits, [ONCE, TILES, PARTS, EACH, 4, 2, 4])
            memory.index(token * TIMES + time).store(gl.permute(digits, (0, 1, 3, 2, 4, 6, 5)))
    # the compiler would wait for the stores in each pass of `products`
    tl.debug_barrier()
    ALL: gl.constexpr = len(places) * PASSES * TILES
    return (
        memory._reinterpret(gl.int32, [ALL, EACH, PARTS, 4, 4, 2], _memory_layout(5)),
        factors._reinterpret(gl.float32, [ALL, PARTS], _memory_layout(1)),
    )


@gluon.jit
def _digits(integers):
    """Return the digits of integers plus _HALVES, [.., 2, 2] of four columns, as words [.., 2, 2] of one digit each.

    The last word is 0.
    """
    even, odd = gl.split(integers)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    # byte k of four integers is digit k of four columns
    low, high = permuted(a, b, 0x5140), permuted(c, d, 0x5140)
    first, second = permuted(low, high, 0x5410) ^ HIGHEST, permuted(low, high, 0x7632) ^ HIGHEST
    third = permuted(permuted(a, b, 0x62), permuted(c, d, 0x62), 0x5410) ^ HIGHEST
    return gl.join(gl.join(first, third), gl.join(second, third & 0))


@gluon.jit
def _digits_of(memory, i: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return a token's digits of group `i` of a pass, in the layout of all: [1, 1, 1, part, t, digit, 2]."""
    of_tiles: gl.constexpr = gl.SliceLayout(2, _digits_layout(TILES, PARTS))
    words = memory.slice(i, 1).load(gl.SliceLayout(0, of_tiles))
    return gl.expand_dims(gl.expand_dims(words, 0), 2)


@gluon.jit
def _right(digits, tokens, number, i: gl.constexpr, PASSES: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the digits of group `i` of pass `number` as a right operand [TILES * PARTS, 32, 8]."""
    held: gl.constexpr = _digits_layout(TILES, PARTS)
    words, column = _digits_of(digits.index(tokens[0] * PASSES + number), i, TILES, PARTS), _numbers(2, 0, 7, held)
    if len(tokens) == 2:
        other = _digits_of(digits.index(tokens[1] * PASSES + number), i, TILES, PARTS)
        words = gl.where(column == 0, words, other)
    words, _ = gl.broadcast(words, column + _numbers(TILES, 2, 7, held))
    each = _bytes(words)  # [token, 1, tile, part, t, digit, half of an octet, 2, 2]
    x = gl.reshape(gl.permute(each, (2, 3, 6, 4, 7, 8, 0, 1, 5)), [TILES * PARTS, 32, 8])
    return gl.convert_layout(x, gl.DotOperandLayout(1, _products_layout(TILES * PARTS), 4), assert_trivial=True)


@gluon.jit
def _no_sums(start: gl.constexpr, WARPS: gl.constexpr):
    return gl.full([WARPS, 16, 8], start, gl.int32, _products_layout(WARPS))


@gluon.jit
def _by_lane(sums, WARPS: gl.constexpr):
    """Return sums as int32 [warp, half of rows, g, t, column % 2]."""
    return gl.convert_layout(gl.reshape(sums, [WARPS, 2, 8, 4, 2]), _sums_layout(WARPS), assert_trivial=True)


@gluon.jit
def _of_half(values, half, HALF: gl.constexpr):
    """Return the values of two of four lanes for all four."""
    return gl.expand_dims(gl.max(gl.where(half == HALF, values, -128), 3), 3)


@gluon.jit
def _twice(values):
    """Return values of rows as of their sums."""
    return gl.join(values, values)


@gluon.jit
def _stepped(sums, low, high, step, lane, right, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Add the products of 32 columns, times the steps of rows, to exact sums."""
    if has_halves(KIND):
        for half in gl.static_range(2):
            mask = gl.where(lane // 2 == half, -1, 0)
            own = _product(low & mask, high & mask, right, _no_sums(0, WARPS), WARPS)
            sums += _by_lane(own, WARPS) * _twice(_of_half(step, lane // 2, half))
    else:
        sums += _by_lane(_product(low, high, right, _no_sums(0, WARPS), WARPS), WARPS) * _twice(step)
    return sums


@gluon.jit
def _product(low, high, right, sums, WARPS: gl.constexpr):
    """Add the products of 32 columns to exact sums, int32 [WARPS, 16, 8]."""
    return mma_v2(_left(low, high, WARPS), right, sums)


@gluon.jit
def _groups_product(words, group, table, lane, rights, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Return the products of groups of 32 columns of one block, from group `group` on."""
    stepped = gl.full([WARPS, 2, 8, 4, 2], 0, gl.int32, _sums_layout(WARPS))
    sums, offsets = _no_sums(_MAGIC, WARPS), _no_sums(_MAGIC, WARPS)
    for i in gl.static_range(len(words)):
        low, high = signed_codes(words[i], group + i, lane, table, KIND)
        step, offset = steps(words[i], group + i, lane, KIND)
        if has_steps(KIND):
            stepped = _stepped(stepped, low, high, step, lane, rights[i], KIND, WARPS)
        else:
            sums = _product(low, high, rights[i], sums, WARPS)
        if has_offset(KIND):
            four = low & 0 | offset * LOWEST
            offsets = _product(four, four, rights[i], offsets, WARPS)
    scale, offset_scale = block_scales(words[0], KIND)
    if has_steps(KIND):
        total = stepped.to(gl.float32) * _twice(scale)
    else:
        total = (_by_lane(sums, WARPS).to(gl.float32, bitcast=True) - _MAGIC_VALUE) * _twice(scale)
    if has_offset(KIND):
        total -= (_by_lane(offsets, WARPS).to(gl.float32, bitcast=True) - _MAGIC_VALUE) * _twice(offset_scale)
    return total


@gluon.jit
def pass_words(
    rows, number, K: gl.constexpr, KIND: gl.constexpr, HEIGHT: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Return what is stored of pass `number`: EACH groups of 32 columns.

    rows: as of `fields.tile_rows`, at `operand_places`.
    """
    first, lane = _first_group(number, K, TILES, PARTS, EACH)
    found = ()
    for i in gl.static_range(EACH):
        b, group = block_and_group(first, i, KIND, EACH)
        found += (stored_words(rows, b, group, lane, KIND, blocks(KIND, K), HEIGHT),)
    return found


@gluon.jit
def _first_group(number, K: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, EACH: gl.constexpr):
    """Return the first group of a pass, and the lane's octet of each."""
    held: gl.constexpr = _rows_layout(TILES * PARTS)
    # int64, so that what is added to it becomes part of the load instructions
    part = _numbers(TILES * PARTS, 0, 4, held).to(gl.int64) % PARTS
    return part * (K // 32 // PARTS) + number * EACH, _numbers(4, 3, 4, held)


@gluon.jit
def _pass_product(
    words, digits, tokens, number, table, K: gl.constexpr, KIND: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Return the products of pass `number`."""
    digits, factors = digits
    PASSES: gl.constexpr = K // 32 // PARTS // EACH
    WARPS: gl.constexpr = TILES * PARTS
    PER_BLOCK: gl.constexpr = octets_per_block(KIND) // 4
    # groups that are multiplied together: whole blocks, or single groups
    TOGETHER: gl.constexpr = PER_BLOCK if EACH % PER_BLOCK == 0 else 1
    first, lane = _first_group(number, K, TILES, PARTS, EACH)
    total = gl.full([WARPS, 2, 8, 4, 2], 0.0, gl.float32, _sums_layout(WARPS))
    rights = ()
    for i in gl.static_range(EACH):
        rights += (_right(digits, tokens, number, i, PASSES, TILES, PARTS),)
    for i in gl.static_range(0, EACH, TOGETHER):
        group = block_and_group(first, i, KIND, EACH)[1]
        own, right = words[i : i + TOGETHER], rights[i : i + TOGETHER]
        total += _groups_product(own, group, table, lane, right, KIND, WARPS)
    return total * _factor(factors, tokens, number, PASSES, TILES, PARTS)


@gluon.jit
def _factor(factors, tokens, number, PASSES: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the factors of the integers of pass `number`: fp32 [warp, 1, 1, t, 1]."""
    held: gl.constexpr = _factors_layout(TILES, PARTS)
    own: gl.constexpr = _only(1, 3, held)
    t = _numbers(4, 2, 3, held)
    found = _along(factors.index(tokens[0] * PASSES + number).load(own), 1, 3)
    if len(tokens) == 2:
        found = gl.where(t < 2, found, _along(factors.index(tokens[1] * PASSES + number).load(own), 1, 3))
    found, _ = gl.broadcast(found, t + _numbers(TILES, 0, 3, held))
    found = gl.reshape(found, [TILES * PARTS, 1, 1, 4, 1])
    return gl.convert_layout(found, _sums_layout(TILES * PARTS), assert_trivial=True)


@gluon.jit
def _results(sums, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the sums of digits and parts: fp32 [rows, 2]."""
    held: gl.constexpr = _sums_layout(TILES * PARTS)
    digit = _numbers(4, 3, 5, held) % 2 * 2 + _numbers(2, 4, 5, held)
    # the fourth digit is 0
    power = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, 65536.0))
    each = gl.reshape(sums * power, [TILES, PARTS, 16, 2, 4])
    return gl.reshape(gl.sum(gl.sum(each, 4), 1), [TILES * 16, 2])


@gluon.jit
def products(
    words,  # of pass 0, see `pass_words`
    rows,
    digits,  # as `digits_of` returns them, with their factors
    tokens,  # which of them: one or two
    table,
    K: gl.constexpr,  # a multiple of 32 * TILES * PARTS * EACH
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,  # rows of a tile of blocks
    TILES: gl.constexpr,
    PARTS: gl.constexpr,
    EACH: gl.constexpr,
):
    """Return the products of TILES * 16 rows with one token or two: fp32 [rows, 2].

    A token's sums do not depend on the other. EACH: groups of 32 columns in a pass of the loop.
    """
    PASSES: gl.constexpr = K // 32 // PARTS // EACH
    sums = gl.full([TILES * PARTS, 2, 8, 4, 2], 0.0, gl.float32, _sums_layout(TILES * PARTS))
    for number in range(1, PASSES):
        # the next pass is loaded while this one is multiplied
        later = pass_words(rows, number, K, KIND, HEIGHT, TILES, PARTS, EACH)
        if has_codebook(KIND):
            # otherwise ptxas delays the loads behind those from the codebook
            tl.debug_barrier()
        sums += _pass_product(words, digits, tokens, number - 1, table, K, KIND, TILES, PARTS, EACH)
        words = later
    sums += _pass_product(words, digits, tokens, PASSES - 1, table, K, KIND, TILES, PARTS, EACH)
    return _results(sums, TILES, PARTS)
