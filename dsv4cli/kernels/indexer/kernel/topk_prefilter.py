"""Top-k of a row in Triton, prefiltered by its peaks: the largest score of each eight.

A score below the k-th largest peak is below k scores. One kernel keeps the others, some hundreds of scores, in any
order; a second kernel lists the best k of these by rank.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.indexer.kernel.topk_radix import before, count_from, fill_row, key_near, ordered, score_of
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# entries that a program ranks at once, and entries that it compares them with at once
MINE, OTHERS = tl.constexpr(8), tl.constexpr(1024)


@triton.jit
def bound(keys, count, k, dtype: tl.constexpr):
    """Return a lower limit that at least k keys reach, and not many more unless they are equal.

    keys: int32 [THREADS, STRETCHES, 8], from `ordered` with this 16-bit dtype; only the first `count`, which exceeds k,
    are valid.
    """
    most = k + tl.minimum(k // 2, (count - k) // 4)
    high = tl.max(tl.max(tl.max(keys, 2), 1), 0)
    mean = tl.sum(tl.sum(tl.sum(tl.where(keys > -0x8001, score_of(keys, dtype), 0.0), 2), 1), 0) / count
    low, found = tl.full([], -0x8000, tl.int32), count
    # about half of the peaks are above the mean; their number falls nearly exponentially with the score, more
    # slowly at first
    low_score, low_log = mean, tl.log2(0.5 * count)
    high_score, high_log = score_of(high, dtype), 0.0
    aim, step = tl.log2((k + most) * 0.5), 0
    while (low < high) & (found > most):
        way = (low_log - aim) / (low_log - high_log)
        way += tl.where(step == 0, 0.25 * (tl.sqrt(tl.maximum(way, 0.0)) - way), 0.0)
        guess = low_score + (high_score - low_score) * way
        near = tl.minimum(tl.maximum(key_near(guess, dtype), low + 1), high)
        # bisect for infinite scores, and as a last resort
        limit = tl.where((step < 6) & (tl.abs(guess) < 1e37), near, low + (high - low + 1) // 2)
        reached = count_from(keys, limit, dtype)
        log = tl.log2(tl.maximum(reached, 1).to(tl.float32))
        if reached < k:
            high, high_score, high_log = limit - 1, score_of(limit, dtype), log
        else:
            low, low_score, low_log, found = limit, score_of(limit, dtype), log, reached
        step += 1
    return low


@launched(do_not_specialize=["length", "k", "window_rows"])
def keep_high(
    scores,  # int16 [T, length]
    peaks,  # int16 [T, .], the largest of each eight scores with a visible one
    visible,  # [T]
    table,  # [B, .]
    sequence,  # [T]
    table_stride,
    window_rows,
    kept,  # int32 [T, ROOM]: the key in the upper 16 bits, 0xFFFF - entry in the lower
    cells,  # int64 [T, ROOM]: their cells plus the number of window rows
    counts,  # int32 [T], zeros
    length,
    k,
    stride,
    peak_stride,
    THREADS: tl.constexpr,
    STRETCHES: tl.constexpr,  # per thread, of eight peaks each
    WIDE: tl.constexpr,  # entries per program
    ROOM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    TILE: tl.constexpr = THREADS * STRETCHES * 8
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = part * WIDE + tl.arange(0, WIDE)
    stretch, thread = tl.arange(0, STRETCHES)[None, :, None], tl.arange(0, THREADS)[:, None, None]
    place = (stretch * THREADS + thread) * 8 + tl.arange(0, 8)[None, None]
    # these were not written by the scores' kernel, so they need not wait for it
    seen = tl.minimum(tl.load(visible + row, cache_modifier=".cg"), length).to(tl.int32)
    row_cells = table + tl.load(sequence + row, cache_modifier=".cg") * table_stride
    scores += row * stride
    wait_for_inputs(OVERLAP)
    if part * WIDE < seen:
        own = ordered(tl.load(scores + mine, mine < seen, other=0), mine, seen)
        low = tl.full([], -0x8000, tl.int32)
        if seen > OTHERS:
            # search all scores of a short row, but only TILE peaks of a long one: what k of these reach, k scores reach
            whole = seen <= TILE
            searched = tl.where(whole, scores, peaks + row * peak_stride)
            count = tl.minimum(tl.where(whole, seen, tl.cdiv(seen, 8)), TILE)
            bits = tl.load(searched + place, place < tl.cdiv(count, 8) * 8, other=0)
            if count > k:
                low = bound(ordered(bits, place, count), count, k, bits.dtype)
        high_enough = (own >= low) & (mine < seen)
        name = tl.load(row_cells + mine, high_enough, other=0) + window_rows
        flags = high_enough.to(tl.int32)
        target = tl.atomic_add(counts + row, tl.sum(flags, 0), sem="relaxed") + tl.cumsum(flags, 0) - flags
        inside = high_enough & (target < ROOM)
        tl.store(kept + row * ROOM + target, (own << 16) | (0xFFFF - mine), inside)
        tl.store(cells + row * ROOM + target, name, inside)


@launched(do_not_specialize=["length", "k", "window_rows"])
def list_kept(
    kept,  # int32 [T, ROOM], cells int64 [T, ROOM] and counts int32 [T], as `keep_high` leaves them
    cells,
    counts,
    scores,  # int16 [T, length]
    visible,  # [T]
    table,  # [B, .]
    sequence,  # [T]
    window_index,  # [T, WINDOW]
    window_columns,  # [T]
    table_stride,
    window_stride,
    window_rows,
    out,  # [T, WINDOW + k]
    length,
    k,
    stride,
    ROOM: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    COLUMNS: tl.constexpr = (WINDOW + K + PARTS - 1) // PARTS
    block, first_mine = tl.arange(0, OTHERS), part * MINE + tl.arange(0, MINE)
    # these were not written by `keep_high`, so they need not wait for it
    seen = tl.minimum(tl.load(visible + row, cache_modifier=".cg"), length).to(tl.int32)
    first = tl.load(window_columns + row, cache_modifier=".cg").to(tl.int32)
    kept += row * ROOM
    cells += row * ROOM
    out += row * (WINDOW + k)
    wait_for_inputs(OVERLAP)
    # load before the count is known; values past the count are ignored
    others = tl.load(kept + block)
    mine = tl.load(kept + first_mine)
    name = tl.load(cells + first_mine)
    count = tl.load(counts + row)
    window = window_index + row * window_stride
    fill_row(out, window, part * COLUMNS, first, tl.minimum(seen, k), k, True, WINDOW, COLUMNS)
    out += first
    if count <= ROOM:
        rank = _better(others, block, mine, count)
        for start in range(OTHERS, count, OTHERS):
            rank += _better(tl.load(kept + start + block), start + block, mine, count)
        tl.store(out + rank, name, (first_mine < count) & (rank < k))
        for start in range((part + PARTS) * MINE, count, PARTS * MINE):
            number = start + tl.arange(0, MINE)
            mine, name = tl.load(kept + number), tl.load(cells + number)
            rank = _better(others, block, mine, count)
            for other in range(OTHERS, count, OTHERS):
                rank += _better(tl.load(kept + other + block), other + block, mine, count)
            tl.store(out + rank, name, (number < count) & (rank < k))
    elif part == 0:
        row_cells = table + tl.load(sequence + row) * table_stride
        list_slowly(scores + row * stride, row_cells, out, seen, k, window_rows)


@triton.jit
def _better(others, place, mine, count):
    """Return how many of the first `count` others are better than each of mine."""
    return tl.sum(((others[None] > mine[:, None]) & (place < count)[None]).to(tl.int32), 1)


@triton.jit
def list_slowly(scores, cells, out, seen, k, window_rows):
    """List the best k of a row with too many equal scores, in one program, block by block."""
    one = (tl.arange(0, 128)[:, None] * 8 + tl.arange(0, 8)[None])[:, None]
    low, high, above = tl.full([], -0x8001, tl.int32), tl.full([], 0x7FFF, tl.int32), 0
    while low < high:
        limit = low + (high - low + 1) // 2
        count = 0
        for start in range(0, seen, 1024):
            keys = ordered(tl.load(scores + start + one, start + one < seen, other=0), start + one, seen)
            count += tl.sum(tl.sum(tl.sum((keys >= limit).to(tl.int32), 2), 1), 0)
        if count < k:
            high, above = limit - 1, count
        else:
            low = limit
    higher, equal = 0, 0
    for start in range(0, seen, 1024):
        place = start + one
        keys = ordered(tl.load(scores + place, place < seen, other=0), place, seen)
        counts = tl.where(keys > low, 1, tl.where(keys == low, 1 << 16, 0))
        number = tl.cumsum(counts, 2) - counts + before(tl.sum(counts, 2))[:, :, None]
        target = tl.where(keys > low, higher + (number & 0xFFFF), above + equal + (number >> 16))
        chosen = (keys >= low) & (target < k)
        tl.store(out + target, tl.load(cells + place, chosen, other=0) + window_rows, chosen)
        total = tl.sum(tl.sum(tl.sum(counts, 2), 1), 0)
        higher += total & 0xFFFF
        equal += total >> 16
