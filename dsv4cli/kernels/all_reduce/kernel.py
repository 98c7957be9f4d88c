"""Sums over ranks in Triton: each program sends its words of this rank's part to the others and takes theirs.

No flags and no barrier: a word that has arrived is not 0 (kernels/cross_program.py). A program waits for its like on
the other ranks only, which send before they wait; a launch is small enough for all its programs to run at once.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.cross_program import leave, take
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

if TYPE_CHECKING:
    from dsv4cli.kernels.all_reduce import SymmetricBuffers

# a program's words are at least as many as its threads, see `take`
WARPS = 4


def all_reduce(x: torch.Tensor, dtype: torch.dtype, symmetric: "SymmetricBuffers") -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    words = x.flatten().view(torch.int32)
    block = symmetric.buffers[0].shape[-1]
    if len(words):
        _exchange[(cdiv(len(words), block),)](
            words, y, symmetric.buffers, symmetric.sums, len(words), symmetric.rank, len(symmetric.buffers),
            x.dtype == torch.bfloat16, block, num_warps=WARPS, **overlap(x),
        )  # fmt: skip
    return y


@triton.jit
def _part(mine, pointers, inside, OWN: tl.constexpr, PAIRS: tl.constexpr):
    """A rank's fp32 values [BLOCK], or of pairs of bf16 [2 * BLOCK]: this one's, or what has come to the pointers."""
    bits = mine if OWN else take(pointers, inside).to(tl.int32, bitcast=True)
    if PAIRS:
        first = (bits << 16).to(tl.float32, bitcast=True)
        values = tl.interleave(first, (bits & -65536).to(tl.float32, bitcast=True))
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@launched
def _exchange(
    x,  # [words], fp32 or pairs of bf16 as int32
    y,  # [words] or [2 * words]
    buffers,  # of each rank [programs, 2, RANKS, BLOCK]
    sums,  # [programs]
    words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, word = tl.program_id(0), tl.arange(0, BLOCK)
    inside = program * BLOCK + word < words
    EACH: tl.constexpr = 2 if PAIRS else 1
    value = program * (BLOCK * EACH) + tl.arange(0, BLOCK * EACH)
    wait_for_inputs(OVERLAP)
    number = tl.load(sums + program)
    mine = tl.load(x + program * BLOCK + word, inside, other=0)
    at = (program * 2 + (number & 1)) * (RANKS * BLOCK) + word
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            leave(buffers[rank] + at + RANK * BLOCK, mine.to(tl.float32, bitcast=True), inside)
    total = _part(mine, buffers[RANK] + at, inside, RANK == 0, PAIRS)
    for rank in tl.static_range(1, RANKS):
        total += _part(mine, buffers[RANK] + at + rank * BLOCK, inside, rank == RANK, PAIRS)
    # every thread has loaded it: those of a program have met in `take`
    tl.store(sums + program, number + 1)
    tl.store(y + value, total.to(y.dtype.element_ty), value < words * EACH)
