"""The second launch of hyper-connections: the weights post and comb of some tokens, or one token collapsed."""

import triton
import triton.language as tl


@triton.jit
def _logits(
    parts, scale, base, token, count, norm_eps,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The logits of TOKENS tokens, [TOKENS, SLOTS / N, N]: the rows pre and post and N of comb, then nothing of use."""
    split, slot = tl.arange(0, PARTS)[:, None, None], tl.arange(0, SLOTS)
    place = parts + (split * count.to(tl.int64) + token[None, :, None]) * SLOTS + slot[None, None]
    inside = (split < SPLITS) & (token < count)[None, :, None]
    sums = tl.sum(tl.load(place, inside, other=0.0), 0)  # [TOKENS, SLOTS]
    squares = tl.sum(tl.where((slot == ROWS)[None], sums, 0.0), 1, keep_dims=True)
    squares = tl.where((token < count)[:, None], squares, 1.0)
    mixes = sums * tl.rsqrt(squares * (1.0 / (N * WIDTH)) + norm_eps)
    # scale has a number for pre, for post and for comb
    scales = tl.load(scale + tl.minimum(slot // N, 2), slot < ROWS, other=0.0)
    mixes = mixes * scales[None] + tl.load(base + slot, slot < ROWS, other=0.0)[None]
    return tl.reshape(mixes, [TOKENS, SLOTS // N, N])


@triton.jit
def _sinkhorn(matrix, eps, ITERATIONS: tl.constexpr, N: tl.constexpr):
    """The rows [TOKENS, N] of a matrix M with normed rows, their columns and rows normed in turn, columns last.

    What comes out is u_j * M_jk * v_k. A pass over rows divides u_j by u_j * sum_k(M_jk * v_k) + eps: it takes the
    inverse 1 / u_j to sum_k(M_jk * v_k) + eps / u_j. So each pass is N sums of products and N reciprocals.
    """
    columns, rows, factors = matrix[0] + eps, (), ()  # 1 / v [TOKENS, N]; 1 / u_j and u_j [TOKENS, 1]
    for j in tl.static_range(1, N):
        columns += matrix[j]
    for _ in tl.static_range(N):
        rows += (tl.full([matrix[0].shape[0], 1], 1.0, tl.float32),)
    factors = rows
    for _ in range(ITERATIONS - 1):
        inverse, sums = 1.0 / columns, ()
        for j in tl.static_range(N):
            sums += (tl.sum(matrix[j] * inverse, 1, keep_dims=True) + rows[j] * eps,)
        rows, factors = sums, ()
        columns = columns * eps
        for j in tl.static_range(N):
            factors += (1.0 / rows[j],)
            columns += matrix[j] * factors[j]
    result, inverse = (), 1.0 / columns
    for j in tl.static_range(N):
        result += (matrix[j] * factors[j] * inverse,)
    return result


@triton.jit
def _weigh(
    program, parts, scale, base, post, comb, count, hc_eps, norm_eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """post and comb of TOKENS tokens."""
    token = program * TOKENS + tl.arange(0, TOKENS)
    logits = _logits(parts, scale, base, token, count, norm_eps, N, WIDTH, (2 + N) * N, SLOTS, SPLITS, PARTS, TOKENS)
    token, row = token[:, None, None], tl.arange(0, SLOTS // N)[None, :, None]
    stream, inside = tl.arange(0, N)[None, None], token < count
    tl.store(post + token * N + stream + 0 * row, 2 * tl.sigmoid(logits), inside & (row == 1))
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    powers = powers / tl.sum(powers, 2, keep_dims=True) + hc_eps
    combs = ()
    for j in tl.static_range(N):
        combs += (tl.sum(tl.where(row == 2 + j, powers, 0.0), 1),)  # [TOKENS, N]
    combs = _sinkhorn(combs, hc_eps, ITERATIONS, N)
    result = powers
    for j in tl.static_range(N):
        result = tl.where(row == 2 + j, combs[j][:, None], result)
    tl.store(comb + (token * N + row - 2) * N + stream, result, inside & (row >= 2) & (row < 2 + N))


@triton.jit
def _collapse(
    token, streams, parts, scale, base, weight, y, count, token_stride, stream_stride, hc_eps, norm_eps,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The sum over a token's streams, with the weights pre, and its norm."""
    stream, column = tl.arange(0, N), tl.arange(0, COLUMNS)
    place = streams + token * token_stride + stream[:, None] * stream_stride + column[None]
    values = tl.load(place, (column < WIDTH)[None], other=0.0).to(tl.float32)  # [N, COLUMNS]
    one = token + tl.arange(0, 1)
    logits = _logits(parts, scale, base, one, count, norm_eps, N, WIDTH, ROWS, SLOTS, SPLITS, PARTS, 1)
    row = tl.arange(0, SLOTS // N)[:, None]
    pre = tl.sum(tl.where(row == 0, tl.sigmoid(tl.reshape(logits, [SLOTS // N, N])) + hc_eps, 0.0), 0)  # [N]
    x = tl.sum(pre[:, None] * values, 0).to(y.dtype.element_ty)
    if NORM:
        wide = x.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / WIDTH) + norm_eps)
        factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
        x = (factor * wide).to(y.dtype.element_ty)
    tl.store(y + token * WIDTH + column, x, column < WIDTH)


@triton.jit(do_not_specialize=["count", "weighers"])
def finish(
    streams,  # [count, N, WIDTH]
    parts,  # [SPLITS, count, SLOTS]
    scale,  # [3], or [1] where only pre is wanted
    base,  # [ROWS]
    weight,  # [WIDTH]
    y,  # [count, WIDTH]
    post,  # [count, N]
    comb,  # [count, N, N]
    count,
    weighers,  # programs for post and comb, which take longest; the others collapse a token each
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
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up
    NORM: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < weighers:
        if ROWS > N:
            _weigh(
                program, parts, scale, base, post, comb, count, hc_eps, norm_eps,
                ITERATIONS, N, WIDTH, SLOTS, SPLITS, PARTS, TOKENS,
            )  # fmt: skip
    else:
        _collapse(
            program - weighers, streams, parts, scale, base, weight, y, count, token_stride, stream_stride,
            hc_eps, norm_eps, N, WIDTH, ROWS, SLOTS, SPLITS, PARTS, COLUMNS, NORM,
        )  # fmt: skip
