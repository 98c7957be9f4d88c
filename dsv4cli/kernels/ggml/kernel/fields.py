"""Loads of GGUF blocks in a Triton kernel, eight columns at a time.

Eight consecutive columns, an octet, share a scale in every type, and their codes have the same shift in consecutive
bytes. Rows hold their blocks by field, so that the codes of an octet are one or two loads. `stored_words` returns all
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
def field_begin(kind, blocks, field):
    """Return where a field begins in a row of this many blocks."""
    return TYPES[kind].fields[field] * blocks


@constexpr_function
def field_size(kind, field):
    """Return the bytes of a field in a block."""
    return TYPES[kind].ends[field + 1] - TYPES[kind].ends[field]


@constexpr_function
def alignment(kind, blocks):
    """Return the alignment in bytes, at most 8, of the fields of rows with this many blocks."""
    return math.gcd(8, *(blocks * end for end in TYPES[kind].ends))


@triton.jit
def _u8(row, at, ALIGN: tl.constexpr):
    """Return bytes as int32. Loads two bytes where it can: loads of one make Triton choose a slower operand layout."""
    return (u16(row, at // 2 * 2, ALIGN) >> at % 2 * 8) & 0xFF if ALIGN >= 2 else tl.load(row + at).to(tl.int32)


@triton.jit
def u16(row, at, ALIGN: tl.constexpr):
    """Return two bytes, aligned to two or to ALIGN if that is less, as int32."""
    if ALIGN >= 2:
        found = tl.load((row + at).to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32) & 0xFFFF
    else:
        found = tl.load(row + at).to(tl.int32) | tl.load(row + at + 1).to(tl.int32) << 8
    return found


@triton.jit
def u32(row, at, ALIGN: tl.constexpr):
    """Return four bytes, aligned to four or to ALIGN if that is less, as int32."""
    if ALIGN >= 4:
        found = tl.load((row + at).to(tl.pointer_type(tl.int32), bitcast=True))
    else:
        found = u16(row, at, ALIGN) | u16(row, at + 2, ALIGN) << 16
    return found


@triton.jit
def _u64(row, at, ALIGN: tl.constexpr):
    """Return eight bytes, aligned to eight or to ALIGN if that is less, as two int32."""
    if ALIGN >= 8:
        words = tl.load((row + at).to(tl.pointer_type(tl.int64), bitcast=True))
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    else:
        low, high = u32(row, at, ALIGN), u32(row, at + 4, ALIGN)
    return low, high


@triton.jit
def _at(b, FIELD: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Return where a field of block b begins in a row of BLOCKS blocks."""
    BEGIN: tl.constexpr = field_begin(KIND, BLOCKS, FIELD)
    SIZE: tl.constexpr = field_size(KIND, FIELD)
    return BEGIN + b * SIZE


@triton.jit
def stored_words(row, octet, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Return what is stored of octets, as a tuple of int32 that depends on the type, in the order of its fields.

    Args:
        row: pointers, any shape, to rows of BLOCKS blocks by field.
        octet: int32, the octet's number in its row, of the same shape or broadcast to it.
    """
    PER_BLOCK: tl.constexpr = octets_per_block(KIND)
    if PER_BLOCK == 4:
        words = _of_small_block(row, octet // 4, octet % 4, KIND, BLOCKS)
    elif KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K":
        words = _of_k_block(row, octet // 32, octet % 32, KIND, BLOCKS)
    else:
        words = _of_i_block(row, octet // 32, octet % 32, KIND, BLOCKS)
    return words


@triton.jit
def _of_small_block(row, b, o, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS)
    first = _at(b, 0, KIND, BLOCKS)
    scale = _u8(row, first, ALIGN) if KIND == "MXFP4" else u16(row, first, ALIGN)
    if KIND == "Q8_0":
        low, high = _u64(row, _at(b, 1, KIND, BLOCKS) + 8 * o, ALIGN)
        words = scale, low, high
    elif KIND == "Q5_0":
        low, high = _u64(row, _at(b, 2, KIND, BLOCKS) + o % 2 * 8, ALIGN)
        words = scale, low, high, _u8(row, _at(b, 1, KIND, BLOCKS) + o, ALIGN)
    else:
        low, high = _u64(row, _at(b, 1, KIND, BLOCKS) + o % 2 * 8, ALIGN)
        words = scale, low, high
    return words


@triton.jit
def _of_k_block(row, b, o, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS)
    # codes of two bits or of one: of 128 columns of a half, 8 of an octet
    half, eighth = o // 16 * 32, o % 4 * 8
    first, second, third = (_at(b, 0, KIND, BLOCKS), _at(b, 1, KIND, BLOCKS), _at(b, 2, KIND, BLOCKS))
    if KIND == "Q2_K":
        low, high = _u64(row, second + half + eighth, ALIGN)
        words = _u8(row, first + o // 2, ALIGN), low, high, u16(row, third, ALIGN), u16(row, third + 2, ALIGN)
    elif KIND == "Q3_K":
        low, high = _u64(row, second + half + eighth, ALIGN)
        third_low, third_high = _u64(row, first + eighth, ALIGN)
        lower, upper = _u8(row, third + o // 2 % 8, ALIGN), _u8(row, third + 8 + o // 2 % 4, ALIGN)
        words = third_low, third_high, low, high, lower, upper, u16(row, _at(b, 3, KIND, BLOCKS), ALIGN)
    elif KIND == "Q6_K":
        low, high = _u64(row, first + o // 16 * 64 + o % 8 * 8, ALIGN)
        upper_low, upper_high = _u64(row, second + half + eighth, ALIGN)
        step, scale = _u8(row, third + o // 2, ALIGN), u16(row, _at(b, 3, KIND, BLOCKS), ALIGN)
        words = low, high, upper_low, upper_high, step, scale
    else:
        CODES: tl.constexpr = 3 if KIND == "Q5_K" else 2
        place = second + o // 4 % 4
        scales = u16(row, first, ALIGN), u16(row, first + 2, ALIGN)
        steps = _u8(row, place, ALIGN), _u8(row, place + 4, ALIGN), _u8(row, place + 8, ALIGN)
        words = scales + steps + _u64(row, _at(b, CODES, KIND, BLOCKS) + o // 8 * 32 + eighth, ALIGN)
        if KIND == "Q5_K":
            words += _u64(row, third + eighth, ALIGN)
    return words


@triton.jit
def _of_i_block(row, b, o, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    ALIGN: tl.constexpr = alignment(KIND, BLOCKS)
    group = o // 4
    scale, second = u16(row, _at(b, 0, KIND, BLOCKS), ALIGN), _at(b, 1, KIND, BLOCKS)
    if KIND == "IQ2_XXS":
        low, high = _u64(row, second + group * 8, ALIGN)
        words = scale, low, high
    elif KIND == "IQ4_XS":
        upper, lower = _u8(row, second + o // 16, ALIGN), _u8(row, _at(b, 2, KIND, BLOCKS) + o // 8, ALIGN)
        low, high = _u64(row, _at(b, 3, KIND, BLOCKS) + group * 16 + o % 2 * 8, ALIGN)
        words = scale, upper, lower, low, high
    elif KIND == "IQ2_XS":
        words = scale, u16(row, second + o * 2, ALIGN), _u8(row, _at(b, 2, KIND, BLOCKS) + group, ALIGN)
    elif KIND == "IQ2_S":
        signs, upper = _u8(row, _at(b, 2, KIND, BLOCKS) + o, ALIGN), _u8(row, _at(b, 3, KIND, BLOCKS) + group, ALIGN)
        words = scale, _u8(row, second + o, ALIGN), signs, upper, _u8(row, _at(b, 4, KIND, BLOCKS) + group, ALIGN)
    elif KIND == "IQ3_XXS":
        words = scale, u16(row, second + o * 2, ALIGN), u32(row, _at(b, 2, KIND, BLOCKS) + group * 4, ALIGN)
    else:
        tl.static_assert(KIND == "IQ3_S")
        upper, signs = _u8(row, _at(b, 2, KIND, BLOCKS) + group, ALIGN), _u8(row, _at(b, 3, KIND, BLOCKS) + o, ALIGN)
        step = _u8(row, _at(b, 4, KIND, BLOCKS) + o // 8, ALIGN)
        words = scale, u16(row, second + o * 2, ALIGN), upper, signs, step
    return words
