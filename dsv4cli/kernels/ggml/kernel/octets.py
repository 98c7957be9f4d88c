"""Decoding GGUF blocks in a Triton kernel, eight columns at a time.

`decoded` returns the codes of an octet as small integers that tensor cores multiply exactly: value = scale * (code -
bias of the type) - offset_scale * offset. Two codes share a word, each in half of it: the magnitude in the lower byte,
the sign in the highest bit. Types with a bias have no signs.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.ggml import tables
from dsv4cli.kernels.ggml.kernel.fields import alignment, blocks
from dsv4cli.kernels.ggml.types import DECODED
from dsv4cli.kernels.stored_matrix import StoredMatrix

# the sum with a small integer is that integer in the lowest bits of an fp32 number
_MAGIC = tl.constexpr(0x4B000000)
_MAGIC_VALUE = tl.constexpr(2.0**23)
# a bit in each byte of a word, the lowest or the highest, and the factor that moves the four bits of a number to the
# lowest ones
LOWEST, HIGHEST = tl.constexpr(0x01010101), tl.constexpr(-0x7F7F7F80)
TO_LOWEST = tl.constexpr(0x00204081)
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
    packed_codebook.cache_clear()


@cache
def _table_of(kind: str, device: str) -> torch.Tensor | None:
    if kind in tables.GRIDS:
        return _codebook(kind).to(device)
    if kind in _TABLES:
        values = torch.from_numpy(tables.table(_TABLES[kind]).copy()).flatten()
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
        return pairs.to(torch.int8).view(torch.int16).flatten().to(device)
    return None


@cache
def packed_codebook(kind: str, device: str) -> torch.Tensor:
    """Return a codebook's entries.

    For eight columns, int32, aligned to its size: the numbers of their magnitudes, a hexadecimal digit each. For four
    columns, int16: 4 bits each.
    """
    entries = torch.from_numpy(np.frombuffer(bytes.fromhex(tables.GRIDS[kind][0]), np.int16).copy())
    if tables.GRIDS[kind][2] == 4:
        return entries.to(device)
    numbers = entries.to(torch.int32)[:, None] >> 2 * torch.arange(8, device="cpu") & 3
    digits = (numbers << 4 * torch.arange(8, device="cpu")).sum(1, dtype=torch.int32).to(device)
    twice = torch.empty(2 * len(digits), dtype=torch.int32, device=device)
    begin = -twice.data_ptr() % digits.nbytes // 4
    return twice[begin : begin + len(digits)].copy_(digits)


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
def has_codebook(kind):
    """Return whether a type's codes are indices of a codebook."""
    return kind in _WORDS


@constexpr_function
def has_table(kind):
    """Return whether a type's codes are indices of a table of 16 values."""
    return kind in _TABLES


@constexpr_function
def has_steps(kind):
    """Return whether groups of a block, or halves of them, have an integer each that multiplies the block's scale."""
    return kind in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *EVEN, "IQ2_S", "IQ3_S")


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
    negative_low, negative_high = low >> 7 & LOWEST, high >> 7 & LOWEST
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
    if has_codebook(KIND):
        first, second, signs = codebook_indices(words, lane, KIND)
        low, high = _entries(table, first, second, KIND)
        flips = tl.load(table + _codebook_words(KIND) + signs)
        a, b, c, d = _paired(low, high)
        codes = a | flips & _SIGNS, b | flips << 1 & _SIGNS, c | flips << 2 & _SIGNS, d | flips << 3 & _SIGNS
    else:
        low, high = code_bytes(words, group, lane, table, KIND)
        codes = _signed(low, high) if has_table(KIND) else _paired(low, high)
    step, offset = steps(words, group, lane, KIND)
    scale, offset_scale = block_scales(words, KIND)
    if has_steps(KIND):
        scale *= numbers(step + 128, 128) if KIND == "Q6_K" or KIND == "IQ4_XS" else numbers(step)
    return codes, scale, offset, offset_scale


@triton.jit
def block_scales(words, KIND: tl.constexpr):
    """Return the scale of a block, and that of its offsets; 0 where the type has none."""
    offset_scale = 0.0
    if KIND == "MXFP4":
        # half of e8m0: 2 ** (exponent - 128)
        bits = tl.where(words[0] > 1, (words[0] - 1) << 23, 0x200000 << tl.minimum(words[0], 1))
        scale = bits.to(tl.float32, bitcast=True)
    elif KIND == "Q2_K":
        scale, offset_scale = from_half(words[3]), from_half(words[4])
    elif KIND == "Q4_K" or KIND == "Q5_K":
        scale, offset_scale = from_half(words[0]), from_half(words[1])
    elif KIND == "Q3_K":
        scale = -from_half(words[6])
    elif KIND == "Q6_K":
        scale = from_half(words[5])
    elif KIND == "IQ2_XXS" or KIND == "IQ2_XS" or KIND == "IQ2_S":
        scale = from_half(words[0]) * 0.125
    elif KIND == "IQ3_XXS":
        scale = from_half(words[0]) * 0.25
    else:
        scale = from_half(words[0])
    return scale, offset_scale


@triton.jit
def steps(words, group, lane, KIND: tl.constexpr):
    """Return the integer that multiplies a block's scale for these columns, and the one that multiplies its offset's.

    1 and 0 where the type has none.
    """
    step, offset = 1, 0
    if KIND == "Q2_K":
        # the lower scale is a factor of the codes
        offset = words[0] >> 4
    elif KIND == "Q4_K" or KIND == "Q5_K":
        # twelve bytes pack six bits of the lower scale and of the offset of each of eight groups
        step, offset, rest = words[2], words[3], words[4]
        step = tl.where(group < 4, step & 63, rest & 15 | step >> 2 & 48)
        offset = tl.where(group < 4, offset & 63, rest >> 4 | offset >> 2 & 48)
    elif KIND == "Q6_K":
        step = (words[4] ^ 0x80) - 128
    elif KIND == "IQ4_XS":
        step = ((words[2] >> group % 2 * 4) & 15 | ((words[1] >> group % 4 * 2) & 3) << 4) - 32
    elif KIND == "IQ2_XXS" or KIND == "IQ3_XXS":
        step = words[2] >> 27 & 30 | 1
    elif KIND == "IQ2_XS":
        step = (words[2] >> lane // 2 * 4 & 15) * 2 + 1
    elif KIND == "IQ2_S":
        step = (words[4] >> lane // 2 * 4 & 15) * 2 + 1
    elif KIND == "IQ3_S":
        step = (words[4] >> group % 2 * 4 & 15) * 2 + 1
    return step, offset


@triton.jit
def code_bytes(words, group, lane, table, KIND: tl.constexpr):
    """Return the codes of octets of types without a codebook as the bytes of two words.

    Codes from a table are int8, others unsigned.
    """
    if KIND == "Q2_K":
        # codes of up to 45: the lower scale multiplies the four codes of a word
        step, shift = words[0] & 15, group % 4 * 2
        low, high = (words[1] >> shift & 0x03030303) * step, (words[2] >> shift & 0x03030303) * step
    elif KIND == "Q4_K" or KIND == "Q5_K":
        shift = group % 2 * 4
        low, high = words[5] >> shift & 0x0F0F0F0F, words[6] >> shift & 0x0F0F0F0F
        if KIND == "Q5_K":
            low, high = low | (words[7] >> group & LOWEST) << 4, high | (words[8] >> group & LOWEST) << 4
    elif KIND == "Q3_K":
        # the lower scale times a code, -128 to 124, plus 128: in four bytes at once, without carries between them
        step = ((words[4] >> group // 4 * 4) & 15 | ((words[5] >> group // 2 * 2) & 3) << 4) - 32
        low = words[2] >> group % 4 * 2 & 0x03030303 | (words[0] >> group & LOWEST) << 2
        high = words[3] >> group % 4 * 2 & 0x03030303 | (words[1] >> group & LOWEST) << 2
        zero = (128 + 4 * step) * LOWEST
        low, high = zero - low * step, zero - high * step
    elif KIND == "Q6_K":
        shift, field = group // 2 % 2 * 4, group % 4 * 2
        low = words[0] >> shift & 0x0F0F0F0F | (words[2] >> field & 0x03030303) << 4
        high = words[1] >> shift & 0x0F0F0F0F | (words[3] >> field & 0x03030303) << 4
    elif KIND == "Q8_0":
        low, high = words[1] ^ HIGHEST, words[2] ^ HIGHEST
    else:
        FIRST: tl.constexpr = 3 if KIND == "IQ4_XS" else 1
        shift = lane // 2 * 4
        low, high = words[FIRST] >> shift & 0x0F0F0F0F, words[FIRST + 1] >> shift & 0x0F0F0F0F
        if KIND == "Q5_0":
            low |= ((words[3] & 15) * TO_LOWEST & LOWEST) << 4
            high |= ((words[3] >> 4) * TO_LOWEST & LOWEST) << 4
    if has_table(KIND):
        low, high = _looked_up(table, low), _looked_up(table, high)
    return low, high


@triton.jit
def codebook_indices(words, lane, KIND: tl.constexpr):
    """Return the indices of octets of types with a codebook: of one entry or two, and of their signs.

    The last has a bit for each column, except the eighth if the signs are even.
    """
    second = 0
    if KIND == "IQ3_XXS" or KIND == "IQ3_S":
        first, second = words[1] & 255, words[1] >> 8
        if KIND == "IQ3_XXS":
            signs = words[2] >> lane * 7 & 127
        else:
            ninth, signs = words[2] >> lane * 2, words[3]
            first, second = first | (ninth & 1) << 8, second | (ninth & 2) << 7
    elif KIND == "IQ2_XXS":
        first, signs = words[1] >> lane * 8 & 255, words[2] >> lane * 7 & 127
    elif KIND == "IQ2_XS":
        first, signs = words[1] & 511, words[1] >> 9
    else:
        first, signs = words[1] | (words[3] >> lane * 2 & 3) << 8, words[2]
    return first, second, signs


@triton.jit
def _entries(table, first, second, KIND: tl.constexpr):
    """Return magnitudes of octets as the bytes of two words."""
    if KIND == "IQ3_XXS" or KIND == "IQ3_S":
        low, high = tl.load(table + first), tl.load(table + second)
    else:
        # an entry is loaded at once, and not as four words of codes: these loads limit the kernels
        both = tl.load((table + first * 2).to(tl.pointer_type(tl.int64), bitcast=True))
        low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
    return low, high
