"""Sums that some programs of a launch leave for others, without a counter: a word is 0 until its sum is there.

A program that has a sum leaves its bits, inverted; one other takes it and sets the word to 0 again. Programs that take
have higher numbers than those that leave, which therefore run already, or have ended, when others wait for them. The
words are those of `workspace.words`.
"""

import triton
import triton.language as tl


@triton.jit
def leave(pointers, values, inside):
    """Leaves values (fp32) at these pointers to int32."""
    bits = ~values.to(tl.int32, bitcast=True)
    # of all numbers only one NaN would be 0; it becomes another
    tl.store(pointers, tl.where(bits == 0, 1, bits), inside)


@triton.jit
def take(pointers, inside):
    """The fp32 values left at these pointers to int32, as soon as all are there; 0 where not inside.

    At least as many words as the program has threads: of fewer, threads hold copies, and one that sees a word later
    than its twin would wait for what the twin has taken.
    """
    bits = tl.load(pointers, inside, other=-1, volatile=True)
    while tl.min(bits.to(tl.uint32, bitcast=True)) == 0:
        bits = tl.load(pointers, inside, other=-1, volatile=True)
    tl.debug_barrier()  # all threads have seen their words
    tl.store(pointers, tl.zeros_like(bits), inside)
    return (~bits).to(tl.float32, bitcast=True)
