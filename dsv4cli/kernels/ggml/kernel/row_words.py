"""Loads of GGUF blocks for Gluon kernels in which a thread has whole rows: up to 16 bytes at a time, each byte once.

Loads of single octets (`fields`) read the sectors of many rows again and again, which takes a larger L1 cache than such
kernels leave.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.ggml.kernel.fields import alignment, field_begin, field_size, octets_per_block


@constexpr_function
def by_row(kind, blocks):
    """Return whether `row_words` supports rows of this many blocks of a type."""
    return alignment(kind, blocks) == 8


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
    if octets_per_block(KIND) == 4:
        words = _of_small_blocks(row, b * 8 + STEP * 2, KIND, BLOCKS)
    else:
        first = field_begin(KIND, BLOCKS, 0) + b * field_size(KIND, 0)
        second = field_begin(KIND, BLOCKS, 1) + b * field_size(KIND, 1)
        if KIND == "IQ2_XXS":
            words = _half(row, first), _words(row, second + STEP * 16, 4)
        else:
            third = field_begin(KIND, BLOCKS, 2) + b * field_size(KIND, 2)
            if KIND == "Q2_K":
                words = _word(row, first + STEP * 4), _words(row, second + STEP // 2 * 32, 8), _word(row, third)
            elif KIND == "Q4_K":
                codes = (_words(row, third + STEP * 32, 8),)
                words = _steps_and_minima(row, first, second) + codes
            elif KIND == "IQ3_XXS":
                words = _half(row, first), _words(row, second + STEP * 16, 4), _words(row, third + STEP * 8, 2)
            elif KIND == "IQ2_XS":
                words = _half(row, first), _words(row, second + STEP * 16, 4), _half(row, third + STEP * 2)
            else:
                words = _of_four_fields(row, b, first, second, third, STEP, KIND, BLOCKS)
    return words


@gluon.jit
def _of_small_blocks(row, b, KIND: gl.constexpr, BLOCKS: gl.constexpr):
    """Load two blocks of 32 columns, from block b on."""
    codes = field_begin(KIND, BLOCKS, 1)
    if KIND == "Q8_0":
        words = _word(row, b * 2), _words(row, codes + b * 32, 16)
    elif KIND == "MXFP4":
        words = _half(row, b), _words(row, codes + b * 16, 8)
    elif KIND == "Q5_0":
        words = _word(row, b * 2), _words(row, field_begin(KIND, BLOCKS, 2) + b * 16, 8), _words(row, codes + b * 4, 2)
    else:
        words = _word(row, b * 2), _words(row, codes + b * 16, 8)
    return words


@gluon.jit
def _steps_and_minima(row, first, second):
    return _word(row, first), _word(row, second), _word(row, second + 4), _word(row, second + 8)


@gluon.jit
def _of_four_fields(
    row, b, first, second, third, STEP: gl.constexpr, KIND: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Load 64 columns of a type with four or five fields, of which the first three begin at these bytes."""
    fourth = field_begin(KIND, BLOCKS, 3) + b * field_size(KIND, 3)
    if KIND == "IQ4_XS":
        steps = _half(row, first), _half(row, second), _word(row, third)
        codes = (_words(row, fourth + STEP * 32, 8),)
    elif KIND == "Q5_K":
        steps = _steps_and_minima(row, first, second)
        codes = _words(row, fourth + STEP * 32, 8), _words(row, third, 8)
    elif KIND == "Q3_K":
        steps = _word(row, third + STEP % 2 * 4), _word(row, third + 8), _half(row, fourth)
        codes = _words(row, first, 8), _words(row, second + STEP // 2 * 32, 8)
    elif KIND == "Q6_K":
        steps = _word(row, third + STEP * 4), _half(row, fourth)
        codes = _words(row, first + STEP // 2 * 64, 16), _words(row, second + STEP // 2 * 32, 8)
    else:
        fifth = field_begin(KIND, BLOCKS, 4) + b * field_size(KIND, 4)
        if KIND == "IQ2_S":
            steps = _half(row, first), _half(row, fourth + STEP * 2), _half(row, fifth + STEP * 2)
            codes = _words(row, second + STEP * 8, 2), _words(row, third + STEP * 8, 2)
        else:
            gl.static_assert(KIND == "IQ3_S")
            steps = _half(row, first), _half(row, third + STEP * 2), _half(row, fifth + STEP // 2 * 2)
            codes = _words(row, second + STEP * 16, 4), _words(row, fourth + STEP * 8, 2)
    return steps + codes


@gluon.jit
def _of_group(words, GROUP: gl.constexpr):
    """Return the word of one of two groups, [R, 2], as [R, 1]."""
    left, right = gl.split(words)
    return _column(left if GROUP == 0 else right)


@gluon.jit
def _two_bytes(words, GROUP: gl.constexpr):
    """Return the two bytes of each octet of one of two groups, [R, 4]: [R, 4]."""
    near, far = gl.split(gl.permute(gl.reshape(words, [128, 2, 2]), (0, 2, 1)))
    both = near if GROUP == 0 else far
    each = gl.reshape(gl.join(both & 0xFFFF, both >> 16 & 0xFFFF), [128, 4])
    return gl.convert_layout(each, row_layout(4), assert_trivial=True)


@gluon.jit
def _nibbles(words, GROUP: gl.constexpr):
    """Return the words of four octets of one of two groups, [R, 8], as two [R, 4].

    Octets 0 and 2 are the lower and the upper bits of the same eight bytes, and so are octets 1 and 3.
    """
    near, far = gl.split(gl.permute(gl.reshape(words, [128, 2, 4]), (0, 2, 1)))
    low, high = gl.split(gl.reshape(near if GROUP == 0 else far, [128, 2, 2]))
    return _twice(low), _twice(high)


@gluon.jit
def step_words(words, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Return what `fields.stored_words` returns for the octets [128, 4] of one of two groups of 32 columns of a step.

    What octets share has the shape [128, 1]. words: as of `row_words`.
    """
    place = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, row_layout(4))), 0)
    # the byte of each 16 columns, and of 32
    sixteen, group = place // 2 + GROUP * 2, (STEP * 2 + GROUP) % 4
    if octets_per_block(KIND) == 4:
        found = _of_small_words(words, place, GROUP, KIND)
    elif KIND == "IQ2_XXS":
        near, far = gl.split(gl.permute(gl.reshape(words[1], [128, 2, 2]), (0, 2, 1)))
        index, signs = gl.split(near if GROUP == 0 else far)
        found = words[0], _column(index), _column(signs)
    elif KIND == "IQ3_XXS":
        found = words[0], _two_bytes(words[1], GROUP), _of_group(words[2], GROUP)
    elif KIND == "IQ2_XS":
        found = words[0], _two_bytes(words[1], GROUP), _byte(words[2], GROUP)
    elif KIND == "IQ2_S":
        index, signs = _byte(_of_group(words[3], GROUP), place), _byte(_of_group(words[4], GROUP), place)
        found = words[0], index, signs, _byte(words[1], GROUP), _byte(words[2], GROUP)
    elif KIND == "IQ3_S":
        signs, step = _byte(_of_group(words[4], GROUP), place), _byte(words[2], STEP % 2)
        found = words[0], _two_bytes(words[3], GROUP), _byte(words[1], GROUP), signs, step
    elif KIND == "IQ4_XS":
        steps = words[0], _byte(words[1], STEP // 2), _byte(words[2], STEP)
        found = steps + _nibbles(words[3], GROUP)
    else:
        found = _of_k_words(words, group, sixteen, GROUP, KIND)
    return found


@gluon.jit
def _of_small_words(words, place, GROUP: gl.constexpr, KIND: gl.constexpr):
    scale = (_byte(words[0], GROUP) if KIND == "MXFP4" else words[0] >> 16 * GROUP,)
    codes = _octets_of(words[1], GROUP) if KIND == "Q8_0" else _nibbles(words[1], GROUP)
    found = scale + codes
    if KIND == "Q5_0":
        upper = (_byte(_of_group(words[2], GROUP), place),)
        found += upper
    return found


@gluon.jit
def _of_k_words(words, group, sixteen, GROUP: gl.constexpr, KIND: gl.constexpr):
    if KIND == "Q2_K":
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
