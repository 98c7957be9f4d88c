"""Hyper-connections of few tokens in one launch: some programs project, and others wait for their sums."""

import triton
import triton.language as tl

from dsv4cli.kernels.cross_program import leave, take
from dsv4cli.kernels.hyper_connections.kernel.combine import collapsed, load_scales, logits_of, store_weights
from dsv4cli.kernels.hyper_connections.kernel.project import (
    as_parts,
    load_shares,
    load_sources,
    load_weights,
    mix,
    project,
)
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# most tokens of the single launch: one tile of tensor cores
FEW = 16
_FEW = tl.constexpr(FEW)


@triton.jit
def _stream_of_one(
    x, streams, post, comb, token, k, column, inside, x_stride, token_stride, stream_stride,
    N: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Return stream k of a token at columns [1, BLOCK]; with MIX, after the sublayer's output x."""
    if MIX:
        added = tl.load(x + token * x_stride + column, inside, other=0.0).to(tl.float32)
        values = tl.load(post + token * N + k) * added
        for j in tl.static_range(N):
            source = tl.load(streams + token * token_stride + j * stream_stride + column, inside, other=0.0)
            share = tl.full(values.shape, 1.0, tl.float32) * tl.load(comb + (token * N + j) * N + k)
            values = tl.fma(share, source.to(tl.float32), values)  # as `mix`
        values = values.to(streams.dtype.element_ty)
    else:
        values = tl.load(streams + token * token_stride + k * stream_stride + column, inside, other=0.0)
    return values


@triton.jit
def _of_one(
    program, x, streams, post, comb, fn, mixed, x_stride, token_stride, stream_stride,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, MIX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Project BLOCK columns of one stream of one token, so that as many programs as possible read the weights."""
    token, k = program // SPLITS, program % N
    row, column = tl.arange(0, SLOTS)[:, None], program % SPLITS // N * BLOCK + tl.arange(0, BLOCK)[None]
    inside = column < WIDTH
    factors = tl.load(fn + row * (N * WIDTH) + k * WIDTH + column, (row < ROWS) & inside, other=0.0)
    wait_for_inputs(OVERLAP)
    values = _stream_of_one(
        x, streams, post, comb, token, k, column, inside, x_stride, token_stride, stream_stride, N, MIX
    )
    if MIX:
        tl.store(mixed + (token * N + k) * WIDTH + column, values, inside)
    wide = values.to(tl.float32)
    sums = tl.sum(tl.where(row == ROWS, wide, factors) * wide, 1)[None]  # the last row: the squares
    return token + tl.arange(0, 1)[:, None], sums


@triton.jit
def _of_few(
    split, x, streams, post, comb, fn, mixed, count, x_stride, token_stride, stream_stride,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, MIX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Project BLOCK columns of all streams of all tokens."""
    token, column = tl.arange(0, TOKENS)[:, None], split * BLOCK + tl.arange(0, BLOCK)[None]
    inside = (token < count) & (column < WIDTH)
    weights = load_weights(fn, column, N, WIDTH, ROWS, SLOTS, 1)
    wait_for_inputs(OVERLAP)
    sources, added = load_sources(x, streams, token, column, inside, x_stride, token_stride, stream_stride, N, MIX)
    if MIX:
        posts, combs = load_shares(post, comb, token, count, N)
        sources = mix(sources, added, posts, combs, N)
        for k in tl.static_range(N):
            tl.store(mixed + (token * N + k) * WIDTH + column, sources[k], inside)
    M: tl.constexpr = 4 * SLOTS if streams.dtype.element_ty == tl.bfloat16 else SLOTS
    sums, squares = tl.zeros([M, TOKENS], tl.float32), tl.zeros([TOKENS, BLOCK], tl.float32)
    sums, squares = project(weights, sources, sums, squares, N)
    return token, as_parts(sums, squares, ROWS, SLOTS)


@triton.jit
def _taken(parts, SLOTS: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr):
    """Wait for the parts of one token and return their sums: [1, SLOTS]."""
    split = tl.arange(0, PARTS)[:, None]
    return tl.sum(take(parts + split * SLOTS + tl.arange(0, SLOTS)[None], split < SPLITS), 0)[None]


@triton.jit
def _weigh(
    token, parts, scale, base, post, comb, count, hc_eps, norm_eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute and store post and comb of one token."""
    scales = load_scales(scale, base, N, N, ROWS)
    wait_for_inputs(OVERLAP)
    logits = logits_of(_taken(parts, SLOTS, SPLITS, PARTS), scales, norm_eps, N, WIDTH, ROWS, N)
    store_weights(logits, token + tl.arange(0, 1)[:, None], post, comb, count, hc_eps, ITERATIONS, N)


@triton.jit
def _collapse(
    token, x, streams, post, comb, parts, scale, base, weight, y, count,
    x_stride, token_stride, stream_stride, hc_eps, norm_eps,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, MIX: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Collapse one token's streams, mixed again here, apply the norm if NORM, and store the result."""
    token, column = token + tl.arange(0, 1)[:, None], tl.arange(0, COLUMNS)[None]
    inside, scales = column < WIDTH, load_scales(scale, base, N, 0, N)
    factor = tl.load(weight + column, inside, other=0.0).to(tl.float32) if NORM else 1.0
    wait_for_inputs(OVERLAP)
    values, added = load_sources(x, streams, token, column, inside, x_stride, token_stride, stream_stride, N, MIX)
    if MIX:
        posts, combs = load_shares(post, comb, token, count, N)
        values = mix(values, added, posts, combs, N)
    logits = logits_of(_taken(parts, SLOTS, SPLITS, PARTS), scales, norm_eps, N, WIDTH, ROWS, 0)
    tl.store(y + token * WIDTH + column, collapsed(values, logits, factor, hc_eps, norm_eps, N, WIDTH, NORM), inside)


@launched(do_not_specialize=["count"])
def fused_connect(
    x,  # [count, WIDTH]
    streams,  # [count, N, WIDTH]
    post,  # [count, N]
    comb,  # [count, N, N]: source, target
    fn,  # [ROWS, N * WIDTH]
    scale,  # [3], or [1] where only pre is wanted
    base,  # [ROWS]
    weight,  # [WIDTH]
    mixed,  # as streams, contiguous
    y,  # [count, WIDTH]
    next_post,  # [count, N]
    next_comb,  # [count, N, N]
    parts,  # int32 [2, FEW, SPLITS, SLOTS], zeros: for weights, for the collapsed streams
    count,
    x_stride,
    token_stride,
    stream_stride,
    hc_eps,
    norm_eps,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # SPLITS, rounded up
    TOKENS: tl.constexpr,  # of a program that projects; 0: one and one stream
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up
    MIX: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    taker = program - (SPLITS * count if TOKENS == 0 else SPLITS)
    weighers = count if ITERATIONS > 0 else 0
    PLACES: tl.constexpr = SPLITS * SLOTS
    if taker < 0:
        if TOKENS == 0:
            token, sums = _of_one(
                program, x, streams, post, comb, fn, mixed, x_stride, token_stride, stream_stride,
                N, WIDTH, ROWS, SLOTS, SPLITS, BLOCK, MIX, OVERLAP,
            )  # fmt: skip
        else:
            token, sums = _of_few(
                program, x, streams, post, comb, fn, mixed, count, x_stride, token_stride, stream_stride,
                N, WIDTH, ROWS, SLOTS, TOKENS, BLOCK, MIX, OVERLAP,
            )  # fmt: skip
        place = parts + token * PLACES + program % SPLITS * SLOTS + tl.arange(0, SLOTS)[None]
        if ITERATIONS > 0:
            leave(place, sums, token < count)
        leave(place + _FEW * PLACES, sums, token < count)
    elif taker >= weighers:
        token = taker - weighers
        _collapse(
            token, x, streams, post, comb, parts + (_FEW + token) * PLACES, scale, base, weight, y, count,
            x_stride, token_stride, stream_stride, hc_eps, norm_eps,
            N, WIDTH, ROWS, SLOTS, SPLITS, PARTS, COLUMNS, MIX, NORM, OVERLAP,
        )  # fmt: skip
    elif ITERATIONS > 0:
        _weigh(
            taker, parts + taker * PLACES, scale, base, next_post, next_comb, count, hc_eps, norm_eps,
            ITERATIONS, N, WIDTH, ROWS, SLOTS, SPLITS, PARTS, OVERLAP,
        )  # fmt: skip
