"""Shared parts of the attention kernels: reading a part of a list, and the inverse rotation."""

import math

import triton
import triton.language as tl

# initial maximum, below every score
FLOOR = tl.constexpr(-1e30)
# maxima of blocks that are loaded at a time
AT_ONCE = tl.constexpr(32)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def attend_rows(
    q, window, entries, listed, maxima, before, token, head, first, end, q_stride, window_rows, scale,
    WINDOW_STRIDE: tl.constexpr, ENTRIES_STRIDE: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend over columns [first, end) of a list, in blocks of ROWS.

    Rows are multiplied by rounded probabilities, relative to the maximum so far. maxima: [before, TOTAL], of the scores
    of earlier columns. Returns the maximum of these and of the scores [HEADS, 1], in powers of two; the sum of
    probabilities relative to it [HEADS, 1]; and the weighted sum of the rows, left and right half [HEADS, HALF].
    """
    HEADS: tl.constexpr = head.shape[0]
    TYPE: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, HALF)[None]
    inside, inside_right = column < WIDTH, column + HALF < WIDTH
    # find the end of the list; this also brings the list into L1, which queries and rows bypass
    last = first
    for start in tl.range(first, end, AHEAD, num_stages=1):
        ahead = start + tl.arange(0, AHEAD)
        named = tl.load(listed + ahead, ahead < end, other=-1) >= 0
        last = tl.maximum(last, tl.max(tl.where(named, ahead + 1, first), 0))
    query_left, query_right = queries(q, token, head, q_stride, TOTAL, WIDTH, HALF)
    # after the queries, not before, so that 64 heads have enough registers
    maximum = greatest(maxima, before, head, TOTAL)
    sums = tl.full([HEADS, ROWS], 0.0, tl.float32)
    left = tl.full([HEADS, HALF], 0.0, tl.float32)
    right = tl.full([HEADS, HALF], 0.0, tl.float32)
    step = tl.arange(0, ROWS)
    for start in tl.range(first, last, ROWS, num_stages=2):
        # these conditions are always true and only steer Triton's compiler: a load after one is not copied to shared
        # memory; a product after one is not recognized as feeding the other, so it is distributed over all warps; and
        # products after one come after the copies of the next rows have started
        row = tl.full([ROWS], -1, tl.int32)
        if start < last:
            row = tl.load(listed + start + step, start + step < last, other=-1).to(tl.int32)
        place = row_pointers(row, window, entries, window_rows, WINDOW_STRIDE, ENTRIES_STRIDE) + column
        some = (row >= 0)[:, None]
        keys_left = tl.load(place, some & inside, other=0.0)  # [ROWS, HALF]
        keys_right = tl.load(place + HALF, some & inside_right, other=0.0)
        if start < last:
            chances = tl.zeros([HEADS, ROWS], TYPE)
            larger = maximum
            if first < last:
                scores = scored(query_left, query_right, keys_left, keys_right, row, scale)
                larger = tl.maximum(maximum, tl.max(scores, 1, keep_dims=True))
                exact = tl.exp2(scores - larger)
                sums = sums * tl.exp2(maximum - larger) + exact
                chances = exact.to(TYPE)
            shrink = tl.exp2(maximum - larger)
            left = tl.dot(chances, keys_left, left * shrink, input_precision="ieee")
            right = tl.dot(chances, keys_right, right * shrink, input_precision="ieee")
            maximum = larger
    return maximum, tl.sum(sums, 1, keep_dims=True), left, right


@triton.jit
def greatest(maxima, count, head, TOTAL: tl.constexpr):
    """Return the maximum [HEADS, 1] of maxima [count, TOTAL]."""
    maximum = tl.full([head.shape[0], 1], FLOOR, tl.float32)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        place = start + tl.arange(0, AT_ONCE)[None]
        high = tl.load(maxima + place * TOTAL + head, (place < count) & (head < TOTAL), other=FLOOR)
        maximum = tl.maximum(maximum, tl.max(high, 1, keep_dims=True))
    return maximum


@triton.jit
def queries(q, token, head, q_stride, TOTAL: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Load the left and right half [HEADS, HALF] of a token's heads."""
    column = tl.arange(0, HALF)[None]
    near = q + (token * TOTAL + head) * q_stride + column
    left = tl.load(near, (head < TOTAL) & (column < WIDTH), other=0.0, cache_modifier=".cg")
    right = tl.load(near + HALF, (head < TOTAL) & (column + HALF < WIDTH), other=0.0, cache_modifier=".cg")
    return left, right


@triton.jit
def row_pointers(row, window, entries, window_rows, WINDOW_STRIDE: tl.constexpr, ENTRIES_STRIDE: tl.constexpr):
    """Return pointers to the listed rows: [ROWS, 1], or with one more leading dim."""
    entry = row - window_rows
    place = tl.where(
        entry < 0, window + row.to(tl.int64) * WINDOW_STRIDE, entries + entry.to(tl.int64) * ENTRIES_STRIDE
    )
    return tl.expand_dims(place, len(place.shape))


@triton.jit
def scored(query_left, query_right, keys_left, keys_right, row, scale):
    """Return scores [HEADS, ROWS] in powers of two; -inf if the list has no row there."""
    scores = tl.dot(query_left, tl.trans(keys_left), input_precision="ieee") * scale
    # with a plain sum, the compiler would chain the two products
    scores = tl.fma(tl.dot(query_right, tl.trans(keys_right), input_precision="ieee"), scale, scores)
    return tl.where((row >= 0)[None], scores, float("-inf"))


@triton.jit
def unrotated(values, turns, token, first, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate the last TURNED pairs of heads by the conjugate of turns.

    values: [N, M], rounded, columns `first` on of heads.
    """
    cosine, sine = turned(turns, token, first, values.shape[1], TURNED, WIDTH)
    return rotated(values, cosine, sine, first, TURNED, WIDTH)


@triton.jit
def turned(turns, token, first, COLUMNS: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """Return cosine and sine [COLUMNS // 2] for columns `first` on of heads; 1 and 0 for columns without rotation."""
    # one-dimensional, so that cosine and sine move between threads instead of all values
    pair = first // 2 + tl.arange(0, COLUMNS // 2) - (WIDTH // 2 - TURNED)
    some = (pair >= 0) & (pair < TURNED)
    turn = turns + token * (2 * TURNED) + pair * 2
    # bypass L1, which may be stale: programs of `two_pass_decode` load before the previous launch has finished
    cosine = tl.load(turn, some, other=1.0, cache_modifier=".cg")
    return cosine, tl.load(turn + 1, some, other=0.0, cache_modifier=".cg")


@triton.jit
def rotated(values, cosine, sine, first, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """Return values [N, M] with pairs rotated by the conjugate of the turns [M // 2]."""
    PAIRS: tl.constexpr = values.shape[1] // 2
    pair = first // 2 + tl.arange(0, PAIRS) - (WIDTH // 2 - TURNED)
    some, cosine, sine = ((pair >= 0) & (pair < TURNED))[None], cosine[None], sine[None]
    real, imaginary = tl.split(tl.reshape(values, [values.shape[0], PAIRS, 2]))
    real, imaginary = real.to(tl.float32), imaginary.to(tl.float32)
    # selected instead of multiplied by one, so that values that are not rotated keep signed zeros and infinities
    turned_real = tl.where(some, real * cosine + imaginary * sine, real)
    turned_imaginary = tl.where(some, imaginary * cosine - real * sine, imaginary)
    return tl.interleave(turned_real.to(values.dtype), turned_imaginary.to(values.dtype))
