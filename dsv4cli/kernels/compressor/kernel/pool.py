"""What the kernels of the compressor share: a group's plan, the pooling of its members, the raw rows that are kept."""

import triton
import triton.language as tl


@triton.jit
def plan_of(groups, group):
    """The slot of a group's sequence; of its first member, of the step's first token and of that behind its last the
    position; the row of the first."""
    plan = groups + group * 5
    first, start, end = tl.load(plan + 1).to(tl.int32), tl.load(plan + 2).to(tl.int32), tl.load(plan + 3).to(tl.int32)
    return tl.load(plan), first, start, end, tl.load(plan + 4)


@triton.jit
def pooled_of(
    kv,  # the place of position 0, if it were in the step
    score,
    ape,
    ring_kv,  # [CAPACITY, CHANNELS] of the sequence
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
    """These columns of a group's entry, fp32 [columns]; ROWS members at once, with a running maximum."""
    kv += first.to(tl.int64) * KV_STRIDE
    score += first.to(tl.int64) * SCORE_STRIDE
    oldest = (first + CAPACITY) % CAPACITY
    top = tl.full(column.shape, float("-inf"), tl.float32)
    total = tl.zeros(column.shape, tl.float32)
    weighted = tl.zeros(column.shape, tl.float32)
    for block in range(0, MEMBERS, ROWS):
        member = block + tl.arange(0, ROWS)[:, None]
        known = (member < MEMBERS) & (column < WIDTH)[None]  # [ROWS, columns]
        # of the previous group's rows the first half, of its own the second
        channel = column[None] + tl.where(member < MEMBERS - RATIO, 0, CHANNELS - WIDTH)
        logits, values = score + member * SCORE_STRIDE + channel, kv + member * KV_STRIDE + channel
        fresh = known
        if not FRESH:
            # one load of either, from a place that is known to be aligned
            fresh = tl.broadcast_to(first + member >= start, known.shape)
            turn = tl.where(oldest + member < CAPACITY, oldest + member, oldest + member - CAPACITY)
            logits = tl.where(fresh, logits, ring_score + turn * CHANNELS + channel)
            values = tl.where(fresh, values, ring_kv + turn * CHANNELS + channel)
        logits = tl.load(logits, known, other=float("-inf"))
        values = tl.load(values, known, other=0.0)
        logits += tl.load(ape + member % RATIO * CHANNELS + channel, known & fresh, other=0.0)
        larger = tl.maximum(top, tl.max(logits, 0))
        # nothing but rows that were never written so far: no difference of infinities
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        chances = tl.exp(logits - shift[None])
        shrink = tl.exp(top - shift)
        total = total * shrink + tl.sum(chances, 0)
        weighted = weighted * shrink + tl.sum(chances * values, 0)
        top = larger
    return weighted / total


@triton.jit
def keep_rows(
    kv,  # these five as in pooled_of
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
    """Copies these channels of the last rows of a sequence into its rings, ROWS at once."""
    # every thread has read the rings
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
