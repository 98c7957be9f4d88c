"""Decoders of GGUF's tensor types: rows of blocks [..., blocks, bytes] -> fp32 [..., blocks, values].

Sources: ggml-common.h (layouts) and ggml-quants.c (dequantize_row_*); the order of operations is theirs.
"""

from dsv4cli.kernels.ggml.arrays import (
    Array,
    brain_floats,
    fields,
    floats,
    halves,
    joined,
    lookup,
    reinterpreted,
    signed,
    stack,
    words,
)


def f32(b: Array) -> Array:
    """Decode F32."""
    return reinterpreted(b, "float32")


def f16(b: Array) -> Array:
    """Decode F16."""
    return halves(b)


def bf16(b: Array) -> Array:
    """Decode BF16, the upper half of fp32."""
    return brain_floats(b)


def q8_0(b: Array) -> Array:
    """Decode Q8_0: d, int8 codes."""
    return floats(signed(b[..., 2:])) * halves(b[..., :2])


def q4_0(b: Array) -> Array:
    """Decode Q4_0: d, codes with an offset of 8."""
    return halves(b[..., :2]) * (floats(fields(b[..., 2:], 4, 16)) - 8)


def q5_0(b: Array) -> Array:
    """Decode Q5_0: d, the codes' fifth bits, their lower bits; an offset of 16."""
    codes = fields(b[..., 6:], 4, 16) | fields(b[..., 2:6], 1, 1) << 4
    return halves(b[..., :2]) * (floats(codes) - 16)


def iq4_nl(b: Array) -> Array:
    """Decode IQ4_NL: d, codes that index a table."""
    return halves(b[..., :2]) * lookup("nl", fields(b[..., 2:], 4, 16))[..., 0]


def mxfp4(b: Array) -> Array:
    """Decode MXFP4: an e8m0 scale, e2m1 codes."""
    return lookup("e8m0", b[..., 0]) * lookup("e2m1", fields(b[..., 1:], 4, 16))[..., 0]


def q2_k(b: Array) -> Array:
    """Decode Q2_K: a scale and a minimum of 4 bits per 16 values, codes, d, dmin."""
    scales = b[..., :16]
    steps = halves(b[..., 80:82]) * floats(scales & 15)
    minima = halves(b[..., 82:84]) * floats(scales >> 4)
    return _affine(floats(fields(b[..., 16:80], 2, 32)), steps, minima)


def q3_k(b: Array) -> Array:
    """Decode Q3_K: the codes' inverted third bits, their lower bits, scales of 6 bits per 16 values, d."""
    low, high = fields(b[..., 96:104], 4, 8), fields(b[..., 104:108], 2, 4)
    steps = halves(b[..., 108:110]) * (floats(low | high << 4) - 32)
    codes = fields(b[..., 32:96], 2, 32) | fields(b[..., :32], 1, 32) << 2
    return _scaled(floats(codes) - 4, steps)


def q4_k(b: Array) -> Array:
    """Decode Q4_K: d, dmin, a scale and a minimum of 6 bits per 32 values, codes."""
    return _affine(floats(fields(b[..., 16:], 4, 32)), *_steps_and_minima(b))


def q5_k(b: Array) -> Array:
    """Decode Q5_K: as Q4_K, with the codes' fifth bits before their lower bits."""
    codes = fields(b[..., 48:], 4, 32) | fields(b[..., 16:48], 1, 32) << 4
    return _affine(floats(codes), *_steps_and_minima(b))


def q6_k(b: Array) -> Array:
    """Decode Q6_K: the codes' lower four bits, their upper two, int8 scales per 16 values, d; an offset of 32."""
    steps = halves(b[..., 208:210]) * floats(signed(b[..., 192:208]))
    codes = fields(b[..., :128], 4, 64) | fields(b[..., 128:192], 2, 32) << 4
    return _scaled(floats(codes) - 32, steps)


def iq4_xs(b: Array) -> Array:
    """Decode IQ4_XS: d, scales of 6 bits per 32 values in two parts, codes that index a table."""
    scales = fields(b[..., 4:8], 4, 1) | fields(b[..., 2:4], 2, 1) << 4
    steps = halves(b[..., :2]) * (floats(scales) - 32)
    return _scaled(lookup("nl", fields(b[..., 8:], 4, 16))[..., 0], steps)


def iq2_xxs(b: Array) -> Array:
    """Decode IQ2_XXS: d, and per 32 values four indices and a word with their signs and the scale."""
    groups = b[..., 2:].reshape(*b.shape[:-1], 8, 8)
    scales, signs = _scales_and_signs(groups[..., 4:])
    return _from_grid("IQ2_XXS", groups[..., :4], signs, halves(b[..., :2]) * ((scales + 0.5) * 0.25))


def iq2_xs(b: Array) -> Array:
    """Decode IQ2_XS: d, an index of 9 bits and 7 bits of signs per 8 values, scales of 4 bits per 16."""
    codes = words(b[..., 2:66], 2)
    steps = halves(b[..., :2]) * ((floats(fields(b[..., 66:], 4, 1)) + 0.5) * 0.25)
    return _from_grid("IQ2_XS", codes & 511, lookup("even signs", codes >> 9), steps)


def iq2_s(b: Array) -> Array:
    """Decode IQ2_S: d, indices' lower bits, signs, indices' upper two bits, scales of 4 bits per 16 values."""
    index = words(_interleaved(b[..., 2:34], fields(b[..., 66:74], 2, 1)), 2)
    steps = halves(b[..., :2]) * ((floats(fields(b[..., 74:], 4, 1)) + 0.5) * 0.25)
    return _from_grid("IQ2_S", index, lookup("signs", b[..., 34:66]), steps)


def iq3_xxs(b: Array) -> Array:
    """Decode IQ3_XXS: d, an index per 4 values, and per 32 values a word with their signs and the scale."""
    scales, signs = _scales_and_signs(b[..., 66:].reshape(*b.shape[:-1], 8, 4))
    return _from_grid("IQ3_XXS", b[..., 2:66], signs, halves(b[..., :2]) * ((scales + 0.5) * 0.5))


def iq3_s(b: Array) -> Array:
    """Decode IQ3_S: d, indices' lower bits, their upper bits, signs, scales of 4 bits per 32 values."""
    index = words(_interleaved(b[..., 2:66], fields(b[..., 66:74], 1, 1)), 2)
    steps = halves(b[..., :2]) * (floats(fields(b[..., 106:], 4, 1)) * 2 + 1)
    return _from_grid("IQ3_S", index, lookup("signs", b[..., 74:106]), steps)


def _steps_and_minima(b: Array) -> tuple[Array, Array]:
    """Return d times the scales and dmin times the minima of Q4_K and Q5_K, [..., 8]: 12 bytes pack 6 bits each."""
    scales, minima, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales, minima = (
        joined((scales & 63, rest & 15 | scales >> 2 & 48)),
        joined((minima & 63, rest >> 4 | minima >> 2 & 48)),
    )
    return halves(b[..., :2]) * floats(scales), halves(b[..., 2:4]) * floats(minima)


def _scales_and_signs(raw: Array) -> tuple[Array, Array]:
    """Return scales [..., 8] and signs of eight values [..., 8, 4, 8] from words of four 7-bit signs and a scale."""
    word = words(raw, 4)
    signs = stack([word >> shift & 127 for shift in (0, 7, 14, 21)], -1)
    return floats(word >> 28)[..., 0], lookup("even signs", signs)


def _interleaved(low: Array, high: Array) -> Array:
    """Interleave two arrays along the last dimension, beginning with `low`."""
    return stack((low, high), -1).reshape(*low.shape[:-1], -1)


def _from_grid(name: str, index: Array, signs: Array, steps: Array) -> Array:
    """Return steps [..., s] times the signed codebook entries of the indices, [..., values]. All products are exact."""
    values = lookup(name, index).reshape(*steps.shape[:-1], -1) * signs.reshape(*steps.shape[:-1], -1)
    return _scaled(values, steps)


def _scaled(codes: Array, steps: Array) -> Array:
    """Multiply equal parts of the codes [..., values] by steps [..., s]."""
    return (codes.reshape(*steps.shape, -1) * steps[..., None]).reshape(codes.shape)


def _affine(codes: Array, steps: Array, minima: Array) -> Array:
    """Return steps * codes - minima for equal parts of the codes."""
    parts = codes.reshape(*steps.shape, -1) * steps[..., None]
    return (parts - minima[..., None]).reshape(codes.shape)
