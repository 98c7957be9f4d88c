"""Units of `fp8_wgmma`: which program computes which, in which order, and the chunks that they belong to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_batch(total, programs):
    """Return the number of units in the first batch of each program."""
    return gl.maximum(total * 3 // 4 // programs, 1)


@gluon.jit
def batch(number, total, programs):
    """Return the first turn of a batch and its end (exclusive); `unit_of` is the unit of a turn.

    The first batches, one per program, divide three quarters of all units equally, so that inputs stay in shared
    memory. The next ones divide half of the rest, and so on down to single units.
    """
    begin, size = 0, first_batch(total, programs)
    for _ in range(number // programs):
        begin += size * programs
        size = gl.maximum((total - begin) // 2 // programs, 1)
    begin += number % programs * size
    return begin, gl.minimum(begin + size, total)


@gluon.jit
def unit_of(turn, total, own, programs):
    """Return the unit whose turn it is: the turns of the shared expert's `own` units follow those of first batches.

    They take twice as long as others. In first batches, they would end last.
    """
    early = gl.minimum(first_batch(total, programs) * programs, total - own)
    unit = gl.where(turn < early + own, turn - early, turn)
    return gl.where(turn < early, turn + own, unit)


@gluon.jit
def chunk_of(chunks, number, TOKENS: gl.constexpr):
    """Return whether a chunk is the shared expert's, the expert's row in the stacks, the first position, and the size.

    chunks: the words of routed experts' chunks, the number of pairs, and the number of tokens of the shared expert,
    whose chunks come first.
    """
    words, pairs, own = chunks
    shared = (own + TOKENS - 1) // TOKENS
    word = gl.load(words + gl.maximum(number - shared, 0), cache_modifier=".cg")
    is_own, first = number < shared, number * TOKENS
    row = gl.where(is_own, 0, (word >> 32).to(gl.int32))
    position = gl.where(is_own, pairs + first, ((word & 0xFFFFFFFF) >> 8).to(gl.int32))
    size = gl.where(is_own, gl.minimum(own - first, TOKENS), (word & 255).to(gl.int32))
    return is_own, row, position, size
