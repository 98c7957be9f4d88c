"""Decoding GGUF blocks in a Triton kernel, eight columns at a time.

Eight consecutive columns, an octet, share a scale in every type, and their codes have the same shift in consecutive
bytes. `octets` returns codes as bytes, which tensor cores multiply exactly: value = scale * code - offset_scale *
offset. KernelBlocks are read as stored, in units of the widest integer whose size divides a block's.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.ggml import tables
from dsv4cli.kernels.ggml.types import TYPES
from dsv4cli.kernels.stored_matrix import StoredMatrix

# the sum with a small integer is that integer in the lowest bits of an fp32 number
_MAGIC = tl.constexpr(0x4B000000)
_MAGIC_VALUE = tl.constexpr(2.0**23)
# entries of a codebook as bytes: int64 of eight values, or int32 of four
_GRID_WORDS = {8: torch.int64, 4: torch.int32}
# a bit in each byte of a word, and the factors that move the four bits of a number there: to the lowest, to the highest
_LOWEST, _HIGHEST = tl.constexpr(0x01010101), tl.constexpr(-0x7F7F7F80)
_TO_LOWEST, _TO_HIGHEST = tl.constexpr(0x00204081), tl.constexpr(0x10204080)
# types whose 4-bit codes index a table
_TABLES = {"IQ4_NL": "nl", "IQ4_XS": "nl", "MXFP4": "e2m1"}
# integers that blocks are read as, by bytes
_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
# octets and bytes of a block; types without blocks have one octet
_BLOCKS = {
    name: (max(kind.values // 8, 1), kind.nbytes * max(kind.values, 8) // kind.values) for name, kind in TYPES.items()
}
# matrices that are no blocks, such as a few in a file of blocks
_PLAIN = {torch.bfloat16: "BF16", torch.float32: "F32"}


class KernelBlocks(NamedTuple):
    """A matrix, or a stack of several, as the kernels take it.

    Attributes:
        units: its bytes as integers.
        table: codebook entries as bytes, or the values of each pair of 4-bit codes as two bytes; None for most types.
        kind: the type.
    """

    units: torch.Tensor
    table: torch.Tensor | None
    kind: str


def blocks_of(matrix: StoredMatrix) -> KernelBlocks:
    """Return a matrix of GGUF blocks, bf16 or fp32. Raises KernelUnsupported for other formats and for slices."""
    weight, kind = matrix.weight, matrix.block_type or _PLAIN.get(matrix.weight.dtype)
    if kind is None or matrix.scale is not None:
        raise KernelUnsupported(f"the Triton kernels do not multiply {weight.dtype} beside GGUF blocks")
    if not weight.is_contiguous() or weight.data_ptr() % max(_UNITS):
        raise KernelUnsupported("the Triton kernels require contiguous, aligned GGUF blocks")
    size = next(size for size in _UNITS if _BLOCKS[kind][1] % size == 0)
    return KernelBlocks(weight.view(_UNITS[size]), _table_of(kind, str(weight.device)), kind)


def columns(matrix: StoredMatrix) -> int:
    """Return the number of columns."""
    kind = matrix.block_type
    return matrix.weight.shape[-1] // (TYPES[kind].nbytes if kind else 1) * (TYPES[kind].values if kind else 1)


@cache
def _table_of(kind: str, device: str) -> torch.Tensor | None:
    if kind in tables.GRIDS:
        values = torch.from_numpy(tables.table(kind).copy())
        return values.to(torch.uint8).view(_GRID_WORDS[values.shape[1]]).flatten().to(device)
    if kind in _TABLES:
        values = torch.from_numpy(tables.table(_TABLES[kind]).copy()).flatten()
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
        return pairs.to(torch.int8).view(torch.int16).flatten().to(device)
    return None


@constexpr_function
def octets_per_block(kind):
    """Return how many octets a block has; 1 for types without blocks."""
    return _BLOCKS[kind][0]


@constexpr_function
def units_per_block(kind, bits):
    """Return how many units of this many bits a block, or an octet of a type without blocks, has."""
    return _BLOCKS[kind][1] * 8 // bits


@constexpr_function
def has_offset(kind):
    """Return whether a type's values have offsets of their own scale."""
    return kind in ("Q2_K", "Q4_K", "Q5_K")


@constexpr_function
def has_halves(kind):
    """Return whether 16 columns share a scale, not 32 or more."""
    return kind in ("Q6_K", "IQ2_XS", "IQ2_S")


@constexpr_function
def has_codes(kind):
    """Return whether a type has codes that fit a byte."""
    return kind not in ("F16", "BF16", "F32")


@triton.jit
def _u8(block, byte):
    """Return byte number `byte` of each block as int32."""
    UNIT: tl.constexpr = block.dtype.element_ty.primitive_bitwidth // 8
    if UNIT == 1:
        found = tl.load(block + byte).to(tl.int32)
    else:
        found = (tl.load(block + byte // UNIT).to(tl.int32) >> (byte % UNIT * 8)) & 0xFF
    return found


@triton.jit
def _u16(block, byte):
    """Return the two bytes from `byte` on, which is even, as int32."""
    UNIT: tl.constexpr = block.dtype.element_ty.primitive_bitwidth // 8
    if UNIT == 1:
        found = _u8(block, byte) | _u8(block, byte + 1) << 8
    elif UNIT == 2:
        found = tl.load(block + byte // 2).to(tl.int32) & 0xFFFF
    else:
        found = (tl.load(block + byte // 4) >> (byte % 4 * 8)) & 0xFFFF
    return found


@triton.jit
def _u32(block, byte):
    """Return the four bytes from `byte` on as int32. byte: a multiple of the unit."""
    UNIT: tl.constexpr = block.dtype.element_ty.primitive_bitwidth // 8
    if UNIT == 1:
        found = _u8(block, byte) | _u8(block, byte + 1) << 8 | _u8(block, byte + 2) << 16 | _u8(block, byte + 3) << 24
    elif UNIT == 2:
        found = _u16(block, byte) | _u16(block, byte + 2) << 16
    else:
        found = tl.load(block + byte // 4)
    return found


@triton.jit
def _half(block, byte):
    """Return the fp16 number from `byte` on as fp32."""
    return _u16(block, byte).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(codes):
    """Return integers of 0 to 2 ** 23 - 1 as fp32: two fast instructions instead of a slow conversion."""
    return (codes | _MAGIC).to(tl.float32, bitcast=True) - _MAGIC_VALUE


@triton.jit
def _fields(block, byte, shift, MASK: tl.constexpr):
    """Return a field of each of eight bytes from `byte` on, as two words. MASK: of the field in all bytes of a word."""
    return (_u32(block, byte) >> shift) & MASK, (_u32(block, byte + 4) >> shift) & MASK


@triton.jit
def _magnitudes(word):
    """Return the magnitudes of four int8, and their signs in the highest bits of bytes."""
    negative = word >> 7 & _LOWEST
    return (word ^ negative * 255) + negative, word & _HIGHEST


@triton.jit
def _lowered(word, BY: tl.constexpr):
    """Return four codes, in the bytes of a word, minus BY as int8. Codes and BY are at most 64."""
    return (word + (128 - BY) * _LOWEST) ^ _HIGHEST


@triton.jit
def _signed(low, high):
    """Return `_magnitudes` of two words of int8: two words, then two words of signs."""
    low, low_signs = _magnitudes(low)
    high, high_signs = _magnitudes(high)
    return low, high, low_signs, high_signs


@triton.jit
def _looked_up(table, codes):
    """Return the values of four 4-bit codes, one in each byte of a word, as int8."""
    first, second = codes & 15 | codes >> 4 & 0xF0, codes >> 16 & 15 | codes >> 20 & 0xF0
    return tl.load(table + first).to(tl.int32) & 0xFFFF | tl.load(table + second).to(tl.int32) << 16


@triton.jit
def _even_parity(seven):
    """Return seven sign bits with an eighth that makes the number of ones even."""
    folded = seven ^ (seven >> 4)
    folded = folded ^ (folded >> 2)
    return seven | ((folded ^ (folded >> 1)) & 1) << 7


@triton.jit
def octets(block, o, table, KIND: tl.constexpr):
    """Return eight codes per octet, their scale, an offset and its scale.

    Codes are magnitudes of up to 128 in the bytes of two words, and their signs in the highest bits of the bytes of two
    more. Where the type has none, offset and scale are 0.

    Args:
        block: pointers, any shape, to the first unit of the octet's block.
        o: int32, the octet's number in its block; the shape is that of the pointers or is broadcast to it.
        table: as of `KernelBlocks`.
    """
    offset, offset_scale = 0, 0.0
    if KIND == "Q8_0":
        scale = _half(block, 0)
        codes = _signed(_u32(block, 2 + 8 * o), _u32(block, 6 + 8 * o))
    elif KIND == "Q4_0":
        scale = _half(block, 0)
        low, high = _fields(block, 2 + o % 2 * 8, o // 2 * 4, 0x0F0F0F0F)
        codes = _signed(_lowered(low, 8), _lowered(high, 8))
    elif KIND == "Q5_0":
        scale, fifth = _half(block, 0), _u8(block, 2 + o)
        low, high = _fields(block, 6 + o % 2 * 8, o // 2 * 4, 0x0F0F0F0F)
        low |= ((fifth & 15) * _TO_LOWEST & _LOWEST) << 4
        high |= ((fifth >> 4) * _TO_LOWEST & _LOWEST) << 4
        codes = _signed(_lowered(low, 16), _lowered(high, 16))
    elif KIND == "IQ4_NL":
        scale = _half(block, 0)
        low, high = _fields(block, 2 + o % 2 * 8, o // 2 * 4, 0x0F0F0F0F)
        codes = _signed(_looked_up(table, low), _looked_up(table, high))
    elif KIND == "MXFP4":
        exponent = _u8(block, o * 0)
        # half of e8m0: 2 ** (exponent - 128)
        bits = tl.where(exponent > 1, (exponent - 1) << 23, 0x200000 << tl.minimum(exponent, 1))
        scale = bits.to(tl.float32, bitcast=True)
        low, high = _fields(block, 1 + o % 2 * 8, o // 2 * 4, 0x0F0F0F0F)
        codes = _signed(_looked_up(table, low), _looked_up(table, high))
    elif KIND == "IQ4_XS":
        steps = (_u8(block, 4 + o // 8) >> o // 4 % 2 * 4) & 15 | ((_u8(block, 2 + o // 16) >> o // 4 % 4 * 2) & 3) << 4
        scale = _half(block, 0) * (_numbers(steps) - 32.0)
        low, high = _fields(block, 8 + o // 4 * 16 + o % 2 * 8, o // 2 % 2 * 4, 0x0F0F0F0F)
        codes = _signed(_looked_up(table, low), _looked_up(table, high))
    elif KIND == "Q2_K" or KIND == "Q3_K" or KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K":
        codes, scale, offset, offset_scale = _k_octets(block, o, KIND)
    else:
        codes, scale = _from_grid(block, o, table, KIND)
    return codes, scale, offset, offset_scale


@triton.jit
def _k_octets(block, o, KIND: tl.constexpr):
    """Return what `octets` returns, for the types with scales in two levels."""
    # fields of two bits: of 128 columns of a half, 32 of a field, 8 of an octet
    half, field, eighth = o // 16, o // 4 % 4, o % 4 * 8
    offset, offset_scale = 0, 0.0
    if KIND == "Q2_K":
        # codes of up to 45: the lower scale multiplies the four codes of a word
        packed = _u8(block, o // 2)
        scale, offset, offset_scale = _half(block, 80), packed >> 4, _half(block, 82)
        low, high = _fields(block, 16 + half * 32 + eighth, field * 2, 0x03030303)
        codes = low * (packed & 15), high * (packed & 15), 0, 0
    elif KIND == "Q3_K":
        steps = (_u8(block, 96 + o // 2 % 8) >> o // 16 * 4) & 15 | (
            (_u8(block, 104 + o // 2 % 4) >> o // 8 * 2) & 3
        ) << 4
        scale = _half(block, 108)
        low, high = _fields(block, 32 + half * 32 + eighth, field * 2, 0x03030303)
        third_low, third_high = _fields(block, eighth, o // 4, 0x01010101)
        low, high, low_signs, high_signs = _signed(
            _lowered(low | third_low << 2, 4), _lowered(high | third_high << 2, 4)
        )
        # codes of up to 128, as above
        size, flips = tl.abs(steps - 32), tl.where(steps < 32, _HIGHEST, 0)
        codes = low * size, high * size, low_signs ^ flips, high_signs ^ flips
    elif KIND == "Q6_K":
        scale = _half(block, 208) * (_numbers(_u8(block, 192 + o // 2) ^ 0x80) - 128.0)
        low, high = _fields(block, half * 64 + o % 8 * 8, o // 8 % 2 * 4, 0x0F0F0F0F)
        upper_low, upper_high = _fields(block, 128 + half * 32 + eighth, field * 2, 0x03030303)
        codes = _signed(_lowered(low | upper_low << 4, 32), _lowered(high | upper_high << 4, 32))
    else:
        BITS: tl.constexpr = 48 if KIND == "Q5_K" else 16
        steps, offset = _steps_and_offsets(block, o // 4)
        scale, offset_scale = _half(block, 0) * _numbers(steps), _half(block, 2)
        low, high = _fields(block, BITS + o // 8 * 32 + eighth, o // 4 % 2 * 4, 0x0F0F0F0F)
        if KIND == "Q5_K":
            fifth_low, fifth_high = _fields(block, 16 + eighth, o // 4, 0x01010101)
            low, high = low | fifth_low << 4, high | fifth_high << 4
        codes = low, high, 0, 0
    return codes, scale, offset, offset_scale


@triton.jit
def _steps_and_offsets(block, group):
    """Return the lower scale and the offset of a group of 32 columns of Q4_K and Q5_K: 12 bytes pack 6 bits of each."""
    place = group % 4
    step, offset, rest = _u8(block, 4 + place), _u8(block, 8 + place), _u8(block, 12 + place)
    is_first = group < 4
    step = tl.where(is_first, step & 63, rest & 15 | step >> 2 & 48)
    return step, tl.where(is_first, offset & 63, rest >> 4 | offset >> 2 & 48)


@triton.jit
def _from_grid(block, o, table, KIND: tl.constexpr):
    """Return codes and scales of the types with a codebook."""
    group, place = o // 4, o % 4
    if KIND == "IQ2_XXS":
        word = _u32(block, 6 + group * 8)
        low, high = _eights(table, _u8(block, 2 + group * 8 + place))
        signs, steps = _even_parity(word >> place * 7 & 127), (_numbers(word >> 28 & 15) + 0.5) * 0.25
    elif KIND == "IQ2_XS":
        word = _u16(block, 2 + o * 2)
        low, high = _eights(table, word & 511)
        signs, steps = _even_parity(word >> 9), _quarter_steps(block, 66, o)
    elif KIND == "IQ2_S":
        low, high = _eights(table, _u8(block, 2 + o) | (_u8(block, 66 + group) >> place * 2 & 3) << 8)
        signs, steps = _u8(block, 34 + o), _quarter_steps(block, 74, o)
    elif KIND == "IQ3_XXS":
        word, pair = _u32(block, 66 + group * 4), _u16(block, 2 + o * 2)
        low, high = tl.load(table + (pair & 255)), tl.load(table + (pair >> 8))
        signs, steps = _even_parity(word >> place * 7 & 127), (_numbers(word >> 28 & 15) + 0.5) * 0.5
    else:
        tl.static_assert(KIND == "IQ3_S")
        ninth, pair = _u8(block, 66 + group) >> place * 2, _u16(block, 2 + o * 2)
        low, high = tl.load(table + (pair & 255 | (ninth & 1) << 8)), tl.load(table + (pair >> 8 | (ninth & 2) << 7))
        signs, steps = _u8(block, 74 + o), _numbers((_u8(block, 106 + o // 8) >> group % 2 * 4) & 15) * 2.0 + 1.0
    low_signs, high_signs = (signs & 15) * _TO_HIGHEST & _HIGHEST, (signs >> 4) * _TO_HIGHEST & _HIGHEST
    return (low, high, low_signs, high_signs), _half(block, 0) * steps


@triton.jit
def _eights(table, index):
    """Return codebook entries of eight values as two words."""
    words = tl.load(table + index)
    return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def _quarter_steps(block, byte, o):
    """Return the steps of IQ2_XS and IQ2_S from scales of 4 bits per 16 columns, from `byte` on."""
    return (_numbers(_u8(block, byte + o // 4) >> o // 2 % 2 * 4 & 15) + 0.5) * 0.25


@triton.jit
def _eight(low, high):
    """Return the eight bytes of two words: int32 [R, O] -> [R, O, 8]."""
    words = tl.join(low, high)
    pairs = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    each = tl.join(pairs & 0xFF, pairs >> 8)
    return tl.reshape(each, (low.shape[0], low.shape[1], 8))


@triton.jit
def _number(block, i: tl.constexpr, KIND: tl.constexpr):
    """Return number i of F16, BF16 or F32 as fp32."""
    if KIND == "F16":
        found = _half(block, 2 * i)
    elif KIND == "BF16":
        found = (_u16(block, 2 * i) << 16).to(tl.float32, bitcast=True)
    else:
        found = _u32(block, 4 * i).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _fours(block, i: tl.constexpr, KIND: tl.constexpr):
    """Return numbers i, i + 2, i + 4 and i + 6 of F16, BF16 or F32: fp32 [R, O, 2, 2]."""
    first = tl.join(_number(block, i, KIND), _number(block, i + 4, KIND))
    return tl.join(first, tl.join(_number(block, i + 2, KIND), _number(block, i + 6, KIND)))


@triton.jit
def _plain(block, KIND: tl.constexpr):
    """Return eight numbers of F16, BF16 or F32 as fp32 [R, O, 8]."""
    each = tl.join(_fours(block, 0, KIND), _fours(block, 1, KIND))
    return tl.reshape(each, (block.shape[0], block.shape[1], 8))


@triton.jit
def octet_values(block, o, table, KIND: tl.constexpr):
    """Return the values of octets, fp32 [R, O, 8], of pointers [R, O] as `octets` takes them."""
    if not has_codes(KIND):
        values = _plain(block, KIND)
    else:
        codes, scale, offset, offset_scale = octets(block, o, table, KIND)
        low, high, low_signs, high_signs = codes
        values = _numbers(_eight(low, high)) * scale[:, :, None]
        if has_offset(KIND):
            values -= (_numbers(offset) * offset_scale)[:, :, None]
        else:
            flips = _eight(low_signs, high_signs) << 24
            values = (values.to(tl.int32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)
    return values
