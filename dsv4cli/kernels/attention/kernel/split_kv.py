"""Attention with lists split into parts, for too few tokens to fill the GPU.

A first launch finds the maxima of scores, so that each part rounds probabilities relative to the same maximum as the
reference. A second launch computes the parts, and a third combines them.
"""

import torch
import triton.language as tl

from dsv4cli.kernels.attention.kernel.gather import FLOOR, LOG2E, attend_rows, queries, row_pointers, scored, unrotated
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

# fp32 partial results that a program combines: 64 per thread
BUDGET = 8192


def attended(inputs, sink, turns, o, turned, shape, parts, span, warps) -> None:
    """Compute attention into o [T, H, d].

    Args:
        inputs: the arguments that every kernel here takes, up to `scale`.
        turns: [T, turned, 2] or None.
        shape: the constants of every kernel, up to ROWS.
        span: columns of a part, a multiple of ROWS.
    """
    tokens, heads, width = o.shape
    groups, held, options = cdiv(heads, shape[-2]), shape[-1], overlap(o)
    # no other part needs the maxima of the last part
    blocks = (parts - 1) * span // held
    early = torch.empty(tokens, blocks, heads, dtype=torch.float32, device=o.device)
    _maxima[tokens * blocks * groups,](*inputs, early, blocks, *shape, num_warps=warps, **options)
    partial = torch.empty(tokens, parts, heads, width, dtype=torch.float32, device=o.device)
    state = torch.empty(2, tokens, parts, heads, dtype=torch.float32, device=o.device)
    _part[tokens * parts * groups,](
        *inputs, early, partial, state[0], state[1], parts, blocks, span, *shape, num_warps=warps, **options
    )
    at_once, columns = next_power_of_2(parts), max(next_power_of_2(width), 32)
    chunk = min(columns, BUDGET // at_once)
    _combine[(tokens * heads * (columns // chunk),)](
        partial, state[0], state[1], sink, turns, o, parts, turned, heads, width, at_once, chunk, columns // chunk,
        num_warps=4, **options,
    )  # fmt: skip


@launched(do_not_specialize=["window_rows", "length", "blocks"])
def _maxima(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    early,  # [T, blocks, TOTAL]
    blocks,  # of ROWS columns
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    place = (tl.program_id(0) // groups).to(tl.int64)  # of [T, blocks]
    token = place // blocks
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = (place % blocks).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    row = tl.load(index + token * length + listed, listed < length, other=-1).to(tl.int32)
    column, some = tl.arange(0, HALF)[None], (row >= 0)[:, None]
    near = row_pointers(row, window, entries, window_rows, WINDOW_STRIDE, ENTRIES_STRIDE) + column
    keys_left = tl.load(near, some & (column < WIDTH), other=0.0)
    keys_right = tl.load(near + HALF, some & (column + HALF < WIDTH), other=0.0)
    query_left, query_right = queries(q, token, head, q_stride, TOTAL, WIDTH, HALF)
    scores = scored(query_left, query_right, keys_left, keys_right, row, scale)
    tl.store(early + place * TOTAL + head, tl.maximum(tl.max(scores, 1, keep_dims=True), FLOOR), head < TOTAL)


@launched(do_not_specialize=["window_rows", "length", "parts", "blocks", "span"])
def _part(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    early,  # [T, blocks, TOTAL]: maxima of scores, each of ROWS columns
    partial,  # [T, parts, TOTAL, WIDTH]
    maxima,  # [T, parts, TOTAL]
    sums,  # [T, parts, TOTAL]
    parts,
    blocks,
    span,  # columns of a part, a multiple of ROWS
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    place = (tl.program_id(0) // groups).to(tl.int64)  # of [T, parts]
    token = place // parts
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = index + token * length
    first = (place % parts).to(tl.int32) * span
    end = tl.minimum(first + span, length)
    maximum, denominator, left, right = attend_rows(
        q, window, entries, listed, early + token * blocks * TOTAL, first // ROWS, token, head, first, end, q_stride,
        window_rows, scale, WINDOW_STRIDE, ENTRIES_STRIDE, TOTAL, WIDTH, ROWS, HALF, 512,
    )  # fmt: skip
    tl.store(maxima + place * TOTAL + head, maximum, head < TOTAL)
    tl.store(sums + place * TOTAL + head, denominator, head < TOTAL)
    column = tl.arange(0, HALF)[None]
    to = partial + (place * TOTAL + head) * WIDTH + column
    # partial results without any row are not read
    some = (head < TOTAL) & (maximum > FLOOR)
    tl.store(to, left, some & (column < WIDTH))
    tl.store(to + HALF, right, some & (column + HALF < WIDTH))


@launched(do_not_specialize=["parts"])
def _combine(
    partial,  # [T, parts, TOTAL, WIDTH]
    maxima,  # [T, parts, TOTAL]
    sums,  # [T, parts, TOTAL]
    sink,  # [TOTAL]
    turns,  # [T, TURNED, 2]: cosine, sine
    o,  # [T, TOTAL, WIDTH]
    parts,
    TURNED: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,  # parts or more
    COLUMNS: tl.constexpr,  # of a program
    CHUNKS: tl.constexpr,  # programs of a head
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) // CHUNKS
    token, head = (row // TOTAL).to(tl.int64), row % TOTAL
    first = tl.program_id(0) % CHUNKS * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None]
    part = tl.arange(0, PARTS)[:, None]
    place = (token * parts + part) * TOTAL + head
    high = tl.load(maxima + place, part < parts, other=FLOOR)  # [PARTS, 1]
    total = tl.load(sums + place, part < parts, other=0.0)
    values = tl.load(partial + place * WIDTH + column, (part < parts) & (column < WIDTH), other=0.0)  # [PARTS, COLUMNS]
    logit = tl.load(sink + head).to(tl.float32) * LOG2E
    maximum = tl.max(high, 0, keep_dims=True)
    weight = tl.exp2(high - maximum)
    denominator = tl.sum(total * weight, 0, keep_dims=True) + tl.exp2(logit - maximum)
    weighted = tl.sum(tl.where(high > FLOOR, values * weight, 0.0), 0, keep_dims=True)
    # the denominator is at least 1 if a row is listed
    result = (weighted * (1.0 / tl.maximum(denominator, 1.0))).to(o.dtype.element_ty)
    if TURNED > 0:
        result = unrotated(result, turns, token, first, TURNED, WIDTH)
    tl.store(o + (token * TOTAL + head) * WIDTH + column, result, column < WIDTH)
