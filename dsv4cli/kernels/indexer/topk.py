"""The k largest of a row in Triton: a row, or a part of it, in one program's registers.

Scores come as integers of their size: bits, whose order is that of the scores but for the sign. A thread has eight
consecutive ones of each of a few stretches: a tile is [THREADS, STRETCHES, 8].
"""

import triton
import triton.language as tl

# below every score
HIDDEN = tl.constexpr(-0x80000000)


@triton.jit
def ordered(bits):
    """int32 keys in the order of the scores, +0 and -0 equal: of 16 bits for bf16 (as int16), of 32 for fp32."""
    lowest = -0x8000 if bits.dtype == tl.int16 else -0x80000000
    x = bits.to(tl.int32)
    return tl.where(x < 0, lowest - x, x)


@triton.jit
def threshold(keys, k, GROUPS: tl.constexpr):
    """The k-th largest key and how many are above it; keys int32 [THREADS, STRETCHES, 8].

    Where the number of keys above some other limit happens to be k, that limit and k.
    """
    if GROUPS:
        # so many groups a thread, k or more in all, have a key that is not below the least of their largest
        SHAPE: tl.constexpr = [keys.shape[0], keys.shape[1], GROUPS, 8 // GROUPS]
        largest = tl.max(tl.max(tl.reshape(keys, SHAPE), 3), 1)  # [THREADS, GROUPS]
        low, high = tl.min(tl.min(largest, 1), 0), tl.max(tl.max(largest, 1), 0)
    else:
        low, high = tl.min(tl.min(tl.min(keys, 2), 1), 0), tl.max(tl.max(tl.max(keys, 2), 1), 0)
    above = 0
    while low < high:
        # half of the way between signed numbers that may lie further apart than 2 ** 31
        apart = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
        middle = low + (apart // 2 + apart % 2).to(tl.int32, bitcast=True)
        count = tl.sum(tl.sum(tl.sum((keys >= middle).to(tl.int32), 2), 1), 0)
        if count < k:
            high, above = middle - 1, count
        elif count > k:
            low = middle
        else:
            low, high, above = middle - 1, middle - 1, count
    return low, above


@triton.jit
def before(counts):
    """The sum of what stands before each place of [THREADS, STRETCHES], stretch by stretch."""
    within = tl.cumsum(counts, 0) - counts
    stretch = tl.sum(counts, 0)
    return within + (tl.cumsum(stretch, 0) - stretch)[None]


@triton.jit
def store_marked(
    marks, first, counts, scores, numbers, out, out_scores, start, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Stores the first `counts` of the entries that the bits of marks name, from place `first` on.

    marks, first, counts: int32 [THREADS, STRETCHES]; bit j of a mark stands for the j-th of its eight entries.
    """
    THREADS: tl.constexpr = marks.shape[0]
    base = (tl.arange(0, marks.shape[1])[None] * THREADS + tl.arange(0, THREADS)[:, None]) * 8
    for i in range(tl.max(tl.max(counts, 0), 0)):
        lowest = marks & -marks
        # the exponent of a power of two
        place = base + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        inside = i < counts
        number = place + start if FIRST else tl.load(numbers + place, inside, other=0)
        tl.store(out + first + i, number.to(out.dtype.element_ty), inside)
        if not LAST:
            tl.store(out_scores + first + i, tl.load(scores + place, inside, other=0), inside)
        marks = marks & (marks - 1)


@triton.jit
def store_all(
    scores, numbers, out, out_scores, start, seen, k, FIRST: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr
):
    """The entries of a row, or of a part of it, that has no more than k."""
    place = tl.arange(0, K)
    number = place + start if FIRST else tl.load(numbers + place, place < seen, other=0)
    if LAST:
        tl.store(out + place, tl.where(place < seen, number, -1).to(out.dtype.element_ty), place < k)
    else:
        tl.store(out + place, number.to(out.dtype.element_ty), place < seen)
        tl.store(out_scores + place, tl.load(scores + place, place < seen, other=0), place < seen)


@triton.jit(do_not_specialize=["length", "k"])
def choose_largest(
    scores,  # int16 or int32 [T, length]
    visible,  # [T]
    numbers,  # [T, length], what stands for a place in the result; FIRST: the place itself
    out,  # [T, chunks, k]
    out_scores,  # LAST: none; otherwise the scores of out, and out_visible [T] how many of its places are in use
    out_visible,
    length,
    k,
    stride,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRETCHES: tl.constexpr,
    THREADS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
):
    CHUNK: tl.constexpr = STRETCHES * THREADS * 8
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * CHUNK
    scores += row * stride + start
    numbers += row * length + start
    target = (row * tl.num_programs(1) + chunk) * k
    stretch, thread = tl.arange(0, STRETCHES)[None, :, None], tl.arange(0, THREADS)[:, None, None]
    one = tl.arange(0, 8)[None, None]
    place = (stretch * THREADS + thread) * 8 + one
    # on its way while the number of visible ones comes
    bits = tl.load(scores + place, place < tl.cdiv(length, ALIGNED) * ALIGNED - start, other=0)
    all_seen = tl.minimum(tl.load(visible + row), length).to(tl.int32)
    seen = tl.minimum(tl.maximum(all_seen - start, 0), CHUNK)
    if not LAST and chunk == 0:
        full = all_seen // CHUNK
        tl.store(out_visible + row, (full * k + tl.minimum(all_seen - full * CHUNK, k)).to(tl.int64))
    if seen <= k:
        store_all(scores, numbers, out + target, out_scores + target, start, seen, k, FIRST, LAST, K)
    else:
        keys = tl.where(place < seen, ordered(bits), HIDDEN)
        limit, above = threshold(keys, k, GROUPS)
        # of eight entries those above the limit: marks, from bit 8 on their number; the same above bit 16 of equal ones
        weight = (1 << one) + 256
        found = tl.sum(tl.where(keys > limit, weight, tl.where(keys == limit, weight << 16, 0)), 2)
        counts = (found >> 8) & 0x000F000F
        first = before(counts.to(tl.uint32))
        first, second = (first & 0xFFFF).to(tl.int32), (first >> 16).to(tl.int32)
        taken = tl.minimum(counts >> 16, tl.maximum(k - above - second, 0))
        out, out_scores = out + target, out_scores + target
        store_marked(found & 0xFF, first, counts & 0xFFFF, scores, numbers, out, out_scores, start, FIRST, LAST)
        store_marked((found >> 16) & 0xFF, above + second, taken, scores, numbers, out, out_scores, start, FIRST, LAST)
