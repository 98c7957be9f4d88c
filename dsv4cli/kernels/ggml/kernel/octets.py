"""Decoding GGUF blocks in a Triton kernel, eight columns at a time.

`decoded` returns the codes of an octet as small integers that tensor cores multiply exactly: value = scale * (code -
bias of the type) - offset_scale * offset. Two codes share a word, each in half of it: the magnitude in the lower byte,
the sign in the highest bit. Types with a bias have no signs.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.ggml import tables
from dsv4cli.kernels.ggml.kernel.fields import (
    alignment,
    blocks,
    field_size,
    octets_per_block,
    stored_words,
    u16,
    u32,
)
from dsv4cli.kernels.ggml.types import DECODED
from dsv4cli.kernels.stored_matrix import StoredMatrix

# the sum with a small integer is that integer in the lowest bits of an fp32 number
_MAGIC = tl.constexpr(0x4B000000)
_MAGIC_VALUE = tl.constexpr(2.0**23)
# a bit in each byte of a word, and the factor that moves the four bits of a number there
_LOWEST, _HIGHEST = tl.constexpr(0x01010101), tl.constexpr(-0x7F7F7F80)
_TO_LOWEST = tl.constexpr(0x00204081)
# the sign of both codes of a word, and their magnitudes
_SIGNS, _MAGNITUDES = tl.constexpr(-0x7FFF8000), tl.constexpr(0x00FF00FF)
# types whose 4-bit codes index a table
_TABLES = {"IQ4_NL": "nl", "IQ4_XS": "nl", "MXFP4": "e2m1"}
# types whose eighth sign makes the number of minus signs even
EVEN = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
# what a code is larger than the number that its scale multiplies
BIASES = {**dict.fromkeys(DECODED, 0), "Q8_0": 128, "Q4_0": 8, "Q5_0": 16, "Q3_K": 128, "Q6_K": 32}
# number of words of each codebook's entries; the signs follow them in the table
_WORDS = {name: tables.table(name).size // 4 for name in tables.GRIDS}
# matrices that are no blocks, such as a few in a file of blocks
_PLAIN = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


class KernelBlocks(NamedTuple):
    """A matrix, or a stack of several, as the kernels take it.

    Attributes:
        rows: uint8 [..., N, bytes], in tiles.
        table: int32, as of `_codebook`, or int16, the values of each pair of 4-bit codes as two bytes; None for most
            types.
        kind: the type.
        height: rows of a tile.
    """

    rows: torch.Tensor
    table: torch.Tensor | None
    kind: str
    height: int


def blocks_of(matrix: StoredMatrix, device: torch.device | None = None) -> KernelBlocks:
    """Return a matrix of GGUF blocks, fp16, bf16 or fp32.

    device: the one that computes, if the matrix is elsewhere. Raises KernelUnsupported for other formats and slices.
    """
    weight, kind = matrix.weight, matrix.block_type or _PLAIN.get(matrix.weight.dtype)
    if kind is None or matrix.scale is not None:
        raise KernelUnsupported(f"the Triton kernels do not multiply {weight.dtype} beside GGUF blocks")
    if not weight.is_contiguous() or weight.data_ptr() % alignment(kind, blocks(kind, matrix.columns), matrix.height):
        raise KernelUnsupported("the Triton kernels require contiguous, aligned GGUF blocks")
    return KernelBlocks(weight.view(torch.uint8), _table_of(kind, str(device or weight.device)), kind, matrix.height)


def forget_tables() -> None:
    """Drop the tables that are cached for each device."""
    _table_of.cache_clear()


@cache
def _table_of(kind: str, device: str) -> torch.Tensor | None:
    if kind in tables.GRIDS:
        return _codebook(kind).to(device)
    if kind in _TABLES:
        values = torch.from_numpy(tables.table(_TABLES[kind]).copy()).flatten()
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
        return pairs.to(torch.int8).view(torch.int16).flatten().to(device)
    return None


def _codebook(kind: str) -> torch.Tensor:
    """Return a codebook's entries as bytes, then the signs of each index, int32.

    The signs of word k of four (see `decoded`) are in bits 15 - k and 31 - k.
    """
    entries = torch.from_numpy(tables.table(kind).copy()).to(torch.uint8)
    signs = torch.from_numpy(tables.table("even signs" if kind in EVEN else "signs") < 0).long()
    shifts = 15 - torch.arange(4, device="cpu")
    words = (signs[:, [0, 1, 4, 5]] << shifts | signs[:, [2, 3, 6, 7]] << shifts + 16).sum(1)
    return torch.cat((entries.view(torch.int32).flatten(), words.to(torch.int32)))


@constexpr_function
def has_offset(kind):
    """Return whether a type's values have offsets of their own scale."""
    return kind in ("Q2_K", "Q4_K", "Q5_K")


@constexpr_function
def bias(kind):
    """Return the bias of a type's codes; 0 for those with signs."""
    return BIASES[kind]


@constexpr_function
def minus_bias(kind):
    """Return a word of two codes, each minus the bias."""
    half = BIASES[kind] | 0x8000
    return (half << 16 | half) - (1 << 32)


@constexpr_function
def has_halves(kind):
    """Return whether 16 columns share a scale, not 32 or more."""
    return kind in ("Q6_K", "IQ2_XS", "IQ2_S")


@constexpr_function
def has_codes(kind):
    """Return whether a type has codes that fit a byte."""
    return kind not in ("F16", "BF16", "F32")


@constexpr_function
def _codebook_words(kind):
    return _WORDS[kind]


@triton.jit
def numbers(codes, MINUS: tl.constexpr = 0):
    """Return integers of 0 to 2 ** 23 - 1, minus a constant, as fp32: two fast instructions instead of a slow one."""
    return (codes | _MAGIC).to(tl.float32, bitcast=True) - (_MAGIC_VALUE + MINUS)


@triton.jit
def from_half(bits):
    """Return fp16 numbers, in the lower 16 bits of int32, as fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _paired(low, high):
    """Return eight codes without signs, the bytes of two words, as four words."""
    return low & _MAGNITUDES, low >> 8 & _MAGNITUDES, high & _MAGNITUDES, high >> 8 & _MAGNITUDES


@triton.jit
def _signed(low, high):
    """Return eight int8, the bytes of two words, as four words of codes."""
    negative_low, negative_high = low >> 7 & _LOWEST, high >> 7 & _LOWEST
    a, b, c, d = _paired((low ^ negative_low * 255) + negative_low, (high ^ negative_high * 255) + negative_high)
    return a | low << 8 & _SIGNS, b | low & _SIGNS, c | high << 8 & _SIGNS, d | high & _SIGNS


@triton.jit
def _looked_up(table, codes):
    """Return the values of four 4-bit codes, one in each byte of a word, as int8."""
    first, second = codes & 15 | codes >> 4 & 0xF0, codes >> 16 & 15 | codes >> 20 & 0xF0
    return tl.load(table + first).to(tl.int32) & 0xFFFF | tl.load(table + second).to(tl.int32) << 16


@triton.jit
def decoded(words, group, lane, table, KIND: tl.constexpr):
    """Return the codes of octets as four words, their scale, an offset and its scale.

    The words hold columns (0, 2), (1, 3), (4, 6) and (5, 7). Where the type has none, offset and scale are 0.

    Args:
        words: as `stored_words` returns them for this group and lane.
        table: as of `KernelBlocks`.
    """
    offset, offset_scale = 0, 0.0
    if KIND == "Q2_K" or KIND == "Q4_K" or KIND == "Q5_K":
        codes, scale, offset, offset_scale = _with_offset(words, group, KIND)
    elif KIND == "Q3_K" or KIND == "Q6_K":
        codes, scale = _of_k_words(words, group, KIND)
    elif KIND == "Q8_0" or KIND == "Q4_0" or KIND == "Q5_0" or KIND == "IQ4_NL" or KIND == "MXFP4":
        codes, scale = _of_small_words(words, lane, table, KIND)
    elif KIND == "IQ4_XS":
        steps = (words[2] >> group % 2 * 4) & 15 | ((words[1] >> group % 4 * 2) & 3) << 4
        shift, scale = lane // 2 * 4, from_half(words[0]) * numbers(steps, 32)
        low, high = words[3] >> shift & 0x0F0F0F0F, words[4] >> shift & 0x0F0F0F0F
        codes = _signed(_looked_up(table, low), _looked_up(table, high))
    else:
        codes, scale = _from_codebook(words, group, lane, table, KIND)
    return codes, scale, offset, offset_scale


@triton.jit
def _of_small_words(words, lane, table, KIND: tl.constexpr):
    """Return codes and scales of the types with blocks of 32 columns."""
    low, high = words[1], words[2]
    if KIND == "MXFP4":
        # half of e8m0: 2 ** (exponent - 128)
        bits = tl.where(words[0] > 1, (words[0] - 1) << 23, 0x200000 << tl.minimum(words[0], 1))
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = from_half(words[0])
    if KIND == "Q8_0":
        low, high = low ^ _HIGHEST, high ^ _HIGHEST
    else:
        shift = lane // 2 * 4
        low, high = low >> shift & 0x0F0F0F0F, high >> shift & 0x0F0F0F0F
        if KIND == "Q5_0":
            low |= ((words[3] & 15) * _TO_LOWEST & _LOWEST) << 4
            high |= ((words[3] >> 4) * _TO_LOWEST & _LOWEST) << 4
    if KIND == "IQ4_NL" or KIND == "MXFP4":
        codes = _signed(_looked_up(table, low), _looked_up(table, high))
    else:
        codes = _paired(low, high)
    return codes, scale


@triton.jit
def _with_offset(words, group, KIND: tl.constexpr):
    """Return what `decoded` returns, of the types with offsets."""
    if KIND == "Q2_K":
        # codes of up to 45: the lower scale multiplies the four codes of a word
        step, shift = words[0] & 15, group % 4 * 2
        low, high = (words[1] >> shift & 0x03030303) * step, (words[2] >> shift & 0x03030303) * step
        scale, offset, offset_scale = from_half(words[3]), words[0] >> 4, from_half(words[4])
    else:
        # twelve bytes pack six bits of the lower scale and of the offset of each of eight groups
        step, offset, rest = words[2], words[3], words[4]
        step = tl.where(group < 4, step & 63, rest & 15 | step >> 2 & 48)
        offset = tl.where(group < 4, offset & 63, rest >> 4 | offset >> 2 & 48)
        scale, offset_scale = from_half(words[0]) * numbers(step), from_half(words[1])
        shift = group % 2 * 4
        low, high = words[5] >> shift & 0x0F0F0F0F, words[6] >> shift & 0x0F0F0F0F
        if KIND == "Q5_K":
            low, high = low | (words[7] >> group & _LOWEST) << 4, high | (words[8] >> group & _LOWEST) << 4
    return _paired(low, high), scale, offset, offset_scale


@triton.jit
def _of_k_words(words, group, KIND: tl.constexpr):
    """Return codes and scales of Q3_K and Q6_K."""
    field = group % 4 * 2
    if KIND == "Q3_K":
        # the lower scale times a code, -128 to 124, plus 128: in four bytes at once, without carries between them
        step = ((words[4] >> group // 4 * 4) & 15 | ((words[5] >> group // 2 * 2) & 3) << 4) - 32
        low = words[2] >> field & 0x03030303 | (words[0] >> group & _LOWEST) << 2
        high = words[3] >> field & 0x03030303 | (words[1] >> group & _LOWEST) << 2
        zero = (128 + 4 * step) * _LOWEST
        low, high, scale = zero - low * step, zero - high * step, -from_half(words[6])
    else:
        scale, shift = from_half(words[5]) * numbers(words[4] ^ 0x80, 128), group // 2 % 2 * 4
        low = words[0] >> shift & 0x0F0F0F0F | (words[2] >> field & 0x03030303) << 4
        high = words[1] >> shift & 0x0F0F0F0F | (words[3] >> field & 0x03030303) << 4
    return _paired(low, high), scale


@triton.jit
def _from_codebook(words, group, lane, table, KIND: tl.constexpr):
    """Return codes and scales of the types with a codebook."""
    if KIND == "IQ3_XXS" or KIND == "IQ3_S":
        first, second = words[1] & 255, words[1] >> 8
        if KIND == "IQ3_XXS":
            signs, steps = words[2] >> lane * 7 & 127, (numbers(words[2] >> 28 & 15) + 0.5) * 0.5
        else:
            ninth, signs = words[2] >> lane * 2, words[3]
            first, second = first | (ninth & 1) << 8, second | (ninth & 2) << 7
            steps = numbers((words[4] >> group % 2 * 4) & 15) * 2.0 + 1.0
        low, high = tl.load(table + first), tl.load(table + second)
    else:
        if KIND == "IQ2_XXS":
            index, signs = words[1] >> lane * 8 & 255, words[2] >> lane * 7 & 127
            steps = (numbers(words[2] >> 28 & 15) + 0.5) * 0.25
        else:
            index, signs, packed = words[1] & 511, words[1] >> 9, words[2]
            if KIND == "IQ2_S":
                index, signs, packed = words[1] | (words[3] >> lane * 2 & 3) << 8, words[2], words[4]
            steps = (numbers(packed >> lane // 2 * 4 & 15) + 0.5) * 0.25
        # an entry is loaded at once, and not as four words of codes: these loads limit the kernels
        both = tl.load((table + index * 2).to(tl.pointer_type(tl.int64), bitcast=True))
        low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
    SIGNS: tl.constexpr = _codebook_words(KIND)
    flips = tl.load(table + SIGNS + signs)
    a, b, c, d = _paired(low, high)
    codes = a | flips & _SIGNS, b | flips << 1 & _SIGNS, c | flips << 2 & _SIGNS, d | flips << 3 & _SIGNS
    return codes, from_half(words[0]) * steps


@triton.jit
def _eight(codes):
    """Return the eight halves of four words, in the order of the columns: int32 [R, O] -> [R, O, 8]."""
    even, odd = tl.join(codes[0], codes[2]), tl.join(codes[1], codes[3])
    even, odd = tl.join(even & 0xFFFF, even >> 16 & 0xFFFF), tl.join(odd & 0xFFFF, odd >> 16 & 0xFFFF)
    return tl.reshape(tl.join(even, odd), (codes[0].shape[0], codes[0].shape[1], 8))


@triton.jit
def _number(row, at, i: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Return number i of F16, BF16 or F32 as fp32."""
    if KIND == "F16":
        found = from_half(u16(row + at + 2 * i, ALIGN))
    elif KIND == "BF16":
        found = (u16(row + at + 2 * i, ALIGN) << 16).to(tl.float32, bitcast=True)
    else:
        found = u32(row + at + 4 * i, ALIGN).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _fours(row, at, i: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Return numbers i, i + 2, i + 4 and i + 6 of F16, BF16 or F32: fp32 [R, O, 2, 2]."""
    first = tl.join(_number(row, at, i, KIND, ALIGN), _number(row, at, i + 4, KIND, ALIGN))
    return tl.join(first, tl.join(_number(row, at, i + 2, KIND, ALIGN), _number(row, at, i + 6, KIND, ALIGN)))


@triton.jit
def octet_values(rows, octet, table, KIND: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr):
    """Return the values of octets, fp32 [R, O, 8].

    rows: [R, 1], as of `tile_rows`. octet: int32 [1, O], the octets' numbers in the rows.
    """
    if not has_codes(KIND):
        tl.static_assert(HEIGHT == 1)
        row, _ = rows
        ALIGN: tl.constexpr = alignment(KIND, BLOCKS, HEIGHT)
        at = octet * (8 * field_size(KIND, 0))
        each = tl.join(_fours(row, at, 0, KIND, ALIGN), _fours(row, at, 1, KIND, ALIGN))
        values = tl.reshape(each, (row.shape[0], octet.shape[1], 8))
    else:
        GROUPS: tl.constexpr = octets_per_block(KIND) // 4
        b, group, lane = octet // 4 // GROUPS, octet // 4 % GROUPS, octet % 4
        words = stored_words(rows, b, group, lane, KIND, BLOCKS, HEIGHT)
        codes, scale, offset, offset_scale = decoded(words, group, lane, table, KIND)
        halves = _eight(codes)
        values = numbers(halves & 0xFF, bias(KIND)) * scale[:, :, None]
        if has_offset(KIND):
            values -= (numbers(offset) * offset_scale)[:, :, None]
        elif not bias(KIND):
            flips = (halves & 0x8000) << 16
            values = (values.to(tl.int32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)
    return values
