"""Changes of logits before the draw: penalties, and the threshold of top-k and min-p."""

import triton
import triton.language as tl

from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs
from dsv4cli.kernels.sampling import ref

BANNED, OCCURRENCE = tl.constexpr(ref.BANNED), tl.constexpr(ref.OCCURRENCE)
# the search finds a 32-bit key in four levels of eight bits, reading CHUNK logits at once
LEVELS, BITS, BINS, CHUNK = tl.constexpr(4), tl.constexpr(8), tl.constexpr(256), tl.constexpr(4096)


@launched(do_not_specialize=["drafted", "count"], do_not_specialize_on_alignment=["places", "drafts", "penalties"])
def penalize_part(
    logits,
    seen,  # int32 [sequences, WIDTH]
    places,  # int64 [count]
    drafts,  # int64 [drafted, count]
    penalties,  # fp32 [3, count]
    penalized,  # [count, WIDTH]
    stride,
    drafted,
    count,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    place = tl.load(places + row)
    values = tl.load(logits + row * stride + column, inside, other=0.0)
    if place >= 0:
        own = tl.load(seen + place * WIDTH + column, inside, other=0)
        times = own // OCCURRENCE
        for number in tl.range(0, drafted):
            times += (column == tl.load(drafts + number * count + row)).to(tl.int32)
        repetition = tl.load(penalties + row).to(tl.float64)
        frequency = tl.load(penalties + count + row).to(tl.float64)
        presence = tl.load(penalties + 2 * count + row).to(tl.float64)
        # products of a penalty and a count are exact in fp64: a fused multiplication and subtraction rounds the same
        wide = values.to(tl.float64)
        repeated = tl.where(wide > 0, wide / repetition, wide * repetition)
        wide = tl.where((own > 0) | (times > 0), repeated, wide)
        wide = wide - frequency * times.to(tl.float64) - tl.where(times > 0, presence, 0.0)
        values = wide.to(tl.float32)
    tl.store(penalized + row * WIDTH + column, values, inside)


@triton.jit
def ordered_key(values):
    """Return a uint32 key that grows with the value."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def value_of(key):
    """Return the value of a key."""
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def largest_of(row, WIDTH: tl.constexpr):
    """Return the largest value of a row."""
    tops = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in tl.range(0, WIDTH, CHUNK):
        column = first + tl.arange(0, CHUNK)
        tops = tl.maximum(tops, tl.load(row + column, column < WIDTH, other=float("-inf")))
    return tl.max(tops, 0)


@triton.jit
def nth_largest(row, nth, WIDTH: tl.constexpr):
    """Return the nth largest value of a row, from 1 to WIDTH: eight bits of its key per level."""
    prefix, left = tl.full([], 0, tl.uint32), nth.to(tl.int32)
    for level in tl.static_range(LEVELS):
        bins = tl.zeros([BINS], tl.int32)
        for first in tl.range(0, WIDTH, CHUNK):
            column = first + tl.arange(0, CHUNK)
            key = ordered_key(tl.load(row + column, column < WIDTH, other=0.0))
            key = key >> (LEVELS - 1 - level) * BITS
            same = (column < WIDTH) & (key >> BITS == prefix)
            bins += tl.histogram((key & (BINS - 1)).to(tl.int32), BINS, mask=same)
        # the number of values above a bin decreases with the bin
        above = tl.sum(bins, 0) - tl.cumsum(bins, 0)
        digit = tl.sum((above >= left).to(tl.int32), 0)
        left -= tl.max(tl.where(above < left, above, 0), 0)
        prefix = prefix * BINS + digit.to(tl.uint32)
    return value_of(prefix)


@launched(do_not_specialize_on_alignment=["counts", "gaps"])
def find_threshold(
    logits,
    counts,
    gaps,
    thresholds,  # [rows]: the smallest logit that is kept
    stride,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    count, gap = tl.load(counts + row), tl.load(gaps + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if gap < float("inf"):
        threshold = largest_of(logits + row * stride, WIDTH) - gap
    if (count > 0) & (count < WIDTH):
        threshold = tl.maximum(threshold, nth_largest(logits + row * stride, count, WIDTH))
    tl.store(thresholds + row, threshold)


@launched
def ban_below(
    logits,
    thresholds,
    kept,  # [rows, WIDTH]
    stride,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + row * stride + column, column < WIDTH, other=0.0)
    values = tl.where(values >= tl.load(thresholds + row), values, BANNED)
    tl.store(kept + row * WIDTH + column, values, column < WIDTH)
