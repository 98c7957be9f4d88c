"""Products of one token or two with GGUF blocks on int8 tensor cores, in Gluon.

Codes are int8 as they are stored, or four of a word become int8 at once. An input becomes an integer of 23 bits,
relative to the largest input in a warp's pass (256 columns or fewer), and has three int8 digits, each in a column of
the right operand. Tensor cores sum their products exactly. The integers that scale parts of a block multiply these sums
exactly, too: the largest are 2 ** 27 (Q6_K). The block's scale multiplies them in fp32.

A program multiplies tiles of 16 rows; PARTS warps share the columns of each. All of them use the same digits. In the
left operand, lane [g, t] of a warp holds bytes 4 t to 4 t + 3 and 16 + 4 t to 19 + 4 t of rows g and g + 8: here
the eight codes of octet t. In the right one, it holds the same bytes of column g: digit g % 4 of token g // 4.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv4cli.kernels.ggml.kernel.fields import block_and_group, blocks, octets_per_block, stored_words
from dsv4cli.kernels.ggml.kernel.int8_codes import signed_codes
from dsv4cli.kernels.ggml.kernel.int8_digits import MAGIC, MAGIC_VALUE
from dsv4cli.kernels.ggml.kernel.int8_layouts import (
    along,
    digits_layout,
    factors_layout,
    numbers,
    only,
    products_layout,
    rows_layout,
    sums_layout,
)
from dsv4cli.kernels.ggml.kernel.octets import (
    LOWEST,
    block_scales,
    has_codebook,
    has_halves,
    has_offset,
    has_steps,
    steps,
)


@gluon.jit
def operand_places(TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the tile of the words' rows, [W, 1, 1, 1], the half of the tile, [1, 2, 1, 1], and the row, [1, 1, 8, 1].

    There are TILES tiles, of 16 rows each.
    """
    held: gl.constexpr = rows_layout(TILES * PARTS)
    return numbers(TILES * PARTS, 0, 4, held) // PARTS, numbers(2, 1, 4, held), numbers(8, 2, 4, held)


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
    return gl.convert_layout(x, gl.DotOperandLayout(0, products_layout(WARPS), 4), assert_trivial=True)


@gluon.jit
def _digits_of(memory, i: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return a token's digits of group `i` of a pass, in the layout of all: [1, 1, 1, part, t, digit, 2]."""
    of_tiles: gl.constexpr = gl.SliceLayout(2, digits_layout(TILES, PARTS))
    words = memory.slice(i, 1).load(gl.SliceLayout(0, of_tiles))
    return gl.expand_dims(gl.expand_dims(words, 0), 2)


@gluon.jit
def _right(digits, tokens, number, i: gl.constexpr, PASSES: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the digits of group `i` of pass `number` as a right operand [TILES * PARTS, 32, 8]."""
    held: gl.constexpr = digits_layout(TILES, PARTS)
    words, column = _digits_of(digits.index(tokens[0] * PASSES + number), i, TILES, PARTS), numbers(2, 0, 7, held)
    if len(tokens) == 2:
        other = _digits_of(digits.index(tokens[1] * PASSES + number), i, TILES, PARTS)
        words = gl.where(column == 0, words, other)
    words, _ = gl.broadcast(words, column + numbers(TILES, 2, 7, held))
    each = _bytes(words)  # [token, 1, tile, part, t, digit, half of an octet, 2, 2]
    x = gl.reshape(gl.permute(each, (2, 3, 6, 4, 7, 8, 0, 1, 5)), [TILES * PARTS, 32, 8])
    return gl.convert_layout(x, gl.DotOperandLayout(1, products_layout(TILES * PARTS), 4), assert_trivial=True)


@gluon.jit
def _no_sums(start: gl.constexpr, WARPS: gl.constexpr):
    return gl.full([WARPS, 16, 8], start, gl.int32, products_layout(WARPS))


@gluon.jit
def _by_lane(sums, WARPS: gl.constexpr):
    """Return sums as int32 [warp, half of rows, g, t, column % 2]."""
    return gl.convert_layout(gl.reshape(sums, [WARPS, 2, 8, 4, 2]), sums_layout(WARPS), assert_trivial=True)


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
    stepped = gl.full([WARPS, 2, 8, 4, 2], 0, gl.int32, sums_layout(WARPS))
    sums, offsets = _no_sums(MAGIC, WARPS), _no_sums(MAGIC, WARPS)
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
        total = (_by_lane(sums, WARPS).to(gl.float32, bitcast=True) - MAGIC_VALUE) * _twice(scale)
    if has_offset(KIND):
        total -= (_by_lane(offsets, WARPS).to(gl.float32, bitcast=True) - MAGIC_VALUE) * _twice(offset_scale)
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
    held: gl.constexpr = rows_layout(TILES * PARTS)
    # int64, so that what is added to it becomes part of the load instructions
    part = numbers(TILES * PARTS, 0, 4, held).to(gl.int64) % PARTS
    return part * (K // 32 // PARTS) + number * EACH, numbers(4, 3, 4, held)


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
    total = gl.full([WARPS, 2, 8, 4, 2], 0.0, gl.float32, sums_layout(WARPS))
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
    held: gl.constexpr = factors_layout(TILES, PARTS)
    own: gl.constexpr = only(1, 3, held)
    t = numbers(4, 2, 3, held)
    found = along(factors.index(tokens[0] * PASSES + number).load(own), 1, 3)
    if len(tokens) == 2:
        found = gl.where(t < 2, found, along(factors.index(tokens[1] * PASSES + number).load(own), 1, 3))
    found, _ = gl.broadcast(found, t + numbers(TILES, 0, 3, held))
    found = gl.reshape(found, [TILES * PARTS, 1, 1, 4, 1])
    return gl.convert_layout(found, sums_layout(TILES * PARTS), assert_trivial=True)


@gluon.jit
def _results(sums, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the sums of digits and parts: fp32 [rows, 2]."""
    held: gl.constexpr = sums_layout(TILES * PARTS)
    digit = numbers(4, 3, 5, held) % 2 * 2 + numbers(2, 4, 5, held)
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
    sums = gl.full([TILES * PARTS, 2, 8, 4, 2], 0.0, gl.float32, sums_layout(TILES * PARTS))
    for number in range(1, PASSES):
        # the next pass is loaded while this one is multiplied
        later = pass_words(rows, number, K, KIND, HEIGHT, TILES, PARTS, EACH)
        if has_codebook(KIND):
            # keeps ptxas from moving these loads below the codebook lookups
            tl.debug_barrier()
        sums += _pass_product(words, digits, tokens, number - 1, table, K, KIND, TILES, PARTS, EACH)
        words = later
    sums += _pass_product(words, digits, tokens, PASSES - 1, table, K, KIND, TILES, PARTS, EACH)
    return _results(sums, TILES, PARTS)
