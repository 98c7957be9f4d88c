"""Products of FP8 codes of many rows on Hopper: loads, tensor cores, fp32 sums and stores overlap.

A program is persistent: it stays on its multiprocessor and computes tiles of 128 rows in turn. One warp loads blocks of
128 columns into a ring buffer in shared memory. Four warps multiply the upper 64 rows and four the lower,
independently: while one group adds a block's product to its sums, or stores them, the tensor cores work for the other.
Triton cannot specialize warps, so this is written in Gluon, which Triton's interpreter does not support. A row's sums
are bit-identical to those of `tiled_fp8` if that does not split them.
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

from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.gemm.kernel.dequant import bits, block_scales, e8m0_values
from dsv4cli.kernels.gemm.kernel.tiled_fp8 import place
from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from dsv4cli.kernels.gluon_launch import gluon_described, gluon_launched
from dsv4cli.kernels.launch import cdiv
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

# rows of four warps; features and columns of one weight scale
ROWS, FEATURES, DEPTH = gl.constexpr(64), gl.constexpr(128), gl.constexpr(128)
# rows of tiles before the next column: the area that an H200 computes at once is about square
GROUP = gl.constexpr(16)
# ring buffer slots by blocks of features in a tile: 192 KiB, plus 32 KiB for results
SLOTS = {1: 6, 2: 4}
# registers per thread of warps that multiply and of the warp that loads; the four default warps get the rest of 504
MULTIPLYING, BRINGING = gl.constexpr(232), gl.constexpr(40)


def linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    y: torch.Tensor,
    blocks: int,
) -> None:
    """Compute (codes * scale) @ dequantise(weight, weight_scale).T into y.

    blocks: blocks of features in a tile, one or two.
    """
    (tokens, width), features = codes.shape, weight.shape[0]
    tiles = cdiv(tokens, 2 * ROWS.value) * (features // (blocks * FEATURES.value))
    _warp_specialized[min(tiles, multiprocessors(y.device)),](
        gluon_described(codes, (ROWS.value, DEPTH.value)), scale.view(torch.uint8),
        gluon_described(weight, (FEATURES.value, DEPTH.value)), bits(weight_scale),
        gluon_described(y, (ROWS.value, FEATURES.value)), tokens, features, width // DEPTH.value, blocks, SLOTS[blocks],
        num_warps=4, **overlap(y),
    )  # fmt: skip


@gluon.jit
def _tiles(tokens, features, BLOCKS: gl.constexpr):
    """Return the number of tiles, down and across."""
    return gl.cdiv(tokens, 2 * ROWS), features // (BLOCKS * FEATURES)


@gluon.jit
def _bring(x, weight, xs, weights, filled, freed, tokens, features, steps, BLOCKS: gl.constexpr):
    """Load each tile's blocks of columns into shared memory, one after another."""
    slots: gl.constexpr = filled.shape[0]
    down, across = _tiles(tokens, features, BLOCKS)
    step = 0
    for number in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = place(number, down, across, GROUP)
        for column in range(0, steps * DEPTH, DEPTH):
            slot = step % slots
            await_freed(freed, step)
            barrier = filled.index(slot)
            mbarrier.expect(barrier, (2 * ROWS + BLOCKS * FEATURES) * DEPTH)
            for half in gl.static_range(2):
                rows = xs.index(2 * slot + half)
                tma.async_copy_global_to_shared(x, [(2 * m + half) * ROWS, column], barrier, rows)
            for block in gl.static_range(BLOCKS):
                found = weights.index(BLOCKS * slot + block)
                tma.async_copy_global_to_shared(weight, [(BLOCKS * n + block) * FEATURES, column], barrier, found)
            step += 1


@gluon.jit
def _begin(
    x_scale, weight_scale, number, tokens, features, steps, HALF: gl.constexpr, BLOCKS: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """Return the first row and feature of half a tile, and pointers to its rows' and its first features' scales."""
    down, across = _tiles(tokens, features, BLOCKS)
    m, n = place(number, down, across, GROUP)
    first, feature = (2 * m + HALF) * ROWS, n * BLOCKS * FEATURES
    # rows beyond the last one repeat it and are not stored
    row = gl.minimum(first + gl.arange(0, ROWS, layout=ROW), tokens - 1)
    return first, feature, x_scale + row * steps, weight_scale + feature // FEATURES * steps


@gluon.jit
def _load_scales(x_scales, weight_scales, step, steps, BLOCKS: gl.constexpr):
    """Load the scales of a block of columns: of the rows, of the first features, of the last features."""
    last = weight_scales + (BLOCKS - 1) * steps
    return gl.load(x_scales + step), gl.load(weight_scales + step), gl.load(last + step)


@gluon.jit
def _multiply(
    x_scale, weight_scale, y, xs, weights, out, filled, freed, tokens, features, steps,
    HALF: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Multiply the upper half of each tile's rows (HALF 0) or the lower (1), and store the results."""
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEATURES, 32])
    of_row: gl.constexpr = gl.SliceLayout(1, tile)
    slots: gl.constexpr = filled.shape[0]
    down, across = _tiles(tokens, features, BLOCKS)
    step, tiles = 0, down * across
    # otherwise the compiler assumes that the loop may not run, puts its sums in other registers, and spills 400 bytes
    gl.assume(steps > 0)
    first, feature, x_scales, weight_scales = _begin(
        x_scale, weight_scale, gl.program_id(0), tokens, features, steps, HALF, BLOCKS, of_row
    )
    row_scale, left_scale, right_scale = _load_scales(x_scales, weight_scales, 0, steps, BLOCKS)
    # the last product is carried along, so that all products use the same registers
    product = gl.full([ROWS, FEATURES], 0.0, gl.float32, tile)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        left = gl.full([ROWS, FEATURES], 0.0, gl.float32, tile)
        right = gl.full([ROWS, FEATURES], 0.0, gl.float32, tile)
        for block in range(steps):
            slot = step % slots
            rows = xs.index(2 * slot + HALF)
            await_filled(filled, step)
            columns = weights.index(BLOCKS * slot).permute((1, 0))
            product = warpgroup_mma(rows, columns, product, use_acc=False, is_async=True)
            factor = e8m0_values(row_scale)
            left_factor = gl.expand_dims(factor * block_scales(left_scale), 1)
            right_factor = gl.expand_dims(factor * block_scales(right_scale), 1)
            following = gl.minimum(block + 1, steps - 1)
            row_scale, left_scale, right_scale = _load_scales(x_scales, weight_scales, following, steps, BLOCKS)
            product = warpgroup_mma_wait(0, deps=[product])
            if BLOCKS == 1:
                tell(freed, step)
            left += product * left_factor
            if BLOCKS == 2:
                columns = weights.index(BLOCKS * slot + 1).permute((1, 0))
                product = warpgroup_mma(rows, columns, product, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                tell(freed, step)
                right += product * right_factor
            step += 1
        stored, from_feature = first, feature
        # the next tile's scales are loaded before this tile is stored
        following = gl.minimum(number + gl.num_programs(0), tiles - 1)
        first, feature, x_scales, weight_scales = _begin(
            x_scale, weight_scale, following, tokens, features, steps, HALF, BLOCKS, of_row
        )
        row_scale, left_scale, right_scale = _load_scales(x_scales, weight_scales, 0, steps, BLOCKS)
        _store(y, left, out, stored, from_feature)
        if BLOCKS == 2:
            _store(y, right, out, stored, from_feature + FEATURES)
    tma.store_wait(0)


@gluon.jit
def _store(y, sums, out, row, feature):
    """Round sums and store them through shared memory, once the previous store from there has finished reading."""
    tma.store_wait(0)
    out.store(sums.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [row, feature], out)


@gluon_launched(do_not_specialize=["tokens", "features", "steps"])
def _warp_specialized(
    x,  # descriptor of e4m3 [tokens, K]
    x_scale,  # [tokens, K / 128]
    weight,  # descriptor of e4m3 [N, K]
    weight_scale,  # [N / 128, K / 128]
    y,  # descriptor of bf16 [tokens, N]
    tokens,
    features,
    steps,  # blocks of columns
    BLOCKS: gl.constexpr,
    SLOTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.float8e4nv, [2 * SLOTS, ROWS, DEPTH], x.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [BLOCKS * SLOTS, FEATURES, DEPTH], weight.layout)
    outs = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, FEATURES], y.layout)
    # copies arrive by themselves after one thread has announced the number of bytes
    filled, freed = ring(SLOTS, 1, 2)
    wait_for_inputs(OVERLAP)
    gl.warp_specialize(
        [
            (_multiply, (
                x_scale, weight_scale, y, xs, weights, outs.index(0), filled, freed, tokens, features, steps, 0, BLOCKS,
            )),
            (_multiply, (
                x_scale, weight_scale, y, xs, weights, outs.index(1), filled, freed, tokens, features, steps, 1, BLOCKS,
            )),
            (_bring, (x, weight, xs, weights, filled, freed, tokens, features, steps, BLOCKS)),
        ],
        [4, 1],
        [MULTIPLYING, BRINGING],
    )  # fmt: skip
