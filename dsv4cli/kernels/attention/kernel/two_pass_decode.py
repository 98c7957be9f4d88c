"""Attention of few tokens, spread over the GPU: one launch scores columns, the next multiplies the rows.

The first launch scores groups of columns and stores exponentials relative to each group's maximum. The second knows all
maxima and computes final results, of some heads and of a few dims of every row: it rescales the exponentials to the
maximum of the blocks so far, rounds them, and multiplies several groups in parallel, one per warp.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.attention.kernel.gather import FLOOR, LOG2E, rotated, row_pointers, turned
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

# columns between two updates of the maximum, as in the reference
BLOCK = tl.constexpr(64)
# longest list, and most tokens times groups of 16 heads, for which `tiles` returns tiles
LONGEST, MOST = 1536, 32
# most programs of the first launch, four per multiprocessor of an H200; with more groups, programs compute several
PROGRAMS = 528


@dataclass(frozen=True)
class TwoPassTiles:
    """Tile sizes and warps of the two launches.

    Attributes:
        heads: heads per program.
        columns: columns per group.
        score_warps: warps of the first launch.
        groups, dims, warps: groups at a time, dims per program, and warps of the second launch.
    """

    heads: int
    columns: int
    score_warps: int
    groups: int
    dims: int
    warps: int


def tiles(few: int, length: int) -> TwoPassTiles | None:
    """Return tiles, or None if other kernels are faster. few: tokens times groups of 16 heads.

    Measured on an H200 with rows of 512 bf16.
    """
    if length <= 128:
        return TwoPassTiles(16, 32, 4, 4, 16, 2) if few <= 8 else None
    if length <= 256:
        return TwoPassTiles(16, 32, 4, 8, 16 if few <= 4 else 32 if few <= 8 else 64, 4) if few <= 16 else None
    if few <= 8:
        return TwoPassTiles(16, 64, 4, 8, 16 if few <= 2 or (few <= 4 and length > 1024) else 32, 4)
    return TwoPassTiles(16, 64, 8, 4, 64, 4) if length <= 1024 else None


def attended(inputs, sink, turns, o, turned, shape, wide, tile: TwoPassTiles) -> None:
    """Compute attention into o [T, H, d], with at most `wide` dims.

    inputs: q, ..., scale; turns: [T, turned, 2] or None.
    """
    q, window, entries, index, q_stride, window_rows, length, scale = inputs
    tokens, heads, _ = o.shape
    groups, shared_heads = cdiv(length, tile.columns), cdiv(heads, tile.heads)
    shares = min(groups, max(PROGRAMS // (tokens * shared_heads), 1))
    kept = torch.empty(tokens, heads, groups * tile.columns, dtype=torch.float32, device=o.device)
    state = torch.empty(2, tokens, heads, groups, dtype=torch.float32, device=o.device)
    rows = (window, entries, index, window_rows, length, kept, state[0], state[1])
    shape = (*shape, tile.heads, tile.columns)
    _scores[(tokens * shares * shared_heads,)](
        q, *rows, q_stride, scale, groups, shares, *shape, max(wide // 4, 16), num_warps=tile.score_warps, **overlap(o)
    )
    dims = min(tile.dims, wide)
    _values[(tokens * shared_heads * (wide // dims),)](
        *rows, sink, turns, o, groups, turned, *shape, tile.groups, dims, wide // dims,
        cdiv(groups, tile.groups), num_warps=tile.warps, **overlap(o),
    )  # fmt: skip


@launched(do_not_specialize=["window_rows", "length", "groups", "shares"])
def _scores(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    window_rows,
    length,
    kept,  # [T, TOTAL, groups * COLUMNS]: exponentials relative to the maximum of the group
    maxima,  # [T, TOTAL, groups]
    sums,  # [T, TOTAL, groups]
    q_stride,
    scale,  # of scores as powers of two
    groups,
    shares,  # programs of a token and heads: one takes groups share, share + shares, ...
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,  # of the dims: their products do not wait for one another
    OVERLAP: tl.constexpr,
):
    SHARED: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    place = tl.program_id(0) // SHARED
    token, share = (place // shares).to(tl.int64), place % shares
    head = ((tl.program_id(0) % SHARED) * HEADS + tl.arange(0, HEADS))[:, None]
    step = tl.arange(0, COLUMNS)
    dim = tl.arange(0, QUARTER)[None]
    near = q + (token * TOTAL + head) * q_stride + dim
    listed = index + token * length
    wait_for_inputs(OVERLAP)
    query_0 = tl.load(near, (head < TOTAL) & (dim < WIDTH), other=0.0)
    query_1 = tl.load(near + QUARTER, (head < TOTAL) & (dim + QUARTER < WIDTH), other=0.0)
    query_2 = tl.load(near + 2 * QUARTER, (head < TOTAL) & (dim + 2 * QUARTER < WIDTH), other=0.0)
    query_3 = tl.load(near + 3 * QUARTER, (head < TOTAL) & (dim + 3 * QUARTER < WIDTH), other=0.0)
    for number in tl.range(0, tl.cdiv(groups - share, shares), num_stages=2):
        group = share + number * shares
        row = tl.full([COLUMNS], -1, tl.int32)
        if group < groups:
            row = tl.load(listed + group * COLUMNS + step, group * COLUMNS + step < length, other=-1).to(tl.int32)
        at = row_pointers(row, window, entries, window_rows, WINDOW_STRIDE, ENTRIES_STRIDE) + dim
        some = (row >= 0)[:, None]
        keys_0 = tl.load(at, some & (dim < WIDTH), other=0.0)
        keys_1 = tl.load(at + QUARTER, some & (dim + QUARTER < WIDTH), other=0.0)
        keys_2 = tl.load(at + 2 * QUARTER, some & (dim + 2 * QUARTER < WIDTH), other=0.0)
        keys_3 = tl.load(at + 3 * QUARTER, some & (dim + 3 * QUARTER < WIDTH), other=0.0)
        scores = tl.dot(query_0, tl.trans(keys_0), input_precision="ieee") * scale
        # with plain sums, the compiler would chain the four products
        scores = tl.fma(tl.dot(query_1, tl.trans(keys_1), input_precision="ieee"), scale, scores)
        scores = tl.fma(tl.dot(query_2, tl.trans(keys_2), input_precision="ieee"), scale, scores)
        scores = tl.fma(tl.dot(query_3, tl.trans(keys_3), input_precision="ieee"), scale, scores)
        scores = tl.where((row >= 0)[None], scores, float("-inf"))  # [HEADS, COLUMNS]
        high = tl.maximum(tl.max(scores, 1, keep_dims=True), FLOOR)
        exact = tl.exp2(scores - high)
        tl.store(kept + ((token * TOTAL + head) * groups + group) * COLUMNS + step[None], exact, head < TOTAL)
        to = (token * TOTAL + head) * groups + group
        tl.store(maxima + to, high, head < TOTAL)
        tl.store(sums + to, tl.sum(exact, 1, keep_dims=True), head < TOTAL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@launched(do_not_specialize=["window_rows", "length", "groups"])
def _values(
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    window_rows,
    length,
    kept,  # [T, TOTAL, groups * COLUMNS]: exponentials relative to the maximum of the group
    maxima,  # [T, TOTAL, groups]
    sums,  # [T, TOTAL, groups]
    sink,  # [TOTAL]
    turns,  # [T, TURNED, 2]: cosine, sine
    o,  # [T, TOTAL, WIDTH]
    groups,
    TURNED: tl.constexpr,
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # at a time
    DIMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TIMES: tl.constexpr,  # GROUPS of a list
    OVERLAP: tl.constexpr,
):
    SHARED: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    TYPE: tl.constexpr = o.dtype.element_ty
    first = (tl.program_id(0) % CHUNKS) * DIMS
    place = tl.program_id(0) // CHUNKS
    token = (place // SHARED).to(tl.int64)
    head = (place % SHARED) * HEADS + tl.arange(0, HEADS)
    dim = first + tl.arange(0, DIMS)[None, None]
    step = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None]  # [GROUPS, COLUMNS]
    listed = index + token * length
    logit = tl.load(sink + head, head < TOTAL, other=0.0).to(tl.float32) * LOG2E
    # data that `_scores` does not write can be loaded before it has finished, bypassing L1, which may be stale
    if TURNED > 0:
        cosine, sine = turned(turns, token, first, DIMS, TURNED, WIDTH)
    rows, values = (), ()
    for time in tl.static_range(TIMES):
        column = time * GROUPS * COLUMNS + step
        rows += (tl.load(listed + column, column < length, other=-1, cache_modifier=".cg").to(tl.int32),)
    for time in tl.static_range(TIMES):
        row = rows[time]
        at = row_pointers(row, window, entries, window_rows, WINDOW_STRIDE, ENTRIES_STRIDE)  # [GROUPS, COLUMNS, 1]
        some = tl.expand_dims(row >= 0, 2) & (dim < WIDTH)
        values += (tl.load(at + dim, some, other=0.0, cache_modifier=".cg"),)
    last = 0
    for time in tl.static_range(TIMES):
        last = tl.where(tl.max(tl.max(rows[time], 1), 0) >= 0, time + 1, last)
    wait_for_inputs(OVERLAP)
    maximum = tl.full([HEADS], FLOOR, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([GROUPS, HEADS, DIMS], tl.float32)
    exact = _kept(kept, token, head, 0, groups, GROUPS, TOTAL, COLUMNS)
    for time in tl.static_range(TIMES):
        coming = exact
        if time + 1 < TIMES:
            # load before this iteration's products
            coming = _kept(kept, token, head, (time + 1) * GROUPS, groups, GROUPS, TOTAL, COLUMNS)
        # a list that is read in a single iteration needs no check for its end
        if (TIMES == 1) or (time < last):
            maximum, total, result = _together(
                maximum, total, result, values[time], exact, maxima, sums, token, head, time * GROUPS, groups, TYPE,
                TOTAL,
            )  # fmt: skip
        exact = coming
    result = tl.sum(result, 0)  # [HEADS, DIMS]
    total += tl.exp2(logit - maximum)
    # the denominator is at least 1 if a row is listed
    result = (result * (1.0 / tl.maximum(total, 1.0))[:, None]).to(TYPE)
    if TURNED > 0:
        result = rotated(result, cosine, sine, first, TURNED, WIDTH)
    dim = first + tl.arange(0, DIMS)[None]
    tl.store(o + (token * TOTAL + head[:, None]) * WIDTH + dim, result, (head < TOTAL)[:, None] & (dim < WIDTH))


@triton.jit
def _kept(kept, token, head, first, groups, GROUPS: tl.constexpr, TOTAL: tl.constexpr, COLUMNS: tl.constexpr):
    """Load exponentials [GROUPS, HEADS, COLUMNS] of groups `first` on."""
    number = (first + tl.arange(0, GROUPS))[:, None, None]
    column = number * COLUMNS + tl.arange(0, COLUMNS)[None, None]
    place = kept + (token * TOTAL + head[None, :, None]) * (groups * COLUMNS) + column
    return tl.load(place, (head < TOTAL)[None, :, None] & (number < groups), other=0.0)


@triton.jit
def _together(
    before, total, result, values, exact, maxima, sums, token, head, first, groups,
    TYPE: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Add GROUPS groups to the maximum, the sum of probabilities [HEADS] and the sums of values [GROUPS, HEADS, DIMS].

    A value is multiplied by its probability, rounded relative to the maximum up to the end of its block.
    """
    GROUPS: tl.constexpr = values.shape[0]
    PIECES: tl.constexpr = BLOCK // exact.shape[2]
    owned = head < TOTAL
    number = first + tl.arange(0, GROUPS)  # [GROUPS]
    near = (token * TOTAL + head[:, None]) * groups
    inside = owned[:, None] & (number < groups)[None]
    high = tl.load(maxima + near + number[None], inside, other=FLOOR)  # [HEADS, GROUPS]
    of_block = high
    if PIECES > 1:
        for piece in tl.static_range(PIECES):
            other = number // PIECES * PIECES + piece
            other_high = tl.load(maxima + near + other[None], owned[:, None] & (other < groups)[None], other=FLOOR)
            of_block = tl.maximum(of_block, other_high)
    added = tl.load(sums + near + number[None], inside, other=0.0)
    so_far = tl.maximum(tl.associative_scan(of_block, 1, _larger), before[:, None])
    maximum = tl.max(so_far, 1)
    shrink, change = tl.exp2(so_far - maximum[:, None]), tl.exp2(high - so_far)
    less = tl.exp2(before - maximum)
    total = total * less + tl.sum(added * change * shrink, 1)
    chances = (exact * tl.permute(change, (1, 0))[:, :, None]).to(TYPE)  # [GROUPS, HEADS, COLUMNS]
    products = tl.dot(chances, values, input_precision="ieee")  # [GROUPS, HEADS, DIMS]
    result = result * less[None, :, None] + products * tl.permute(shrink, (1, 0))[:, :, None]
    return maximum, total, result
