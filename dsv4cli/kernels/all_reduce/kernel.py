"""Sums over ranks in Triton: each program sends its words of this rank's part to the other ranks and reads theirs.

There are no flags and no barrier: a word that has arrived is not 0 (kernels/cross_program.py). A program waits only for
the same program on the other ranks, which sends before it waits. A launch is small enough for all its programs to run
at the same time. For large sums a program sends one block of words after another.

Every exchange of a program is with all other ranks, even if they need no rows: only the arrival of a rank's words shows
that the rank has read what it was sent before.
"""

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.cross_program import leave, take
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.shares import UNIT, rows_each, share_of

if TYPE_CHECKING:
    from dsv4cli.kernels.all_reduce import SymmetricBuffers

# few enough that a program has at least one word per thread, see `take`
WARPS = 4
# words that a thread writes at once if the compiler knows that they start at a multiple of this number
VECTOR = 4
# bits of integer words that are inverted when sent: the one word that cannot be sent, -1, then stands for -2 ** 31
INVERTED = 0x7FFFFFFF


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


def reduce_scatter(x: torch.Tensor, dtype: torch.dtype, symmetric: "SymmetricBuffers") -> torch.Tensor:
    ranks, width = len(symmetric.buffers), x[:1].nbytes // 4
    own = share_of(len(x), symmetric.rank, ranks)
    y = torch.empty(own.stop - own.start, *x.shape[1:], dtype=dtype, device=x.device)
    words, (programs, *_, block) = x.flatten().view(torch.int32), symmetric.buffers[0].shape
    if len(words):
        share = rows_each(len(x), ranks) * width
        _reduce_scatter[(min(cdiv(share, block), programs),)](
            words, y, symmetric.buffers, symmetric.sums, len(words), share, symmetric.rank, ranks,
            x.dtype == torch.bfloat16, block, num_warps=WARPS, **overlap(x),
        )  # fmt: skip
    return y


def all_gather(parts: Sequence[torch.Tensor], tokens: int, symmetric: "SymmetricBuffers") -> list[torch.Tensor]:
    ranks, (programs, *_, block) = len(symmetric.buffers), symmetric.buffers[0].shape
    each, widths = rows_each(tokens, ranks), [x.shape[1:].numel() * x.itemsize // 4 for x in parts]
    # whole shares of all ranks, so that no write ends within four words
    ys = [torch.empty(ranks * each, *x.shape[1:], dtype=x.dtype, device=x.device) for x in parts]
    part = gcd(*widths)
    if part and tokens:
        part //= gcd(part, VECTOR // UNIT)
        words = [tuple(x.flatten().view(torch.int32) for x in tensors) for tensors in (parts, ys)]
        flips = tuple(INVERTED if y.dtype == torch.int64 else 0 for y in ys)
        _all_gather[(min(cdiv(each * max(widths), block), programs),)](
            *words, symmetric.buffers, symmetric.sums, len(parts[0]) * part, each // UNIT * part,
            tuple(width // part for width in widths), UNIT, flips, symmetric.rank, ranks, block, num_warps=WARPS,
            **overlap(ys[0]),
        )  # fmt: skip
    return [y[:tokens] for y in ys]


@triton.jit
def _part(mine, pointers, inside, OWN: tl.constexpr, PAIRS: tl.constexpr):
    """Return a rank's fp32 values: `mine` if OWN, otherwise what arrived at `pointers`.

    The shape is [BLOCK], or [2 * BLOCK] for pairs of bf16.
    """
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
    # every thread has loaded it: the threads of a program synchronize in `take`
    tl.store(sums + program, number + 1)
    tl.store(y + value, total.to(y.dtype.element_ty), value < words * EACH)


@triton.jit
def _turn(sums, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Count a program's next exchange and return the offsets of the first rank's words in a buffer.

    The words that the program has reset to 0 are visible to all ranks before the program sends again, and the other
    ranks fill these words only after that has arrived.
    """
    program = tl.program_id(0)
    tl.debug_barrier()
    number = tl.atomic_add(sums + program, 1, sem="acq_rel", scope="sys")
    return (program * 2 + (number & 1)) * (RANKS * BLOCK) + tl.arange(0, BLOCK)


@launched
def _reduce_scatter(
    x,  # [words], fp32 or pairs of bf16 as int32
    y,  # this rank's share of them, or of twice as many
    buffers,  # of each rank [programs, 2, RANKS, BLOCK]
    sums,  # [programs]
    words,
    share,  # of each rank but the last, which has what is left
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    EACH: tl.constexpr = 2 if PAIRS else 1
    wait_for_inputs(OVERLAP)
    own = tl.minimum(share, tl.maximum(words - RANK * share, 0))
    for block in range(program, tl.cdiv(share, BLOCK), tl.num_programs(0)):
        word = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = word < share
        at = _turn(sums, RANKS, BLOCK)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                theirs = tl.load(x + rank * share + word, inside & (rank * share + word < words), other=0)
                leave(buffers[rank] + at + RANK * BLOCK, theirs.to(tl.float32, bitcast=True), inside)
        mine = tl.load(x + RANK * share + word, word < own, other=0)
        total = _part(mine, buffers[RANK] + at, inside, RANK == 0, PAIRS)
        for rank in tl.static_range(1, RANKS):
            total += _part(mine, buffers[RANK] + at + rank * BLOCK, inside, rank == RANK, PAIRS)
        value = (block * (BLOCK * EACH) + tl.arange(0, BLOCK * EACH)).to(tl.int64)
        tl.store(y + value, total.to(y.dtype.element_ty), value < own * EACH)


@launched(do_not_specialize=["rows", "units"])
def _all_gather(
    xs,  # of each tensor this rank's rows as int32, each of WIDTHS words
    ys,  # [RANKS * units * UNIT, width]
    buffers,  # of each rank [programs, 2, RANKS, BLOCK]
    sums,  # [programs]
    rows,  # that this rank has, times a divisor of the widths, by which WIDTHS are shorter: one tensor has one kernel
    units,  # of UNIT rows in a share, times the same
    WIDTHS: tl.constexpr,
    UNIT: tl.constexpr,
    FLIPS: tl.constexpr,  # bits of each one's words that are sent inverted
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    for tensor in tl.static_range(len(WIDTHS)):
        # the compiler sees that it is a multiple of four words, which threads write at once
        share = units * (UNIT * WIDTHS[tensor])
        for block in range(program, tl.cdiv(share, BLOCK), tl.num_programs(0)):
            word = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
            inside = word < share
            at = _turn(sums, RANKS, BLOCK)
            mine = tl.load(xs[tensor] + word, word < rows * WIDTHS[tensor], other=0)
            sent = (mine ^ FLIPS[tensor]).to(tl.float32, bitcast=True)
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    leave(buffers[rank] + at + RANK * BLOCK, sent, inside)
            tl.store(ys[tensor] + RANK * share + word, mine, inside)
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    part = take(buffers[RANK] + at + rank * BLOCK, inside).to(tl.int32, bitcast=True) ^ FLIPS[tensor]
                    tl.store(ys[tensor] + rank * share + word, part, inside)
