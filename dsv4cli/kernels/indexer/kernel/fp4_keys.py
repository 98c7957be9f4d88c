"""Unpack FP4 keys in Triton into tiles for the tensor cores."""

import triton
import triton.language as tl


@triton.jit
def quarter(words, factor, NUMBER: tl.constexpr):
    """Unpack codes NUMBER and NUMBER + 4 of each word's eight: e2m1 values times factor / 2 ** 126, bf16 [M, 2 W].

    words: int32 [M, W]; factor: int32 [M, 2 W], bit patterns of bf16 powers of two.
    """
    # both halves of a word at once: a magnitude becomes the last bits of a bf16 exponent and the first of its mantissa
    low = words << (6 - 4 * NUMBER) if NUMBER < 2 else words >> (4 * NUMBER - 6)
    pair = (low & 0x01C001C0) | ((words << (12 - 4 * NUMBER)) & -0x7FFF8000)
    bits = tl.reshape(tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)), [words.shape[0], 2 * words.shape[1]])
    return bits.to(tl.bfloat16, bitcast=True) * factor.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def key_tile(words, scale):
    """Return the scaled-down values of keys, bf16 [M, D], and the power of two that restores each key, fp32 [M].

    words: int32 [M, D / 8]; scale: uint8 [M, D / 32]. Columns are in the order of `as_keys`. Scales are relative to the
    largest scale of the key, so that no key overflows or underflows.
    """
    M: tl.constexpr = words.shape[0]
    D: tl.constexpr = 8 * words.shape[1]
    scale = scale.to(tl.int32)
    largest = tl.max(scale, 1)
    factor = tl.maximum(253 - largest[:, None] + scale, 0) << 7
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [M, D // 32, 8]), [M, D // 4])
    low = tl.join(quarter(words, factor, 0), quarter(words, factor, 1))
    high = tl.join(quarter(words, factor, 2), quarter(words, factor, 3))
    tile = tl.reshape(tl.permute(tl.join(low, high), [0, 3, 2, 1]), [M, D])
    exponent = tl.maximum(largest, 1) << 23  # 2 ** -127, which only zeros have, is subnormal in fp32
    return tile, exponent.to(tl.float32, bitcast=True)


@triton.jit
def as_keys(x):
    """Reorder the columns of x [N, D] as in `key_tile`: codes 0 and 4 of every word, then 1 and 5, and so on."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [N, D // 8, 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    low = tl.reshape(tl.join(first, second), [N, D // 4, 2])
    high = tl.reshape(tl.join(third, fourth), [N, D // 4, 2])
    return tl.reshape(tl.permute(tl.join(low, high), [0, 3, 2, 1]), [N, D])


@triton.jit
def twice_sum(dots, weight, ones):
    """Return twice the sum over heads of relu(dots) * weight, with each step rounded to bf16: fp32 [M].

    dots: fp32 [M, HEADS]; weight: bf16 [HEADS]; ones: bf16 [HEADS, 16].
    """
    # 2 * relu(x) = x + |x|: a GPU adds twice as fast as it takes a maximum
    part = (dots + tl.abs(dots)).to(tl.bfloat16) * weight[None]
    # sum over heads on the tensor cores, which yield 16 equal sums
    return tl.max(tl.dot(part, ones), 1)
