"""Loads of GGUF blocks in a Triton kernel, eight columns at a time.

Eight consecutive columns, an octet, share a scale in every type, and their codes have the same shift in consecutive
bytes. Rows are in tiles, so that the codes of an octet are one or two loads, and those of several rows are adjacent: an
H200 takes 1.9 cycles for a load from two lines of the first-level cache, and 7.3 from eight. `stored_words` returns all
that is stored of an octet, undecoded, so that a loop can load several octets before it decodes the first.
"""

import math

import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.ggml import types
from dsv4cli.kernels.ggml.types import TYPES

row_bytes = constexpr_function(types.row_bytes)


@constexpr_function
def octets_per_block(kind):
    """Return how many octets a block has; 1 for types without blocks."""
    return max(TYPES[kind].values // 8, 1)


@constexpr_function
def blocks(kind, columns):
    """Return how many blocks this many columns have; for types without blocks, the number of columns."""
    return columns // TYPES[kind].values


@constexpr_function
def field_begin(kind, count, field):
    """Return where a field begins in a row of `count` blocks."""
    return TYPES[kind].fields[field] * count


@constexpr_function
def field_size(kind, field):
    """Return the bytes of a field in a block."""
    return TYPES[kind].ends[field + 1] - TYPES[kind].ends[field]


@constexpr_function
def field_unit(kind, field):
    """Return the bytes of a unit of a field; see `types.to_tiles`."""
    return TYPES[kind].units[field]


@constexpr_function
def alignment(kind, count, height):
    """Return the alignment in bytes, at most 8, of the fields of tiles of rows with `count` blocks."""
    return math.gcd(8, *(height * count * end for end in TYPES[kind].ends))


@triton.jit
def u16(at, ALIGN: tl.constexpr):
    """Return two bytes, aligned to two or to ALIGN if that is less, as int32. at: pointers to the first."""
    if ALIGN >= 2:
        found = tl.load(at.to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32) & 0xFFFF
    else:
        found = tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8
    return found


@triton.jit
def u32(at, ALIGN: tl.constexpr):
    """Return four bytes, aligned to four or to ALIGN if that is less, as int32."""
    if ALIGN >= 4:
        found = tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True))
    else:
        found = u16(at, ALIGN) | u16(at + 2, ALIGN) << 16
    return found


@triton.jit
def _u64(at, ALIGN: tl.constexpr):
    """Return eight bytes, aligned to eight or to ALIGN if that is less, as two int32."""
    if ALIGN >= 8:
        words = tl.load(at.to(tl.pointer_type(tl.int64), bitcast=True))
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    else:
        low, high = u32(at, ALIGN), u32(at + 4, ALIGN)
    return low, high


@triton.jit
def block_and_group(first, i, KIND: tl.constexpr, EACH: tl.constexpr):
    """Return the block of group `first` + i of 32 columns of a row, and the group's number in it, int32.

    `first` is a multiple of EACH. If EACH groups are whole blocks, the number is known when the kernel is compiled.
    """
    PER_BLOCK: tl.constexpr = octets_per_block(KIND) // 4
    if EACH % PER_BLOCK == 0:
        place = first // PER_BLOCK + i // PER_BLOCK, i % PER_BLOCK
    else:
        place = (first + i) // PER_BLOCK, ((first + i) % PER_BLOCK).to(tl.int32)
    return place


@triton.jit
def tile_rows(weight, row, K: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr):
    """Return pointers to the tiles of rows of a matrix with K columns, and the rows' places in these."""
    BYTES: tl.constexpr = HEIGHT * row_bytes(KIND, K)
    return weight + (row // HEIGHT).to(tl.int64) * BYTES, (row % HEIGHT).to(tl.int32)


@triton.jit
def field_of(rows, b, FIELD: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    """Return pointers to a field of block b of rows."""
    tile, place = rows
    BEGIN: tl.constexpr = HEIGHT * field_begin(KIND, BLOCKS, FIELD)
    SIZE: tl.constexpr = HEIGHT * field_size(KIND, FIELD)
    UNIT: tl.constexpr = field_unit(KIND, FIELD)
    return tile + (b * SIZE + place * UNIT) + BEGIN


@triton.jit
def _at(field, k, more, FIELD: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr):
    """Return pointers to byte k + more of a field, where k % UNIT + more % UNIT is less than UNIT.

    If k is a constant, it becomes part of the load instruction.
    """
    UNIT: tl.constexpr = field_unit(KIND, FIELD)
    return field + (more // UNIT * (UNIT * HEIGHT) + more % UNIT) + (k // UNIT * (UNIT * HEIGHT) + k % UNIT)


@triton.jit
def _byte(field, k, more, FIELD: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr, ALIGN: tl.constexpr):
    """Return byte k + more of a field with units of at least two bytes, as int32. more: less than 4, as in `_at`.

    Several bytes of a word are loaded once, and no single ones: these make Triton choose a slower operand layout.
    """
    if field_unit(KIND, FIELD) >= 4:
        found = u32(_at(field, k // 4 * 4, 0, FIELD, KIND, HEIGHT), ALIGN) >> (k % 4 + more) * 8
    else:
        found = u16(_at(field, k // 2 * 2, 0, FIELD, KIND, HEIGHT), ALIGN) >> (k % 2 + more) * 8
    return found & 0xFF


@triton.jit
def stored_words(rows, b, group, lane, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    """Return what is stored of octets, as a tuple of int32 that depends on the type, in the order of its fields.

    Args:
        rows: as of `tile_rows`, any shape, with BLOCKS blocks each.
        b, group, lane: int32, of the same shape or broadcast to it: the octet's block, which group of 32 columns of
            it, and which of their four octets. Loads are faster if the group is a constant.
    """
    PER_BLOCK: tl.constexpr = octets_per_block(KIND)
    if PER_BLOCK == 4:
        words = _of_small_block(rows, b, lane, KIND, BLOCKS, HEIGHT)
    elif KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K":
        words = _of_k_block(rows, b, group, lane, KIND, BLOCKS, HEIGHT)
    else:
        words = _of_i_block(rows, b, group, lane, KIND, BLOCKS, HEIGHT)
    return words


@triton.jit
def _of_small_block(rows, b, lane, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS, HEIGHT)
    first, second = field_of(rows, b, 0, KIND, BLOCKS, HEIGHT), field_of(rows, b, 1, KIND, BLOCKS, HEIGHT)
    if KIND == "MXFP4":
        tile, place = rows
        at = b * HEIGHT + place
        scale = (
            u16(tile + at // 2 * 2, ALIGN) >> (at % 2).to(tl.int32) * 8 & 0xFF
            if ALIGN >= 2
            else tl.load(first).to(tl.int32)
        )
    else:
        scale = u16(first, ALIGN)
    if KIND == "Q8_0":
        low, high = _u64(_at(second, 0, 8 * lane, 1, KIND, HEIGHT), ALIGN)
        words = scale, low, high
    elif KIND == "Q5_0":
        codes = field_of(rows, b, 2, KIND, BLOCKS, HEIGHT)
        low, high = _u64(_at(codes, 0, lane % 2 * 8, 2, KIND, HEIGHT), ALIGN)
        words = scale, low, high, _byte(second, 0, lane, 1, KIND, HEIGHT, ALIGN)
    else:
        low, high = _u64(_at(second, 0, lane % 2 * 8, 1, KIND, HEIGHT), ALIGN)
        words = scale, low, high
    return words


@triton.jit
def _of_k_block(rows, b, group, lane, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS, HEIGHT)
    first, second = field_of(rows, b, 0, KIND, BLOCKS, HEIGHT), field_of(rows, b, 1, KIND, BLOCKS, HEIGHT)
    third = field_of(rows, b, 2, KIND, BLOCKS, HEIGHT)
    if KIND == "Q2_K":
        low, high = _u64(_at(second, group // 4 * 32, lane * 8, 1, KIND, HEIGHT), ALIGN)
        step = _byte(first, group * 2, lane // 2, 0, KIND, HEIGHT, ALIGN)
        words = step, low, high, u16(third, ALIGN), u16(_at(third, 2, 0, 2, KIND, HEIGHT), ALIGN)
    elif KIND == "Q3_K":
        third_low, third_high = _u64(_at(first, 0, lane * 8, 0, KIND, HEIGHT), ALIGN)
        low, high = _u64(_at(second, group // 4 * 32, lane * 8, 1, KIND, HEIGHT), ALIGN)
        lower = _byte(third, group % 4 * 2, lane // 2, 2, KIND, HEIGHT, ALIGN)
        upper = _byte(third, 8 + group % 2 * 2, lane // 2, 2, KIND, HEIGHT, ALIGN)
        words = third_low, third_high, low, high, lower, upper, u16(field_of(rows, b, 3, KIND, BLOCKS, HEIGHT), ALIGN)
    elif KIND == "Q6_K":
        low, high = _u64(_at(first, group // 4 * 64 + group % 2 * 32, lane * 8, 0, KIND, HEIGHT), ALIGN)
        upper_low, upper_high = _u64(_at(second, group // 4 * 32, lane * 8, 1, KIND, HEIGHT), ALIGN)
        step = _byte(third, group * 2, lane // 2, 2, KIND, HEIGHT, ALIGN)
        words = low, high, upper_low, upper_high, step, u16(field_of(rows, b, 3, KIND, BLOCKS, HEIGHT), ALIGN)
    else:
        CODES: tl.constexpr = 3 if KIND == "Q5_K" else 2
        codes = field_of(rows, b, CODES, KIND, BLOCKS, HEIGHT)
        words = u16(first, ALIGN), u16(_at(first, 2, 0, 0, KIND, HEIGHT), ALIGN)
        for part in tl.static_range(3):
            words += (_byte(second, part * 4 + group % 4, 0, 1, KIND, HEIGHT, ALIGN),)
        words += _u64(_at(codes, group // 2 * 32, lane * 8, CODES, KIND, HEIGHT), ALIGN)
        if KIND == "Q5_K":
            words += _u64(_at(third, 0, lane * 8, 2, KIND, HEIGHT), ALIGN)
    return words


@triton.jit
def _of_i_block(rows, b, group, lane, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS, HEIGHT)
    scale, second = u16(field_of(rows, b, 0, KIND, BLOCKS, HEIGHT), ALIGN), field_of(rows, b, 1, KIND, BLOCKS, HEIGHT)
    if KIND == "IQ2_XXS":
        low, high = _u64(_at(second, group * 8, 0, 1, KIND, HEIGHT), ALIGN)
        words = scale, low, high
    else:
        third = field_of(rows, b, 2, KIND, BLOCKS, HEIGHT)
        if KIND == "IQ4_XS":
            codes = field_of(rows, b, 3, KIND, BLOCKS, HEIGHT)
            upper = _byte(second, group // 4, 0, 1, KIND, HEIGHT, ALIGN)
            lower = _byte(third, group // 2, 0, 2, KIND, HEIGHT, ALIGN)
            low, high = _u64(_at(codes, group * 16, lane % 2 * 8, 3, KIND, HEIGHT), ALIGN)
            words = scale, upper, lower, low, high
        elif KIND == "IQ2_S":
            index = _byte(second, group * 4, lane, 1, KIND, HEIGHT, ALIGN)
            signs = _byte(third, group * 4, lane, 2, KIND, HEIGHT, ALIGN)
            upper = _byte(field_of(rows, b, 3, KIND, BLOCKS, HEIGHT), group, 0, 3, KIND, HEIGHT, ALIGN)
            steps = _byte(field_of(rows, b, 4, KIND, BLOCKS, HEIGHT), group, 0, 4, KIND, HEIGHT, ALIGN)
            words = scale, index, signs, upper, steps
        else:
            # two indices of an octet, or one with its signs
            pair = u16(_at(second, group * 8, lane * 2, 1, KIND, HEIGHT), ALIGN)
            if KIND == "IQ2_XS":
                words = scale, pair, _byte(third, group, 0, 2, KIND, HEIGHT, ALIGN)
            elif KIND == "IQ3_XXS":
                words = scale, pair, u32(_at(third, group * 4, 0, 2, KIND, HEIGHT), ALIGN)
            else:
                tl.static_assert(KIND == "IQ3_S")
                upper = _byte(third, group, 0, 2, KIND, HEIGHT, ALIGN)
                signs = _byte(field_of(rows, b, 3, KIND, BLOCKS, HEIGHT), group * 4, lane, 3, KIND, HEIGHT, ALIGN)
                steps = _byte(field_of(rows, b, 4, KIND, BLOCKS, HEIGHT), group // 2, 0, 4, KIND, HEIGHT, ALIGN)
                words = scale, pair, upper, signs, steps
    return words
