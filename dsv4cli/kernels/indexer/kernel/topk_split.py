"""Top-k of a few rows in Triton: several programs read the same row, and each lists a part of it."""

import triton
import triton.language as tl

from dsv4cli.kernels.indexer.kernel.topk_radix import fill_row, named, ordered, threshold
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# entries that a program ranks at once, and entries that it compares them with at once
MINE, OTHERS = tl.constexpr(8), tl.constexpr(1024)


@triton.jit
def rank_keys(bits, place, seen):
    """Return distinct integers ordered like the scores; among equal scores the lower place is larger."""
    wide: tl.constexpr = tl.int32 if bits.dtype == tl.int16 else tl.int64
    keys = (ordered(bits, place, seen).to(wide) << 16) | (0xFFFF - place)
    return tl.where(place < seen, keys, -0x80000000 if bits.dtype == tl.int16 else -0x8000000000000000)


@triton.jit
def list_by_rank(
    scores, numbers, again, cells, out, seen, k, window_rows, part,
    FOUND: tl.constexpr, LISTED: tl.constexpr, ALIGNED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store each of the program's entries at its rank, the number of better entries."""
    end = tl.cdiv(seen, ALIGNED) * ALIGNED
    for start in range(part * MINE, seen, PARTS * MINE):
        mine = start + tl.arange(0, MINE)
        own = rank_keys(tl.load(scores + mine, mine < seen, other=0), mine, seen)
        name = named(mine, mine < seen, numbers, again, cells, window_rows, FOUND, LISTED)
        rank = tl.zeros([MINE], tl.int32)
        for block in range(0, seen, OTHERS):
            other = block + tl.arange(0, OTHERS)
            keys = rank_keys(tl.load(scores + other, other < end, other=0), other, seen)
            rank += tl.sum((keys[None] > own[:, None]).to(tl.int32), 1)
        tl.store(out + rank, name, (mine < seen) & (rank < k))


@triton.jit
def list_by_limit(
    keys, place, scores, numbers, again, cells, out, seen, k, window_rows, part,
    FOUND: tl.constexpr, LISTED: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the program's entries above the k-th largest key, and the first of those equal to it."""
    SIZE: tl.constexpr = keys.shape[0] * keys.shape[1] * 8 // PARTS
    mine = part * SIZE + tl.arange(0, SIZE)
    bits = tl.load(scores + mine, mine < seen, other=0)
    name = named(mine, mine < seen, numbers, again, cells, window_rows, FOUND, LISTED)
    limit, above = threshold(keys, k, GROUPS, bits.dtype)
    # lower 16 bits count keys above the limit, upper 16 bits keys equal to it
    counts = tl.where(keys > limit, 1, tl.where(keys == limit, 1 << 16, 0))
    before = tl.sum(tl.sum(tl.sum(tl.where(place < part * SIZE, counts, 0), 2), 1), 0)
    own = ordered(bits, mine, seen)
    counts = tl.where(own > limit, 1, tl.where(own == limit, 1 << 16, 0))
    before += tl.cumsum(counts, 0) - counts
    target = tl.where(own > limit, before & 0xFFFF, above + (before >> 16))
    tl.store(out + target, name, (mine < seen) & (own >= limit) & (target < k))


@launched(do_not_specialize=["length", "k", "window_rows"])
def choose_in_parts(
    scores,  # int16 or int32 [T, length]
    visible,  # [T]
    found_scores,  # FOUND: [T, .], result of `choose_largest` in rows with more visible entries than a tile
    found_visible,  # [T]
    found,  # [T, .]
    table,  # LISTED: [B, .]
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
    found_stride,
    FOUND: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRETCHES: tl.constexpr,
    THREADS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKED: tl.constexpr,  # the most visible entries for which entries are ranked
    SEARCHING: tl.constexpr,  # programs that list a row with more
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stretch, thread = tl.arange(0, STRETCHES)[None, :, None], tl.arange(0, THREADS)[:, None, None]
    place = (stretch * THREADS + thread) * 8 + tl.arange(0, 8)[None, None]
    wait_for_inputs(OVERLAP)
    seen = tl.minimum(tl.load(visible + row), length).to(tl.int32)
    scores += row * stride
    again, numbers, end = False, found, length
    if FOUND:
        again = seen > STRETCHES * THREADS * 8
        seen = tl.where(again, tl.load(found_visible + row).to(tl.int32), seen)
        scores = tl.where(again, found_scores + row * found_stride, scores)
        numbers += row * found_stride
        end = seen
    # load before the number of visible entries is known, except with FOUND
    end = tl.where(part < SEARCHING, end, 0)
    bits = tl.load(scores + place, place < tl.cdiv(end, ALIGNED) * ALIGNED, other=0)
    cells, first = found, 0
    if LISTED:
        cells = table + tl.load(sequence + row) * table_stride
        first = tl.load(window_columns + row).to(tl.int32)
    out += row * (WINDOW + k)
    COLUMNS: tl.constexpr = (WINDOW + K + PARTS - 1) // PARTS
    fill_row(
        out, window_index + row * window_stride, part * COLUMNS, first, tl.minimum(seen, k), k, LISTED, WINDOW, COLUMNS
    )
    out += first
    if seen <= k:
        EACH: tl.constexpr = K // PARTS if K > 16 * PARTS else 16
        for start in range(part * EACH, seen, PARTS * EACH):
            mine = start + tl.arange(0, EACH)
            name = named(mine, mine < seen, numbers, again, cells, window_rows, FOUND, LISTED)
            tl.store(out + mine, name, mine < seen)
    elif seen <= RANKED:
        list_by_rank(
            scores, numbers, again, cells, out, seen, k, window_rows, part, FOUND, LISTED, ALIGNED, PARTS
        )  # fmt: skip
    elif part < SEARCHING:
        keys = ordered(bits, place, seen)
        list_by_limit(
            keys, place, scores, numbers, again, cells, out, seen, k, window_rows, part,
            FOUND, LISTED, GROUPS, SEARCHING,
        )  # fmt: skip
