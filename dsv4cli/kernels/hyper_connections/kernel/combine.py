"""The second launch of hyper-connections: computes post and comb of some tokens, or collapses one token."""

import triton
import triton.language as tl

from dsv4cli.kernels.hyper_connections.kernel.project import load_sources
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.norm.kernel import normed
from dsv4cli.kernels.pdl import wait_for_inputs


@triton.jit
def load_scales(scale, base, N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Load the scale and base of rows FIRST to LAST - 1 of the projection."""
    factors, added = (), ()
    for i in tl.static_range(FIRST, LAST):
        # one scale each for pre, post and comb
        factors += (tl.load(scale + (i // N if i < 2 * N else 2)),)
        added += (tl.load(base + i),)
    return factors, added


@triton.jit
def logits_of(
    sums, scales, norm_eps, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Return the tokens' logits, each [TOKENS, 1], from the sums [TOKENS, SLOTS], for the rows of these scales."""
    numbers, result = _columns_of(sums), ()
    inverse = tl.rsqrt(numbers[ROWS] * (1.0 / (N * WIDTH)) + norm_eps)
    for i in tl.static_range(len(scales[0])):
        result += (numbers[FIRST + i] * inverse * scales[0][i] + scales[1][i],)
    return result


@triton.jit
def _columns_of(values):
    """Return the columns of values [n, a power of two], each [n, 1]. A thread holds a whole row."""
    columns = (values,)
    for _ in tl.static_range(16):
        if columns[0].shape[1] > 1:
            halves = ()
            for i in tl.static_range(len(columns)):
                half = tl.reshape(columns[i], [columns[i].shape[0], 2, columns[i].shape[1] // 2])
                first, second = tl.split(tl.permute(half, [0, 2, 1]))
                halves += (first, second)
            columns = halves
    return columns


@triton.jit
def _softmax(logits, eps, N: tl.constexpr):
    """Return exp(x) / sum + eps for rows of N of these numbers."""
    result = ()
    for j in tl.static_range(N):
        largest, powers = logits[j * N], ()
        for k in tl.static_range(1, N):
            largest = tl.maximum(largest, logits[j * N + k])
        total = tl.zeros_like(largest)
        for k in tl.static_range(N):
            powers += (tl.exp(logits[j * N + k] - largest),)
            total += powers[k]
        for k in tl.static_range(N):
            result += (powers[k] / total + eps,)
    return result


@triton.jit
def _inverses(numbers):
    """Return 1 / x of positive numbers, two at a time: an inverse root takes one instruction, a division ten."""
    result = ()
    if len(numbers) == 1:
        result = (1.0 / numbers[0],)
    for i in tl.static_range(0, len(numbers) - 1, 2):
        root = tl.rsqrt(numbers[i] * numbers[i + 1])
        inverse = root * root
        result += (numbers[i + 1] * inverse, numbers[i] * inverse)
    return result


@triton.jit
def _pass(matrix, factors, before, eps, LINE: tl.constexpr, PLACE: tl.constexpr):
    """Return the sums over each row or column of the matrix times factors, plus eps times the sums before."""
    sums = ()
    for j in tl.static_range(len(factors)):
        total = before[j] * eps
        for k in tl.static_range(len(factors)):
            total += matrix[j * LINE + k * PLACE] * factors[k]
        sums += (total,)
    return sums


@triton.jit
def _sinkhorn(matrix, eps, ITERATIONS: tl.constexpr, N: tl.constexpr):
    """Normalize columns and rows of a matrix M in turn, columns last. The rows are already normalized.

    matrix: the numbers of M row by row. The result is u_j * M_jk * v_k. A pass over rows divides u_j by u_j *
    sum_k(M_jk * v_k) + eps: it changes the inverse 1 / u_j to sum_k(M_jk * v_k) + eps / u_j. So each pass is N sums of
    products and N reciprocals.
    """
    rows, result = (), ()
    for _ in tl.static_range(N):
        rows += (tl.full(matrix[0].shape, 1.0, tl.float32),)  # 1 / u_j
    factors = rows  # u_j
    columns = _pass(matrix, factors, rows, eps, 1, N)  # 1 / v_k
    for _ in range(ITERATIONS - 1):
        rows = _pass(matrix, _inverses(columns), rows, eps, N, 1)
        factors = _inverses(rows)
        columns = _pass(matrix, factors, columns, eps, 1, N)
    inverses = _inverses(columns)
    for j in tl.static_range(N):
        for k in tl.static_range(N):
            result += (matrix[j * N + k] * factors[j] * inverses[k],)
    return result


@triton.jit
def store_weights(logits, token, post, comb, count, hc_eps, ITERATIONS: tl.constexpr, N: tl.constexpr):
    """Compute post and comb of tokens [TOKENS, 1] from their logits, and store them."""
    combs = ()
    for k in tl.static_range(N):
        tl.store(post + token * N + k, 2 * tl.sigmoid(logits[k]), token < count)
    for i in tl.static_range(N * N):
        combs += (logits[N + i],)
    combs = _sinkhorn(_softmax(combs, hc_eps, N), hc_eps, ITERATIONS, N)
    for i in tl.static_range(N * N):
        tl.store(comb + token * (N * N) + i, combs[i], token < count)


@triton.jit
def collapsed(
    streams, logits, factor, hc_eps, norm_eps, N: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return the sum of a token's streams, each [1, COLUMNS], weighted by pre; with NORM, its norm times factor."""
    x = tl.zeros(streams[0].shape, tl.float32)
    for k in tl.static_range(N):
        x += (tl.sigmoid(logits[k]) + hc_eps) * streams[k].to(tl.float32)
    x = x.to(streams[0].dtype)
    if NORM:
        x = normed(x.to(tl.float32), factor, norm_eps, WIDTH).to(x.dtype)
    return x


@triton.jit
def _added_up(parts, token, count, splits, SLOTS: tl.constexpr, PARTS: tl.constexpr):
    """Return the sums over the parts of tokens [TOKENS, 1]: [TOKENS, SLOTS]."""
    split = tl.arange(0, PARTS)[:, None, None]
    place = parts + (split * count.to(tl.int64) + token[None]) * SLOTS + tl.arange(0, SLOTS)[None, None]
    return tl.sum(tl.load(place, (split < splits) & (token < count)[None], other=0.0), 0)


@triton.jit
def _weigh(
    program, parts, scale, base, post, comb, count, splits, hc_eps, norm_eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute and store post and comb of TOKENS tokens."""
    token = program * TOKENS + tl.arange(0, TOKENS)[:, None]
    scales = load_scales(scale, base, N, N, ROWS)
    wait_for_inputs(OVERLAP)
    sums = _added_up(parts, token, count, splits, SLOTS, PARTS)
    logits = logits_of(sums, scales, norm_eps, N, WIDTH, ROWS, N)
    store_weights(logits, token, post, comb, count, hc_eps, ITERATIONS, N)


@triton.jit
def _collapse(
    token, streams, parts, scale, base, weight, y, count, splits, token_stride, stream_stride, hc_eps, norm_eps,
    N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Collapse one token's streams, apply the norm if NORM, and store the result."""
    token, column = token + tl.arange(0, 1)[:, None], tl.arange(0, COLUMNS)[None]
    inside, scales = column < WIDTH, load_scales(scale, base, N, 0, N)
    factor = tl.load(weight + column, inside, other=0.0).to(tl.float32) if NORM else 1.0
    wait_for_inputs(OVERLAP)
    values, _ = load_sources(streams, streams, token, column, inside, 0, token_stride, stream_stride, N, False)
    logits = logits_of(_added_up(parts, token, count, splits, SLOTS, PARTS), scales, norm_eps, N, WIDTH, ROWS, 0)
    tl.store(y + token * WIDTH + column, collapsed(values, logits, factor, hc_eps, norm_eps, N, WIDTH, NORM), inside)


@launched(do_not_specialize=["count", "weighers", "splits"])
def weigh_and_collapse(
    streams,  # [count, N, WIDTH]
    parts,  # [splits, count, SLOTS]
    scale,  # [3], or [1] where only pre is wanted
    base,  # [ROWS]
    weight,  # [WIDTH]
    y,  # [count, WIDTH]
    post,  # [count, N]
    comb,  # [count, N, N]
    count,
    weighers,  # programs for post and comb, which take longest; the others collapse a token each
    splits,
    token_stride,
    stream_stride,
    hc_eps,
    norm_eps,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,  # splits, rounded up
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < weighers:
        if ITERATIONS > 0:
            _weigh(
                program, parts, scale, base, post, comb, count, splits, hc_eps, norm_eps,
                ITERATIONS, N, WIDTH, ROWS, SLOTS, PARTS, TOKENS, OVERLAP,
            )  # fmt: skip
    else:
        _collapse(
            program - weighers, streams, parts, scale, base, weight, y, count, splits, token_stride, stream_stride,
            hc_eps, norm_eps, N, WIDTH, ROWS, SLOTS, PARTS, COLUMNS, NORM, OVERLAP,
        )  # fmt: skip
