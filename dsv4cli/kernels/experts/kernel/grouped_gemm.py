"""Grouped matrix products of the experts (weights in rows, tokens in columns), the gate, and the sum over experts."""

import triton
import triton.language as tl

from dsv4cli.kernels.experts.kernel.grouped_operands import natural, ordered, tile, undivided
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs


@triton.jit
def _columns(x, place, step):
    """Load columns step * 128 to step * 128 + 127 of the rows of x at offsets `place`: [128, rows]."""
    return tl.load(x + place[None] + (step * 128 + tl.arange(0, 128)[:, None]))


@triton.jit
def _dot(weights, columns, sums):
    if columns.dtype == tl.float32 or weights.dtype == tl.float32:
        sums = tl.dot(weights.to(tl.float32), columns.to(tl.float32), sums, input_precision="ieee")
    else:
        sums = tl.dot(weights, columns, sums)
    return sums


@triton.jit
def _added(sums, weights, columns, scale, expert, begin, step, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """Add a step's products to the sums.

    fp32 scales of FP8 multiply the products, because codes times these scales are not exact in bf16.
    """
    if FORMAT == "fp8_f32":
        factor = tl.load(scale + (expert * ((N + 127) // 128) + begin // 128) * ((K + 127) // 128) + step)
        sums += _dot(weights, columns, tl.zeros(sums.shape, tl.float32)) * factor
    else:
        sums = _dot(weights, columns, sums)
    return sums


@triton.jit
def products(
    x,
    place,  # [COLUMNS] offsets of rows of x
    place_more,  # [MORE] of further ones; unused if MORE is 0
    first,
    first_scale,
    second,  # a matrix like first, if BOTH
    second_scale,
    expert,
    begin,  # the first row of the matrices
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows of `first` and, if BOTH, of `second` by rows of x.

    Returns fp32 [ROWS, COLUMNS] of each, then [ROWS, MORE] of each.
    """
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    more_one = tl.zeros([ROWS, MORE if MORE else 16], tl.float32)
    more_two = tl.zeros([ROWS, MORE if MORE else 16], tl.float32)
    for step in tl.range(0, (K + 127) // 128, num_stages=STAGES):
        columns = _columns(x, place, step)
        weights = tile(first, first_scale, expert, begin, step, N, K, FORMAT, DESCRIBED, ROWS, WARPS)
        one = _added(one, weights, columns, first_scale, expert, begin, step, N, K, FORMAT)
        if MORE:
            further = _columns(x, place_more, step)
            more_one = _added(more_one, weights, further, first_scale, expert, begin, step, N, K, FORMAT)
        if BOTH:
            weights = tile(second, second_scale, expert, begin, step, N, K, FORMAT, DESCRIBED, ROWS, WARPS)
            two = _added(two, weights, columns, second_scale, expert, begin, step, N, K, FORMAT)
            if MORE:
                more_two = _added(more_two, weights, further, second_scale, expert, begin, step, N, K, FORMAT)
    return one, two, more_one, more_two


@triton.jit
def gated_values(gate, up, limit):
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit), fp32. limit 0 clamps nothing."""
    if limit > 0:  # tl.where keeps NaN; minimum and maximum do not
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _store_inner(
    gate, up, inner, routing, order, start, rows, begin, limit, N: tl.constexpr, PADDED: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Store pairs start to start + rows - 1, rows begin to begin + ROWS - 1 of the gated product."""
    dtype: tl.constexpr = inner.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    column, row = tl.arange(0, COLUMNS), begin + tl.arange(0, ROWS)
    inside = column < rows
    factor = tl.load(routing + tl.load(order + start + column, inside, other=0), inside, other=0.0)
    values = (gated_values(gate, up, limit) * factor[None]).to(dtype)
    if FORMAT == "fp4":
        values = natural(values, ROWS, COLUMNS, WARPS)
    if PADDED != N:
        values = tl.where((row < N)[:, None], values, tl.zeros([1, 1], dtype))
    if FORMAT == "fp4":
        values = ordered(values, ROWS, COLUMNS)
        run: tl.constexpr = min(ROWS // 16, 8)
        number = tl.arange(0, ROWS)
        row = begin // 128 * 128 + number // run * 8 + begin % 128 // 16 + number % run
    place = (start + column).to(tl.int64)[None] * PADDED + row[:, None]
    tl.store(inner + place, values, inside[None] & (row < PADDED)[:, None])


@triton.jit
def _gate_up(
    x, order, start, rows, routing, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, inner, limit, expert,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PER_TOKEN: tl.constexpr,
    FORMAT: tl.constexpr, DESCRIBED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MORE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    # columns beyond the tile repeat its last one
    column = tl.minimum(tl.arange(0, COLUMNS), rows - 1)
    further = tl.minimum(COLUMNS + tl.arange(0, MORE if MORE else 16), rows - 1)
    place = (tl.load(order + start + column) // PER_TOKEN).to(tl.int64) * WIDTH
    place_more = (tl.load(order + start + further) // PER_TOKEN).to(tl.int64) * WIDTH
    gate, up, more_gate, more_up = products(
        x, place, place_more, w1, w1_scale, w3, w3_scale, expert, begin, N, K, FORMAT, DESCRIBED, True, ROWS, COLUMNS,
        MORE, WARPS, STAGES,
    )  # fmt: skip
    gate, up = undivided(gate, w1_scale_2, expert, FORMAT), undivided(up, w3_scale_2, expert, FORMAT)
    _store_inner(gate, up, inner, routing, order, start, rows, begin, limit, N, PADDED, FORMAT, ROWS, COLUMNS, WARPS)
    if MORE:
        more_gate = undivided(more_gate, w1_scale_2, expert, FORMAT)
        more_up = undivided(more_up, w3_scale_2, expert, FORMAT)
        _store_inner(
            more_gate, more_up, inner, routing, order, start + COLUMNS, rows - COLUMNS, begin, limit, N, PADDED, FORMAT,
            ROWS, MORE, WARPS,
        )  # fmt: skip


@launched
def gate_up(
    x,  # [T, WIDTH]
    order,  # pairs by expert, and the tiles of them: sorting.py
    tile_expert,
    tile_start,
    tile_rows,
    routing,  # fp32 [T, PER_TOKEN]
    w1,  # [E, N, K]
    w1_scale,
    w3,
    w3_scale,
    w1_scale_2,  # fp32 [E] of NVFP4, or None
    w3_scale_2,
    inner,  # [P, PADDED] in the order of pairs, for e2m1 columns reordered
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    FORMAT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute inner = routing weight * gated(w1 x, w3 x) for one tile of pairs and ROWS rows of both matrices."""
    number = tl.program_id(1)
    rows = tl.load(tile_rows + number)
    if rows == 0:
        return
    expert, start = tl.load(tile_expert + number), tl.load(tile_start + number)
    # time is proportional to columns: partly filled tiles compute only half or three quarters of them
    if COLUMNS >= 64 and rows <= COLUMNS // 2:
        _gate_up(
            x, order, start, rows, routing, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, inner, limit, expert, N,
            K, WIDTH, PADDED, PER_TOKEN, FORMAT, DESCRIBED, ROWS, COLUMNS // 2, 0, WARPS, STAGES,
        )  # fmt: skip
    elif COLUMNS >= 64 and rows <= COLUMNS // 4 * 3:
        _gate_up(
            x, order, start, rows, routing, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, inner, limit, expert, N,
            K, WIDTH, PADDED, PER_TOKEN, FORMAT, DESCRIBED, ROWS, COLUMNS // 2, COLUMNS // 4, WARPS, STAGES,
        )  # fmt: skip
    else:
        _gate_up(
            x, order, start, rows, routing, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, inner, limit, expert, N,
            K, WIDTH, PADDED, PER_TOKEN, FORMAT, DESCRIBED, ROWS, COLUMNS, 0, WARPS, STAGES,
        )  # fmt: skip


@triton.jit
def _store_outputs(
    values, outputs, order, start, rows, begin, N: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    values = values.to(outputs.dtype.element_ty)
    if FORMAT == "fp4":
        values = natural(values, ROWS, COLUMNS, WARPS)
    column, row = tl.arange(0, COLUMNS), begin + tl.arange(0, ROWS)
    pair = tl.load(order + start + column, column < rows, other=0).to(tl.int64)
    tl.store(outputs + (pair[None] * N + row[:, None]), values, (column < rows)[None] & (row < N)[:, None])


@triton.jit
def _down(
    inner, order, start, rows, w2, w2_scale, w2_scale_2, outputs, expert,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MORE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    place = (start + tl.minimum(tl.arange(0, COLUMNS), rows - 1)).to(tl.int64) * PADDED
    further = tl.minimum(COLUMNS + tl.arange(0, MORE if MORE else 16), rows - 1)
    sums, _, more, _ = products(
        inner, place, (start + further).to(tl.int64) * PADDED, w2, w2_scale, w2, w2_scale, expert, begin, N, K, FORMAT,
        DESCRIBED, False, ROWS, COLUMNS, MORE, WARPS, STAGES,
    )  # fmt: skip
    sums = undivided(sums, w2_scale_2, expert, FORMAT)
    _store_outputs(sums, outputs, order, start, rows, begin, N, FORMAT, ROWS, COLUMNS, WARPS)
    if MORE:
        more = undivided(more, w2_scale_2, expert, FORMAT)
        _store_outputs(more, outputs, order, start + COLUMNS, rows - COLUMNS, begin, N, FORMAT, ROWS, MORE, WARPS)


@launched
def down(
    inner,  # [P, PADDED]
    order,
    tile_expert,
    tile_start,
    tile_rows,
    w2,  # [E, N, K]
    w2_scale,
    w2_scale_2,  # fp32 [E] of NVFP4, or None
    outputs,  # [P, N], by pair
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute outputs = w2 inner for one tile of pairs and ROWS rows of w2."""
    number = tl.program_id(1)
    rows = tl.load(tile_rows + number)
    if rows == 0:
        return
    expert, start = tl.load(tile_expert + number), tl.load(tile_start + number)
    if COLUMNS >= 64 and rows <= COLUMNS // 2:
        _down(
            inner, order, start, rows, w2, w2_scale, w2_scale_2, outputs, expert, N, K, PADDED, FORMAT, DESCRIBED, ROWS,
            COLUMNS // 2, 0, WARPS, STAGES,
        )  # fmt: skip
    elif COLUMNS >= 64 and rows <= COLUMNS // 4 * 3:
        _down(
            inner, order, start, rows, w2, w2_scale, w2_scale_2, outputs, expert, N, K, PADDED, FORMAT, DESCRIBED, ROWS,
            COLUMNS // 2, COLUMNS // 4, WARPS, STAGES,
        )  # fmt: skip
    else:
        _down(
            inner, order, start, rows, w2, w2_scale, w2_scale_2, outputs, expert, N, K, PADDED, FORMAT, DESCRIBED, ROWS,
            COLUMNS, 0, WARPS, STAGES,
        )  # fmt: skip


@launched
def add(
    outputs,  # [T * PER_TOKEN, N]
    experts,  # int64 [T, PER_TOKEN]
    shared,  # [T, N], added last; or None
    total,  # [T, N]
    N: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum a token's outputs in ascending order of experts; equal experts in order of places."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    # written before the previous launch
    expert = tl.load(
        experts + token * PER_TOKEN + place, place < PER_TOKEN, other=0x7FFFFFFF, cache_modifier=".cg"
    ).to(tl.int32)  # fmt: skip
    before = (expert[None] < expert[:, None]) | ((expert[None] == expert[:, None]) & (place[None] < place[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    sums = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(OVERLAP)
    for number in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + tl.sum(tl.where(rank == number, place, 0), 0)
        part = tl.load(outputs + pair * N + column, column < N, other=0.0).to(tl.float32)
        sums = part if number == 0 else sums + part
    if shared is not None:
        sums += tl.load(shared + token * N + column, column < N, other=0.0).to(tl.float32)
    tl.store(total + token * N + column, sums.to(total.dtype.element_ty), column < N)
