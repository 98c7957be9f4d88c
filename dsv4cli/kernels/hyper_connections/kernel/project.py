"""The first launch of hyper-connections: mixes streams and sums parts of their projection."""

import triton
import triton.language as tl

from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs


@launched
def split_weights(
    fn,  # [count]
    parts,  # bf16 [3, count]
    count: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split fp32 into a sum of three bf16 parts of 8 bits each. This is exact, so products with bf16 are exact too."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(fn + place, place < count, other=0.0)
    for part in tl.static_range(3):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + part * count + place, rounded, place < count)
        rest -= rounded.to(tl.float32)


@triton.jit
def _project(fn, values, sums):
    """Return sums [M, TOKENS] + weights @ values [TOKENS, BLOCK].T in fp32.

    fn: the weights [M, BLOCK] in the values' dtype, or fp32 [M / 4, BLOCK] for bf16 values. The latter are split here
    into three bf16 parts and zeros, stacked.
    """
    if fn.dtype != values.dtype:
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        joined = tl.join(tl.join(high, middle), tl.join(low, tl.zeros_like(low)))  # [M / 4, BLOCK, 2, 2]
        fn = tl.reshape(tl.permute(joined, [2, 3, 0, 1]), [4 * high.shape[0], high.shape[1]])
    return tl.dot(fn, tl.trans(values), sums, input_precision="ieee")


@triton.jit
def load_weights(
    fn, column, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Load each stream's weights for these columns, [PARTS * SLOTS, BLOCK]. fn: [1 or 3, ROWS, N * WIDTH]."""
    row, weights = tl.arange(0, PARTS * SLOTS)[:, None], ()
    part, slot = row // SLOTS, row % SLOTS
    inside = (slot < ROWS) & (part < 3) & (column < WIDTH)
    for k in tl.static_range(N):
        place = fn + (part * ROWS + slot) * (N * WIDTH) + k * WIDTH + column
        weights += (tl.load(place, inside, other=0.0),)
    return weights


@triton.jit
def load_shares(post, comb, token, count, N: tl.constexpr):
    """Load post and comb of tokens [TOKENS, 1], as tuples of N and N * N tensors [TOKENS, 1]."""
    posts, combs = (), ()
    for k in tl.static_range(N):
        posts += (tl.load(post + token * N + k, token < count, other=0.0),)
    for jk in tl.static_range(N * N):
        combs += (tl.load(comb + token * (N * N) + jk, token < count, other=0.0),)
    return posts, combs


@triton.jit
def mix(sources, added, posts, combs, N: tl.constexpr):
    """Return the streams after a sublayer's output `added` (fp32), in the dtype of the sources."""
    mixed = ()
    for k in tl.static_range(N):
        total = posts[k] * added
        for j in tl.static_range(N):
            # explicit fma: else the compiler chooses which product to round, and post_pre differs from connect_post
            total = tl.fma(tl.broadcast_to(combs[j * N + k], total.shape), sources[j].to(tl.float32), total)
        mixed += (total.to(sources[k].dtype),)
    return mixed


@triton.jit
def load_sources(
    x, streams, token, column, inside, x_stride, token_stride, stream_stride, N: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Load each stream of tokens [TOKENS, 1] at these columns and, if MIX, the sublayer's output in fp32."""
    sources = ()
    for j in tl.static_range(N):
        source = streams + token * token_stride + j * stream_stride + column
        sources += (tl.load(source, inside, other=0.0),)  # [TOKENS, BLOCK]
    added = tl.load(x + token * x_stride + column, inside, other=0.0).to(tl.float32) if MIX else 0.0
    return sources, added


@triton.jit
def project(weights, sources, sums, squares, N: tl.constexpr):
    """Add these columns of each stream to sums [M, TOKENS] and squares [TOKENS, BLOCK]."""
    for k in tl.static_range(N):
        squares += sources[k].to(tl.float32) * sources[k].to(tl.float32)
        sums = _project(weights[k], sources[k], sums)
    return sums, squares


@triton.jit
def as_parts(sums, squares, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Return [TOKENS, SLOTS]: the sums of the rows of fn, then the sum of the squares."""
    M: tl.constexpr = sums.shape[0]
    sums = tl.trans(tl.sum(tl.reshape(sums, [M // SLOTS, SLOTS, sums.shape[1]]), 0))
    return tl.where(tl.arange(0, SLOTS)[None] == ROWS, tl.sum(squares, 1)[:, None], sums)


@launched(do_not_specialize=["count"])
def mix_and_project(
    x,  # [count, WIDTH]
    streams,  # [count, N, WIDTH]
    post,  # [count, N]
    comb,  # [count, N, N]: source, target
    fn,  # [1, ROWS, N * WIDTH], or bf16 [3, ROWS, N * WIDTH], parts of a sum
    mixed,  # as streams, contiguous
    parts,  # [splits, count, SLOTS]: rows of fn, the sum of squares
    count,
    x_stride,
    token_stride,
    stream_stride,
    columns,  # of a program, a multiple of BLOCK
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # 0: nothing is projected
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,  # of the weights as loaded, 1 or 4 with an empty one
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    first = tl.program_id(1) * columns
    wait_for_inputs(OVERLAP)
    if MIX:
        posts, combs = load_shares(post, comb, token, count, N)
    M: tl.constexpr = 4 * SLOTS if streams.dtype.element_ty == tl.bfloat16 else SLOTS
    sums, squares = tl.zeros([M, TOKENS], tl.float32), tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = first + start + tl.arange(0, BLOCK)[None]
        inside = (token < count) & (column < WIDTH)
        # load everything that a step needs before using any of it
        sources, added = load_sources(x, streams, token, column, inside, x_stride, token_stride, stream_stride, N, MIX)
        if ROWS > 0:
            weights = load_weights(fn, column, N, WIDTH, ROWS, SLOTS, PARTS)
        if MIX:
            sources = mix(sources, added, posts, combs, N)
            for k in tl.static_range(N):
                tl.store(mixed + (token * N + k) * WIDTH + column, sources[k], inside)
        if ROWS > 0:
            sums, squares = project(weights, sources, sums, squares, N)
    if ROWS > 0:
        place = parts + (tl.program_id(1) * count.to(tl.int64) + token) * SLOTS + tl.arange(0, SLOTS)[None]
        tl.store(place, as_parts(sums, squares, ROWS, SLOTS), token < count)
