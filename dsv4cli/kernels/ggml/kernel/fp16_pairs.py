"""Decodes octets of GGUF blocks to pairs of fp16 with instructions for two values at a time, for Gluon kernels.

A scale is the sum of two fp16 numbers, so that a value, their product with an exact code, is rounded once.
"""

import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.ggml.kernel.octets import BIASES, bias, decoded, has_offset, numbers

# with an integer below 1,024 in the lowest bits: 1,024 plus that integer in fp16; twice
_MAGIC = tl.constexpr(0x64006400)
# bits of both codes of a word, and of their signs
_CODES, _SIGNS = tl.constexpr(0x00FF00FF), tl.constexpr(-0x7FFF8000)


@constexpr_function
def minus_magic(kind):
    """Return -1,024 minus the bias of a type's codes in fp16, twice."""
    half = 0xE400 + BIASES[kind]
    return (half << 16 | half) - (1 << 32)


@triton.jit
def half_pairs(words, group, lane, table, factor, KIND: tl.constexpr):
    """Return the values of octets times a factor in fp16: four words of two.

    A value is rounded once, to within 2 ** -11; with an offset twice, to within 2 ** -10.

    Args:
        words, group, lane, table: as for `octets.decoded`, which also has the order of columns.
        factor: fp32, a power of two, of the shape of the words or broadcast to it.
    """
    codes, scale, offset, offset_scale = decoded(words, group, lane, table, KIND)
    high, low = _halves(scale * factor)
    high_offset, low_offset = high, low
    if has_offset(KIND):
        high_offset, low_offset = _halves(numbers(offset) * (-offset_scale * factor))
    a, b, c, d = codes
    return (
        _pair(a, high, low, high_offset, low_offset, KIND), _pair(b, high, low, high_offset, low_offset, KIND),
        _pair(c, high, low, high_offset, low_offset, KIND), _pair(d, high, low, high_offset, low_offset, KIND),
    )  # fmt: skip


@triton.jit
def _pair(word, high, low, high_offset, low_offset, KIND: tl.constexpr):
    """Return the values of both codes of a word."""
    # the constant as a tensor of the same shape
    code = _sum(word & _CODES | _MAGIC, word & 0 | minus_magic(KIND))
    if has_offset(KIND):
        values = _sum(_fma(code, high, high_offset), _fma(code, low, low_offset))
    else:
        values = _fma(code, high, _product(code, low))
        if not bias(KIND):
            values = values ^ (word & _SIGNS)
    return values


@triton.jit
def _halves(value):
    """Return fp32 numbers as the sums of two fp16 numbers, each twice in a word."""
    high = _twice(value)
    return high, _twice(value - high.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def _twice(value):
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [value], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _sum(one, two):
    return tl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [one, two], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _product(one, two):
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [one, two], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _fma(one, two, three):
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [one, two, three], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip
