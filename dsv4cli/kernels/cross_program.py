"""Exchange of sums between programs of a launch without a counter: a word is 0 until its sum has been written.

A program stores the inverted bits of a sum. Exactly one other program reads them and resets the word to 0. Programs
that read have higher numbers than programs that write, so the writers are already running, or have finished, when a
reader waits for them. The words come from `workspace.words`.
"""

import triton
import triton.language as tl


@triton.jit
def leave(pointers, values, inside):
    """Write fp32 values to int32 words at these pointers."""
    bits = ~values.to(tl.int32, bitcast=True)
    # only one NaN has inverted bits of 0; another NaN replaces it
    tl.store(pointers, tl.where(bits == 0, 1, bits), inside)


@triton.jit
def take(pointers, inside):
    """Wait for the fp32 values at these int32 pointers, return them and reset the words; 0 outside the mask `inside`.

    Needs at least as many words as the program has threads. With fewer, several threads poll the same word, and a slow
    one would wait forever for a word that another thread has already reset.
    """
    bits = tl.load(pointers, inside, other=-1, volatile=True)
    while tl.min(bits.to(tl.uint32, bitcast=True)) == 0:
        bits = tl.load(pointers, inside, other=-1, volatile=True)
    tl.debug_barrier()  # until all threads have read their words
    tl.store(pointers, tl.zeros_like(bits), inside)
    return (~bits).to(tl.float32, bitcast=True)
