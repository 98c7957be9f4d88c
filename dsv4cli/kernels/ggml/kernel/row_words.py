"""Loads of GGUF blocks for Gluon kernels in which a thread has whole rows: each byte is loaded and decoded once.

Of single octets (`fields`), four threads load and decode what these share.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.ggml.kernel.fields import field_of
from dsv4cli.kernels.ggml.types import TILE_ROWS as _TILE_ROWS
from dsv4cli.kernels.ggml.types import TYPES

TILE_ROWS = gl.constexpr(_TILE_ROWS)
# types whose loads are written here, those of most files; the kernel loads single octets of all others
KINDS = ("IQ2_XXS", "IQ3_XXS", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")


@constexpr_function
def by_row(kind):
    """Return whether `row_words` and `step_words` support a type."""
    return kind in KINDS


@constexpr_function
def row_layout(count):
    """Return the layout over four warps of `count` values of each of 128 rows, all in one thread."""
    registers = [[0, 1 << bit] for bit in range(count.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[1 << bit, 0] for bit in range(5)], [[32, 0], [64, 0]], [], [128, count]
    )


@gluon.jit
def _column(values):
    """Return values [R] as [R, 1] for octets [R, 4]."""
    layout: gl.constexpr = gl.SliceLayout(1, row_layout(4))
    return gl.expand_dims(gl.convert_layout(values, layout, assert_trivial=True), 1)


@constexpr_function
def _offset(kind, field, byte):
    """Return where a byte of a field begins in its tile, for the field of the same row and block."""
    unit = TYPES[kind].units[field]
    return byte // unit * (unit * TILE_ROWS) + byte % unit


@gluon.jit
def _words(field, k: gl.constexpr, COUNT: gl.constexpr, FIELD: gl.constexpr, KIND: gl.constexpr):
    """Load COUNT words of 4 bytes from byte k of a field on, in units of 8: int32 [R, COUNT]."""
    layout: gl.constexpr = row_layout(COUNT // 2)
    distance: gl.constexpr = _offset(KIND, FIELD, 8) // 8
    start = gl.convert_layout(field + _offset(KIND, FIELD, k), gl.SliceLayout(1, layout), assert_trivial=True)
    start = gl.expand_dims(start.to(gl.pointer_type(gl.int64), bitcast=True), 1)
    unit = gl.expand_dims(gl.arange(0, COUNT // 2, layout=gl.SliceLayout(0, layout)), 0)
    both = gl.load(start + unit * distance)
    words = gl.reshape(gl.join(both.to(gl.int32), (both >> 32).to(gl.int32)), [128, COUNT])
    return gl.convert_layout(words, row_layout(COUNT), assert_trivial=True)


@gluon.jit
def _word(field, k: gl.constexpr, FIELD: gl.constexpr, KIND: gl.constexpr):
    """Load a word of 4 bytes from byte k of a field on: int32 [R, 1]."""
    return _column(gl.load((field + _offset(KIND, FIELD, k)).to(gl.pointer_type(gl.int32), bitcast=True)))


@gluon.jit
def _half(field):
    """Load the first 2 bytes of a field, in the lower half of int32 [R, 1]."""
    return _column(gl.load(field.to(gl.pointer_type(gl.int16), bitcast=True)).to(gl.int32))


@gluon.jit
def _octets(words):
    """Return the words of four octets, [R, 8], as two [R, 4]."""
    low, high = gl.split(gl.reshape(words, [128, 4, 2]))
    layout: gl.constexpr = row_layout(4)
    return gl.convert_layout(low, layout, assert_trivial=True), gl.convert_layout(high, layout, assert_trivial=True)


@gluon.jit
def _octets_of(words, GROUP: gl.constexpr):
    """Return the words of the four octets of one of two groups, [R, 16], as two [R, 4]."""
    left, right = gl.split(gl.permute(gl.reshape(words, [128, 2, 8]), (0, 2, 1)))
    return _octets(left if GROUP == 0 else right)


@gluon.jit
def _twice(words):
    """Repeat the words of two octets, [R, 2], for the next two, which are stored in the same bytes: [R, 4]."""
    both = gl.reshape(gl.permute(gl.join(words, words), (0, 2, 1)), [128, 4])
    return gl.convert_layout(both, row_layout(4), assert_trivial=True)


@gluon.jit
def _byte(words, number):
    """Return a byte of words."""
    return words >> number * 8 & 255


@gluon.jit
def row_words(rows, b, STEP: gl.constexpr, KIND: gl.constexpr, BLOCKS: gl.constexpr):
    """Load what is stored of 64 columns, step STEP of four of 256 columns b.

    rows: [128] of BLOCKS blocks each, as of `tile_rows`, a row per thread.
    """
    PART: gl.constexpr = STEP // 2
    if KIND == "Q8_0":
        # two of eight blocks, whose codes follow each other
        left = field_of(rows, b * 8 + STEP * 2, 0, KIND, BLOCKS, TILE_ROWS)
        right = field_of(rows, b * 8 + (STEP * 2 + 1), 0, KIND, BLOCKS, TILE_ROWS)
        codes = field_of(rows, b * 8 + STEP * 2, 1, KIND, BLOCKS, TILE_ROWS)
        words = _half(left), _half(right), _words(codes, 0, 16, 1, KIND)
    else:
        first = field_of(rows, b, 0, KIND, BLOCKS, TILE_ROWS)
        second = field_of(rows, b, 1, KIND, BLOCKS, TILE_ROWS)
        if KIND == "IQ2_XXS":
            words = _half(first), _words(second, STEP * 16, 4, 1, KIND)
        else:
            third = field_of(rows, b, 2, KIND, BLOCKS, TILE_ROWS)
            if KIND == "IQ3_XXS":
                words = _half(first), _words(second, STEP * 16, 4, 1, KIND), _words(third, STEP * 8, 2, 2, KIND)
            elif KIND == "Q2_K":
                steps, scales = _word(first, STEP * 4, 0, KIND), _word(third, 0, 2, KIND)
                words = steps, _words(second, PART * 32, 8, 1, KIND), scales
            elif KIND == "Q4_K":
                steps, codes = _k_scales(first, second, KIND), (_words(third, STEP * 32, 8, 2, KIND),)
                words = steps + codes
            else:
                fourth = field_of(rows, b, 3, KIND, BLOCKS, TILE_ROWS)
                if KIND == "IQ4_XS":
                    steps = _half(first), _half(second), _word(third, 0, 2, KIND)
                    codes = (_words(fourth, STEP * 32, 8, 3, KIND),)
                elif KIND == "Q5_K":
                    steps = _k_scales(first, second, KIND)
                    codes = _words(fourth, STEP * 32, 8, 3, KIND), _words(third, 0, 8, 2, KIND)
                elif KIND == "Q3_K":
                    steps = _word(third, STEP % 2 * 4, 2, KIND), _word(third, 8, 2, KIND), _half(fourth)
                    codes = _words(first, 0, 8, 0, KIND), _words(second, PART * 32, 8, 1, KIND)
                else:
                    steps = _word(third, STEP * 4, 2, KIND), _half(fourth)
                    codes = _words(first, PART * 64, 16, 0, KIND), _words(second, PART * 32, 8, 1, KIND)
                words = steps + codes
    return words


@gluon.jit
def _k_scales(first, second, KIND: gl.constexpr):
    """Load the common scales and the packed lower ones of Q4_K and Q5_K."""
    return (
        _word(first, 0, 0, KIND), _word(second, 0, 1, KIND), _word(second, 4, 1, KIND), _word(second, 8, 1, KIND)
    )  # fmt: skip


@gluon.jit
def step_words(words, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Return what `fields.stored_words` returns for the octets [128, 4] of one of two groups of 32 columns of a step.

    What octets share has the shape [128, 1]. words: as of `row_words`.
    """
    place = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, row_layout(4))), 0)
    # the byte of each 16 columns, and of 32
    sixteen, group = place // 2 + GROUP * 2, (STEP * 2 + GROUP) % 4
    if KIND == "Q8_0":
        low, high = _octets_of(words[2], GROUP)
        found = words[0] if GROUP == 0 else words[1], low, high
    elif KIND == "IQ2_XXS":
        near, far = gl.split(gl.permute(gl.reshape(words[1], [128, 2, 2]), (0, 2, 1)))
        index, signs = gl.split(near if GROUP == 0 else far)
        found = words[0], _column(index), _column(signs)
    elif KIND == "IQ3_XXS":
        near, far = gl.split(gl.permute(gl.reshape(words[1], [128, 2, 2]), (0, 2, 1)))
        both = near if GROUP == 0 else far
        index = gl.reshape(gl.join(both & 0xFFFF, both >> 16 & 0xFFFF), [128, 4])
        left, right = gl.split(words[2])
        index = gl.convert_layout(index, row_layout(4), assert_trivial=True)
        found = words[0], index, _column(left if GROUP == 0 else right)
    elif KIND == "IQ4_XS":
        # 16 bytes of 32 columns: octets 0 and 2 are the lower bits of the first eight, 1 and 3 those of the others
        near, far = gl.split(gl.permute(gl.reshape(words[3], [128, 2, 4]), (0, 2, 1)))
        low, high = gl.split(gl.reshape(near if GROUP == 0 else far, [128, 2, 2]))
        found = words[0], _byte(words[1], STEP // 2), _byte(words[2], STEP), _twice(low), _twice(high)
    elif KIND == "Q2_K":
        low, high = _octets(words[1])
        found = _byte(words[0], sixteen), low, high, words[2], words[2] >> 16
    elif KIND == "Q4_K" or KIND == "Q5_K":
        scales = words[0], words[0] >> 16
        steps = _byte(words[1], group), _byte(words[2], group), _byte(words[3], group)
        found = scales + steps + _octets(words[4])
        if KIND == "Q5_K":
            found += _octets(words[5])
    elif KIND == "Q3_K":
        third_low, third_high = _octets(words[3])
        low, high = _octets(words[4])
        found = third_low, third_high, low, high, _byte(words[0], sixteen), _byte(words[1], sixteen), words[2]
    else:
        low, high = _octets_of(words[2], GROUP)
        upper_low, upper_high = _octets(words[3])
        found = low, high, upper_low, upper_high, _byte(words[0], sixteen), words[1]
    return found
