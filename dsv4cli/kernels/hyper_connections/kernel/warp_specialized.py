"""Mixing and projection of many tokens' streams on Hopper: loads, mixing, tensor cores and stores overlap.

A program computes 128 tokens and some columns of each stream. One of its warps loads 32 columns after another into a
ring buffer in shared memory. Four warps mix and project the upper 64 tokens and four the lower, in registers, which
tensor cores read. Triton cannot specialize warps, so this is written in Gluon, which Triton's interpreter does not
support. The mixed streams are bit-identical to those of `mix_and_project`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from dsv4cli.kernels.gluon_launch import gluon_described, gluon_launched
from dsv4cli.kernels.launch import cdiv

# streams; tokens of four warps; columns at a time; places for the sums of a token; parts of a weight
STREAMS, TOKENS, COLUMNS = gl.constexpr(4), gl.constexpr(64), gl.constexpr(32)
PLACES, PARTS = gl.constexpr(32), gl.constexpr(3)
# steps in shared memory, 64 KiB each, plus 32 KiB for results
SLOTS = gl.constexpr(3)
# registers per thread of warps that mix and of the warp that loads; the four default warps get the rest of 504
MIXING, BRINGING = gl.constexpr(232), gl.constexpr(40)


def mixed_and_projected(
    x: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    weights: torch.Tensor,
    mixed: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    """Compute `mixed` and parts [splits, T, 32] as `mix_and_project` does.

    x: [T, D]; weights: bf16 [3, rows, 4 * D].
    """
    (count, _, width), (splits, _, _), (_, lines, _) = streams.shape, parts.shape, weights.shape
    block = (TOKENS.value, COLUMNS.value)
    steps = width // COLUMNS.value
    _warp_specialized[cdiv(count, 2 * TOKENS.value), splits](
        gluon_described(x, block), gluon_described(streams.flatten(1), block), post, comb,
        gluon_described(weights.flatten(0, 1), (PLACES.value, COLUMNS.value)), gluon_described(mixed.flatten(1), block),
        parts, count, width, steps, cdiv(steps, splits), lines, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _bring(x, streams, fn, xs, sources, weights, filled, freed, width, begin, end, ROWS: gl.constexpr):
    """Load 32 columns of each stream, of x and of the weights into shared memory, one step after another."""
    token = gl.program_id(0) * (2 * TOKENS)
    for step in range(begin, end):
        number, column = step - begin, step * COLUMNS
        slot = number % SLOTS
        await_freed(freed, number)
        barrier = filled.index(slot)
        mbarrier.expect(barrier, 2 * COLUMNS * (2 * (STREAMS + 1) * TOKENS + STREAMS * PARTS * PLACES))
        for half in gl.static_range(2):
            first = token + half * TOKENS
            tma.async_copy_global_to_shared(x, [first, column], barrier, xs.index(2 * slot + half))
            for j in gl.static_range(STREAMS):
                found = sources.index((2 * slot + half) * STREAMS + j)
                tma.async_copy_global_to_shared(streams, [first, j * width + column], barrier, found)
        for k in gl.static_range(STREAMS):
            for part in gl.static_range(PARTS):
                # rows beyond a part's end are from the next part, and are not used
                found = weights.index((slot * STREAMS + k) * PARTS + part)
                tma.async_copy_global_to_shared(fn, [part * ROWS, k * width + column], barrier, found)


@gluon.jit
def _shares(shares, token, count, NUMBER: gl.constexpr):
    """Load NUMBER numbers of each token, each as [TOKENS, 1]."""
    result = ()
    for i in gl.static_range(NUMBER):
        result += (gl.expand_dims(gl.load(shares + token * NUMBER + i, token < count, other=0.0), 1),)
    return result


@gluon.jit
def _mixed(sources, added, posts, combs, K: gl.constexpr):
    """Return stream K after a sublayer's output `added`, as `project.mix` does."""
    total = posts[K] * added
    for j in gl.static_range(STREAMS):
        share = gl.broadcast(combs[j * STREAMS + K], total)[0]
        total = gl.fma(share, sources[j], total)
    # two values at a time: the compiler would round them one by one, which takes eight times as long
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [total], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _mix(
    post, comb, mixed, parts, xs, sources, weights, outs, filled, freed, count, width, begin, end,
    HALF: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Mix and project the upper half of the program's tokens (HALF 0) or the lower (1)."""
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    first = gl.program_id(0) * (2 * TOKENS) + HALF * TOKENS
    token = (first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tile))).to(gl.int64)
    posts, combs = _shares(post, token, count, STREAMS), _shares(comb, token, count, STREAMS * STREAMS)
    high = gl.full([TOKENS, PLACES], 0.0, gl.float32, tile)
    middle, low, squares = high, high, high
    for step in range(begin, end):
        number = step - begin
        slot = number % SLOTS
        await_filled(filled, number)
        added, given = xs.index(2 * slot + HALF).load(tile).to(gl.float32), ()
        for j in gl.static_range(STREAMS):
            given += (sources.index((2 * slot + HALF) * STREAMS + j).load(tile).to(gl.float32),)
        # until the previous step's results have been read from shared memory
        tma.store_wait(0)
        for k in gl.static_range(STREAMS):
            values = _mixed(given, added, posts, combs, k)
            outs.index(HALF * STREAMS + k).store(values)
            squares += values.to(gl.float32) * values.to(gl.float32)
            left, right = gl.convert_layout(values, operand), (slot * STREAMS + k) * PARTS
            high = warpgroup_mma(left, weights.index(right).permute((1, 0)), high, is_async=True)
            middle = warpgroup_mma(left, weights.index(right + 1).permute((1, 0)), middle, is_async=True)
            low = warpgroup_mma(left, weights.index(right + 2).permute((1, 0)), low, is_async=True)
        fence_async_shared()
        for k in gl.static_range(STREAMS):
            at = [first, k * width + step * COLUMNS]
            tma.async_copy_shared_to_global(mixed, at, outs.index(HALF * STREAMS + k))
        high, middle, low = warpgroup_mma_wait(0, deps=[high, middle, low])
        tell(freed, number)
    place = gl.arange(0, PLACES, layout=gl.SliceLayout(0, tile))
    total = gl.expand_dims(gl.sum(squares, 1), 1)
    sums = gl.where(gl.expand_dims(place == ROWS, 0), total, high + (middle + low))
    row = gl.expand_dims(gl.program_id(1) * count.to(gl.int64) + token, 1) * PLACES
    gl.store(parts + row + gl.expand_dims(place, 0), sums, gl.expand_dims(token < count, 1))
    tma.store_wait(0)


@gluon_launched(do_not_specialize=["count", "width", "steps", "share"])
def _warp_specialized(
    x,  # descriptor of bf16 [count, width]
    streams,  # descriptor of bf16 [count, STREAMS * width]
    post,  # [count, STREAMS]
    comb,  # [count, STREAMS, STREAMS]: source, target
    fn,  # descriptor of bf16 [PARTS * ROWS, STREAMS * width]
    mixed,  # as streams
    parts,  # [splits, count, PLACES]: rows of fn, the sum of squares
    count,
    width,
    steps,  # of all columns
    share,  # steps of a program
    ROWS: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, TOKENS, COLUMNS], x.layout)
    sources = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS * STREAMS, TOKENS, COLUMNS], streams.layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * STREAMS * PARTS, PLACES, COLUMNS], fn.layout)
    outs = gl.allocate_shared_memory(gl.bfloat16, [2 * STREAMS, TOKENS, COLUMNS], mixed.layout)
    # copies arrive by themselves after one thread has announced the number of bytes
    filled, freed = ring(SLOTS, 1, 2)
    begin = gl.program_id(1) * share
    end = gl.minimum(begin + share, steps)
    gl.warp_specialize(
        [
            (_mix, (
                post, comb, mixed, parts, xs, sources, weights, outs, filled, freed, count, width, begin, end, 0, ROWS,
            )),
            (_mix, (
                post, comb, mixed, parts, xs, sources, weights, outs, filled, freed, count, width, begin, end, 1, ROWS,
            )),
            (_bring, (x, streams, fn, xs, sources, weights, filled, freed, width, begin, end, ROWS)),
        ],
        [4, 1],
        [MIXING, BRINGING],
    )  # fmt: skip
