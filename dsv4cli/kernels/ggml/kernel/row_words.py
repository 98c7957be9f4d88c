"""Loads of GGUF blocks for Gluon kernels in which a thread has whole rows: up to 16 bytes at a time, each byte once.

Loads of single octets (`fields`) read the sectors of many rows again and again, which takes a larger L1 cache than such
kernels leave.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.ggml.kernel.fields import alignment, field_begin, field_size

# types whose loads are written here
KINDS = ("IQ2_XXS", "IQ3_XXS", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")


@constexpr_function
def by_row(kind, blocks):
    """Return whether `step_words` supports rows of this many blocks of a type."""
    return kind in KINDS and alignment(kind, blocks) == 8


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


@gluon.jit
def _words(row, begin, COUNT: gl.constexpr):
    """Load COUNT words of 4 bytes of each row, from byte `begin` on: int32 [R, COUNT]."""
    layout: gl.constexpr = row_layout(COUNT)
    rows = gl.convert_layout(row + begin, gl.SliceLayout(1, layout), assert_trivial=True)
    rows = gl.expand_dims(rows.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    return gl.load(rows + gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout)), 0))


@gluon.jit
def _word(row, begin):
    """Load a word of 4 bytes of each row: int32 [R, 1]."""
    return _column(gl.load((row + begin).to(gl.pointer_type(gl.int32), bitcast=True)))


@gluon.jit
def _half(row, begin):
    """Load 2 bytes of each row, in the lower half of int32 [R, 1]."""
    return _column(gl.load((row + begin).to(gl.pointer_type(gl.int16), bitcast=True)).to(gl.int32))


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
    """Return words of two octets, [R, 2], for four, of which two have the same: [R, 4]."""
    both = gl.reshape(gl.permute(gl.join(words, words), (0, 2, 1)), [128, 4])
    return gl.convert_layout(both, row_layout(4), assert_trivial=True)


@gluon.jit
def _byte(words, number):
    """Return a byte of words."""
    return words >> number * 8 & 255


@gluon.jit
def row_words(row, b, STEP: gl.constexpr, KIND: gl.constexpr, BLOCKS: gl.constexpr):
    """Load what is stored of 64 columns, step STEP of four of 256 columns b.

    row: pointers [128] to rows of BLOCKS blocks by field, a row per thread.
    """
    PART: gl.constexpr = STEP // 2
    first = field_begin(KIND, BLOCKS, 0) + b * field_size(KIND, 0)
    second = field_begin(KIND, BLOCKS, 1) + b * field_size(KIND, 1)
    if KIND == "Q8_0":
        # eight blocks
        words = _word(row, b * 16 + STEP * 4), _words(row, field_begin(KIND, BLOCKS, 1) + b * 256 + STEP * 64, 16)
    elif KIND == "IQ2_XXS":
        words = _half(row, first), _words(row, second + STEP * 16, 4)
    else:
        third = field_begin(KIND, BLOCKS, 2) + b * field_size(KIND, 2)
        if KIND == "IQ3_XXS":
            words = _half(row, first), _words(row, second + STEP * 16, 4), _words(row, third + STEP * 8, 2)
        elif KIND == "Q2_K":
            words = _word(row, first + STEP * 4), _words(row, second + PART * 32, 8), _word(row, third)
        elif KIND == "Q4_K":
            steps = _word(row, first), _word(row, second), _word(row, second + 4), _word(row, second + 8)
            codes = (_words(row, third + STEP * 32, 8),)
            words = steps + codes
        else:
            fourth = field_begin(KIND, BLOCKS, 3) + b * field_size(KIND, 3)
            if KIND == "IQ4_XS":
                steps = _half(row, first), _half(row, second), _word(row, third)
                codes = (_words(row, fourth + STEP * 32, 8),)
            elif KIND == "Q5_K":
                steps = _word(row, first), _word(row, second), _word(row, second + 4), _word(row, second + 8)
                codes = _words(row, fourth + STEP * 32, 8), _words(row, third, 8)
            elif KIND == "Q3_K":
                steps = _word(row, third + STEP % 2 * 4), _word(row, third + 8), _half(row, fourth)
                codes = _words(row, first, 8), _words(row, second + PART * 32, 8)
            else:
                steps = _word(row, third + STEP * 4), _half(row, fourth)
                codes = _words(row, first + PART * 64, 16), _words(row, second + PART * 32, 8)
            words = steps + codes
    return words


@gluon.jit
def step_words(words, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Return what `fields.stored_words` returns for the octets [128, 4] of one of two groups of 32 columns of a step.

    What octets share has the shape [128, 1]. words: as of `row_words`.
    """
    place = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, row_layout(4))), 0)
    # the byte of each 16 columns, and of 32
    sixteen, group = place // 2 + GROUP * 2, (STEP * 2 + GROUP) % 4
    if KIND == "Q8_0":
        low, high = _octets_of(words[1], GROUP)
        found = words[0] >> 16 * GROUP, low, high
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
