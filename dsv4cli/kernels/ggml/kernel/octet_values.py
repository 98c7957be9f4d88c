"""The values of octets of GGUF blocks, and of numbers that are no blocks, in fp32."""

import triton
import triton.language as tl

from dsv4cli.kernels.ggml.kernel.fields import alignment, field_size, octets_per_block, stored_words, u16, u32
from dsv4cli.kernels.ggml.kernel.octets import bias, decoded, from_half, has_codes, has_offset, numbers


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
