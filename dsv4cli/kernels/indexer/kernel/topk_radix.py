"""Top-k of a row in Triton: one program holds a row, or a chunk of it, in registers.

Scores are passed as integers of the same size: bit patterns, ordered like the scores except for the sign. Each thread
has eight consecutive scores of each of a few stretches: a tile is [THREADS, STRETCHES, 8].
"""

import triton
import triton.language as tl

from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs


@triton.jit
def ordered(bits, place, seen):
    """Return int32 keys that compare like the scores, with +0 equal to -0: 16 bits for bf16 (int16), 32 for fp32.

    Hidden places get lower keys than all scores.
    """
    lowest = -0x8000 if bits.dtype == tl.int16 else -0x80000000
    x = bits.to(tl.int32)
    return tl.where(place < seen, tl.where(x < 0, lowest - x, x), -0x8001 if bits.dtype == tl.int16 else -0x80000000)


@triton.jit
def count_from(keys, limit, dtype: tl.constexpr):
    """Return how many keys (from `ordered` with this dtype) are at least `limit`."""
    if dtype == tl.int16:
        # the sign of a difference takes half the instructions of a comparison
        reached = ((limit - 1 - keys).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    else:
        reached = (keys >= limit).to(tl.int32)
    return tl.sum(tl.sum(tl.sum(reached, 2), 1), 0)


@triton.jit
def score_of(key, dtype: tl.constexpr):
    """Return the score of a key in fp32; -inf for a hidden place."""
    if dtype == tl.int16:
        key = tl.maximum(key, -0x7F80)
        bits = tl.where(key < 0, -0x8000 - key, key) << 16
    else:
        key = tl.maximum(key, -0x7F800000)
        bits = tl.where(key < 0, -0x80000000 - key, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_near(score, dtype: tl.constexpr):
    """Return the key of an fp32 score, rounded toward zero."""
    bits = score.to(tl.int32, bitcast=True)
    if dtype == tl.int16:
        bits = bits >> 16
        return tl.where(bits < 0, -0x8000 - bits, bits)
    return tl.where(bits < 0, -0x80000000 - bits, bits)


@triton.jit
def threshold(keys, k, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Return the k-th largest key, and how many keys are above it.

    If exactly k keys are above another limit found on the way, return that limit and k. keys: int32 [THREADS,
    STRETCHES, 8], from `ordered` with this dtype.
    """
    # EACH groups per thread, at least k in total, have a key that is at least the smallest group maximum
    EACH: tl.constexpr = GROUPS if GROUPS else 8
    SHAPE: tl.constexpr = [keys.shape[0], keys.shape[1], EACH, 8 // EACH]
    largest = tl.max(tl.max(tl.reshape(keys, SHAPE), 3), 1)  # [THREADS, EACH]
    low, high = tl.min(tl.min(largest, 1), 0), tl.max(tl.max(largest, 1), 0)
    # about a third of the groups have a largest key below the k-th; H200, 512 of 8,192: 4.2 us in four or five steps,
    # bisection needs nine (4.6), and up to 15 if the scores change sign (7.5)
    mean = tl.sum(tl.sum(score_of(largest, dtype), 1), 0) * (1.0 / (EACH * keys.shape[0]))
    guess = mean - 0.1 * (score_of(high, dtype) - mean)
    if not GROUPS:
        low = tl.min(tl.min(tl.min(keys, 2), 1), 0)
    above, step, log_k = 0, 0, tl.log2(k.to(tl.float32))
    log_low, log_high = log_k + 1.4, -1.0
    while low < high:
        # midpoint of signed numbers whose difference may exceed 2 ** 31
        apart = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
        middle = low + (apart // 2 + apart % 2).to(tl.int32, bitcast=True)
        # the number of keys above a score falls nearly exponentially with it
        near = tl.minimum(tl.maximum(key_near(guess, dtype), low + 1), high)
        # bisect for infinite scores, and as a last resort
        middle = tl.where((step < 6) & (step != 3) & (tl.abs(guess) < 1e38), near, middle)
        count = count_from(keys, middle, dtype)
        log_count = tl.log2(tl.maximum(count, 1).to(tl.float32))
        if count < k:
            high, above, log_high = middle - 1, count, log_count
        elif count > k:
            low, log_low = middle, log_count
        else:
            low, high, above = middle - 1, middle - 1, count
        low_score = score_of(low, dtype)
        guess = low_score + (score_of(high + 1, dtype) - low_score) * ((log_low - log_k) / (log_low - log_high))
        step += 1
    return low, above


@triton.jit
def before(counts):
    """Return the exclusive prefix sum of counts [THREADS, STRETCHES], stretch by stretch."""
    within = tl.cumsum(counts, 0) - counts
    stretch = tl.sum(counts, 0)
    return within + (tl.cumsum(stretch, 0) - stretch)[None]


@triton.jit
def named(place, inside, numbers, again, cells, window_rows, FOUND: tl.constexpr, LISTED: tl.constexpr):
    """Return the values to write for these places of a row; `inside` is the mask of valid places.

    A value is the entry: the place itself, or `numbers[place]` with FOUND where `again` is true. With LISTED it is the
    entry's cell plus the number of window rows.
    """
    entry = place
    if FOUND:
        entry = tl.where(again, tl.load(numbers + place, inside & again, other=0), place)
    name = entry.to(tl.int64)
    if LISTED:
        name = tl.load(cells + entry, inside, other=0) + window_rows
    return name


@triton.jit
def fill_row(
    out, window, start, first, count, k, LISTED: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store COLUMNS columns of a list from `start` on, except the `count` entries from column `first` on.

    window: the row's WINDOW columns, copied except at the k places of entries.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(COLUMNS)
    column = start + tl.arange(0, WIDE)
    inside = (column < start + COLUMNS) & (column < WINDOW + k)
    if LISTED:
        known = inside & (column < WINDOW) & ((column < first) | (column >= first + k))
        value = tl.load(window + column, known, other=-1)
    else:
        value = tl.full([WIDE], -1, tl.int64)
    tl.store(out + column, value, inside & ((column < first) | (column >= first + count)))


@triton.jit
def store_marked(
    marks, first, counts, scores, numbers, cells, out, out_scores, start, window_rows,
    FIRST: tl.constexpr, LAST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Store the first `counts` entries of each bit mask, from place `first` on.

    marks, first, counts: int32 [THREADS, STRETCHES]; bit j of a mask is the j-th of its eight entries.
    """
    THREADS: tl.constexpr = marks.shape[0]
    base = (tl.arange(0, marks.shape[1])[None] * THREADS + tl.arange(0, THREADS)[:, None]) * 8
    for i in range(tl.max(tl.max(counts, 0), 0)):
        lowest = marks & -marks
        # the exponent of a power of two
        place = base + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        inside = i < counts
        store_places(
            place, inside, first + i, scores, numbers, cells, out, out_scores, start, window_rows, FIRST, LAST, LISTED
        )
        marks = marks & (marks - 1)


@triton.jit
def store_places(
    place, inside, target, scores, numbers, cells, out, out_scores, start, window_rows,
    FIRST: tl.constexpr, LAST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Store the values of these places of a row, or of a chunk of it, at `target` of the result."""
    if LAST:
        name = named(place, inside, numbers, True, cells, window_rows, not FIRST, LISTED)
        tl.store(out + target, name, inside)
    else:
        number = place + start if FIRST else tl.load(numbers + place, inside, other=0)
        tl.store(out + target, number, inside)
        tl.store(out_scores + target, tl.load(scores + place, inside, other=0), inside)


@launched(do_not_specialize=["length", "k", "out_stride", "window_rows"])
def choose_largest(
    scores,  # int16 or int32 [T, length]
    visible,  # [T]
    numbers,  # [T, length], entry at each place; FIRST: the place itself
    table,  # LISTED: [B, .]
    sequence,  # [T]
    window_index,  # [T, WINDOW]
    window_columns,  # [T]
    table_stride,
    window_stride,
    window_rows,
    out,  # LAST: int64 [T, WINDOW + k]; otherwise entries [T, chunks, k]
    out_scores,  # LAST: unused; otherwise the scores of out, with out_visible [T] places in use
    out_visible,
    length,
    k,
    stride,
    numbers_stride,
    out_stride,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRETCHES: tl.constexpr,
    THREADS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    LEFT: tl.constexpr,  # rows with at most this many visible entries are left to another kernel
    OVERLAP: tl.constexpr,
):
    CHUNK: tl.constexpr = STRETCHES * THREADS * 8
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * CHUNK
    scores += row * stride + start
    numbers += row * numbers_stride + start
    out += row * out_stride + chunk * k
    out_scores += row * out_stride + chunk * k
    stretch, thread = tl.arange(0, STRETCHES)[None, :, None], tl.arange(0, THREADS)[:, None, None]
    one = tl.arange(0, 8)[None, None]
    place = (stretch * THREADS + thread) * 8 + one
    wait_for_inputs(OVERLAP)
    # load before the number of visible entries is known
    bits = tl.load(scores + place, place < tl.cdiv(length, ALIGNED) * ALIGNED - start, other=0)
    all_seen = tl.minimum(tl.load(visible + row), length).to(tl.int32)
    seen = tl.minimum(tl.maximum(all_seen - start, 0), CHUNK)
    if LEFT:
        seen = tl.where(all_seen <= LEFT, 0, seen)
    cells = table
    if LAST:
        first = 0
        if LISTED:
            first = tl.load(window_columns + row).to(tl.int32)
            cells += tl.load(sequence + row) * table_stride
        window = window_index + row * window_stride
        fill_row(out, window, 0, first, tl.minimum(seen, k), k, LISTED, WINDOW, WINDOW + K)
        out += first
    elif chunk == 0:
        full = all_seen // CHUNK
        tl.store(out_visible + row, (full * k + tl.minimum(all_seen - full * CHUNK, k)).to(tl.int64))
    if seen <= k:
        every = tl.arange(0, K)
        store_places(
            every, every < seen, every, scores, numbers, cells, out, out_scores, start, window_rows, FIRST, LAST, LISTED
        )
    else:
        keys = ordered(bits, place, seen)
        limit, above = threshold(keys, k, GROUPS, bits.dtype)
        # per eight entries, bits 0-7 mark those above the limit and bits 8-15 count them; bits 16-31: equal ones
        weight = (1 << one) + 256
        found = tl.sum(tl.where(keys > limit, weight, tl.where(keys == limit, weight << 16, 0)), 2)
        counts = (found >> 8) & 0x000F000F
        first_of = before(counts.to(tl.uint32))
        higher, second = (first_of & 0xFFFF).to(tl.int32), (first_of >> 16).to(tl.int32)
        taken = tl.minimum(counts >> 16, tl.maximum(k - above - second, 0))
        store_marked(
            found & 0xFF, higher, counts & 0xFFFF, scores, numbers, cells, out, out_scores, start, window_rows,
            FIRST, LAST, LISTED,
        )  # fmt: skip
        store_marked(
            (found >> 16) & 0xFF, above + second, taken, scores, numbers, cells, out, out_scores, start, window_rows,
            FIRST, LAST, LISTED,
        )  # fmt: skip
