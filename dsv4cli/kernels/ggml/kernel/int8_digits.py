"""Divides inputs into digits for products on int8 tensor cores, in Gluon.

An input becomes an integer of 23 bits, relative to the largest one of the columns that a warp multiplies in a pass, and
has three int8 digits.
"""

import math

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.ggml.kernel.int8_codes import permuted
from dsv4cli.kernels.ggml.kernel.int8_layouts import inputs_layout, memory_layout, numbers
from dsv4cli.kernels.ggml.kernel.octets import HIGHEST

# 1.5 * 2 ** 23 in fp32: its sum with an integer of up to 2 ** 22 has that integer in its lowest bits. The largest sum
# of a block without steps is 2 ** 22 (Q3_K: 256 codes of -128 times digits of -128)
MAGIC, MAGIC_VALUE = gl.constexpr(0x4B400000), gl.constexpr(12582912.0)
# half of each digit's range: after it is added, an integer's three lowest bytes are its digits plus this
_HALVES = gl.constexpr(0x00808080)
# biased exponents: of the factor that makes a number of exponent 0 less than 2 ** 22, and of the largest factor whose
# inverse is no subnormal number
_EXPONENT, _LARGEST = gl.constexpr(127 + 127 + 21), gl.constexpr(253)
# all bits of fp32 but the sign
_MAGNITUDE = gl.constexpr(0x7FFFFFFF)


@constexpr_function
def _at_once(passes):
    """Return how many passes a thread divides at once: up to 8, 32 registers of inputs."""
    return math.gcd(passes, 8)


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
    held: gl.constexpr = inputs_layout(ONCE, WARPS)
    warp = numbers(WARPS, 1, 4, held)
    column = (numbers(ONCE, 0, 4, held) * TILES + warp // PARTS) * (EACH * 32) + warp % PARTS * (K // PARTS)
    column += numbers(EACH * 4, 2, 4, held) * 8 + numbers(8, 3, 4, held)
    TIMES: gl.constexpr = PASSES // ONCE
    shape: gl.constexpr = [len(places) * TIMES, ONCE, TILES, EACH, PARTS, 4, 4, 2]
    memory = gl.allocate_shared_memory(gl.int32, shape, memory_layout(7))
    factors = gl.allocate_shared_memory(gl.float32, [len(places) * TIMES, ONCE, TILES, PARTS], memory_layout(3))
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
            integers = (values * factor + MAGIC_VALUE).to(gl.int32, bitcast=True) - MAGIC
            digits = _digits(gl.reshape(integers + _HALVES, [ONCE, WARPS, EACH * 4, 2, 2, 2]))
            digits = gl.reshape(digits, [ONCE, TILES, PARTS, EACH, 4, 2, 4])
            memory.index(token * TIMES + time).store(gl.permute(digits, (0, 1, 3, 2, 4, 6, 5)))
    # the compiler would wait for the stores in each pass of `products`
    tl.debug_barrier()
    ALL: gl.constexpr = len(places) * PASSES * TILES
    return (
        memory._reinterpret(gl.int32, [ALL, EACH, PARTS, 4, 4, 2], memory_layout(5)),
        factors._reinterpret(gl.float32, [ALL, PARTS], memory_layout(1)),
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
