"""Shared by the compressor's kernels: a group's plan, pooling of its members, and storing of raw rows."""

import triton
import triton.language as tl


@triton.jit
def plan_of(groups, group):
    """Load a group's plan: slot, position of its first member, the step's first and end positions, first row."""
    plan = groups + group * 5
    first, start, end = tl.load(plan + 1).to(tl.int32), tl.load(plan + 2).to(tl.int32), tl.load(plan + 3).to(tl.int32)
    return tl.load(plan), first, start, end, tl.load(plan + 4)


@triton.jit
def pooled_of(
    kv,  # pointer to the row of position 0, as if it were in the step
    score,
    ape,
    ring_kv,  # [CAPACITY, CHANNELS], the sequence's ring
    ring_score,
    first,
    start,
    column,  # int32 [columns]
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    FRESH: tl.constexpr,  # whether no member is in the rings
    ROWS: tl.constexpr,
):
    """Return these columns of a group's entry, fp32 [columns]; ROWS members at once, with a running maximum."""
    kv += first.to(tl.int64) * KV_STRIDE
    score += first.to(tl.int64) * SCORE_STRIDE
    oldest = (first + CAPACITY) % CAPACITY
    top = tl.full(column.shape, float("-inf"), tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    weighted = tl.zeros(column.shape, tl.float32)
    for block in range(0, MEMBERS, ROWS):
        member = block + tl.arange(0, ROWS)[:, None]
        known = (member < MEMBERS) & (column < WIDTH)[None]  # [ROWS, columns]
        # the first half of the previous group's rows, the second half of its own
        channel = column[None] + tl.where(member < MEMBERS - RATIO, 0, CHANNELS - WIDTH)
        logits, values = score + member * SCORE_STRIDE + channel, kv + member * KV_STRIDE + channel
        fresh = known
        if not FRESH:
            # select the pointer, so that there is one load, with known alignment
            fresh = tl.broadcast_to(first + member >= start, known.shape)
            turn = tl.where(oldest + member < CAPACITY, oldest + member, oldest + member - CAPACITY)
            logits = tl.where(fresh, logits, ring_score + turn * CHANNELS + channel)
            values = tl.where(fresh, values, ring_kv + turn * CHANNELS + channel)
        logits = tl.load(logits, known, other=float("-inf"))
        values = tl.load(values, known, other=0.0)
        logits += tl.load(ape + member % RATIO * CHANNELS + channel, known & fresh, other=0.0)
        larger = tl.maximum(top, tl.max(logits, 0))
        # avoid inf - inf while all rows so far were never written
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        chances = tl.exp(logits - shift[None])
        shrink = tl.exp(top - shift)
        total = total * shrink + tl.sum(chances, 0)
        weighted = weighted * shrink + tl.sum(chances * values, 0)
        top = larger
    return weighted / total


@triton.jit
def keep_rows(
    kv,  # this and the next four as in pooled_of
    score,
    ape,
    ring_kv,
    ring_score,
    start,
    end,
    channel,  # int32 [channels]
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy these channels of a sequence's last rows to its rings, ROWS at once."""
    # wait until every thread has read the rings
    tl.debug_barrier()
    for block in range(tl.maximum(start, end - CAPACITY), end, ROWS):
        position = block + tl.arange(0, ROWS)[:, None]
        known = (position < end) & (channel < CHANNELS)[None]
        row = position.to(tl.int64)
        logits = tl.load(score + row * SCORE_STRIDE + channel[None], known, other=0.0)
        values = tl.load(kv + row * KV_STRIDE + channel[None], known, other=0.0)
        logits += tl.load(ape + position % RATIO * CHANNELS + channel[None], known, other=0.0)
        place = position % CAPACITY * CHANNELS + channel[None]
        tl.store(ring_score + place, logits, known)
        tl.store(ring_kv + place, values, known)
