"""Sums that programs of a launch leave for others of it, without a counter: a word that is not 0 is there.

The words are 0 between launches. Who has a sum leaves its bits, inverted; the one program that takes it leaves 0 again.
Who takes has a higher program number than all that leave: they run already when it waits for them.
"""

import triton
import triton.language as tl


@triton.jit
def leave(place, values, inside):
    """place: pointers to int32; values: fp32."""
    words = ~values.to(tl.int32, bitcast=True)
    # of all numbers only one NaN would be 0; it becomes another
    tl.store(place, tl.where(words == 0, 1, words), inside)


@triton.jit
def take(place, inside):
    """The fp32 values left at these pointers to int32, as soon as all are there; 0 where not inside.

    At least as many places as the program has threads: of fewer, threads hold copies, and one that sees a word later
    than its twin would wait for what the twin has taken.
    """
    words = tl.load(place, inside, other=-1, volatile=True)
    while tl.min(words.to(tl.uint32, bitcast=True)) == 0:
        words = tl.load(place, inside, other=-1, volatile=True)
    tl.debug_barrier()  # all threads have seen their words
    tl.store(place, tl.zeros_like(words), inside)
    return (~words).to(tl.float32, bitcast=True)
