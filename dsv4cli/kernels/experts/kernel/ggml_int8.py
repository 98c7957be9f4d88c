"""Experts of one token or two over GGUF blocks on int8 tensor cores, with the shared expert in the same launches.

A program computes eight rows of w1 and the same of w3, or 16 of w2, or twice as many, for a tile of pairs: one of a
token and an expert, or the two of both tokens. The shared expert's programs come first: they load weights before the
router has finished.
"""

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.int8 import ROWS
from dsv4cli.kernels.ggml.kernel.fields import tile_rows
from dsv4cli.kernels.ggml.kernel.int8 import operand_half, operand_rows, products
from dsv4cli.kernels.ggml.kernel.int8_codes import table_of
from dsv4cli.kernels.ggml.kernel.octets import blocks_of
from dsv4cli.kernels.gluon_barriers import wait_for_inputs
from dsv4cli.kernels.gluon_launch import gluon_launched
from dsv4cli.kernels.launch import cdiv
from dsv4cli.kernels.pdl import overlap
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights
    from dsv4cli.kernels.experts.kernel.ggml import Tiles

# rows of w1, and of w3, that a program computes
HALF = ROWS // 2


def outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights | None",
    tiles: "Tiles",
    routing: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Return the output of each pair, and of the shared expert for each token: [P (+ T), D] in x's dtype."""
    (tokens, hidden), width, pairs = x.shape, weights.w1.weight.shape[-2], routing.numel()
    extra = 0 if shared is None else 1
    inner = x.new_empty(pairs + extra * tokens, width)
    found = x.new_empty(len(inner), hidden)
    own = weights if shared is None else shared
    given = tiles.row, tiles.order, tiles.start, tiles.sizes
    count, parts = tiles.number + extra, (tokens, routing.shape[1], extra)
    # as for one token: the order of its sums must not depend on the other
    alone = routing.shape[1] + 1
    shape, (up, *up_rest), (own_up, *own_rest) = _shape(hidden, width, HALF, alone), *map(_matrix, (weights.w1, own.w1))
    _up[(cdiv(width, HALF * shape.tiles), count)](
        x, up, blocks_of(weights.w3).rows, *up_rest, own_up, blocks_of(own.w3).rows, *own_rest, *given, routing, limit,
        inner, x.stride(0), width, hidden, *parts, *shape, num_warps=shape.warps, **overlap(x),
    )  # fmt: skip
    shape = _shape(width, hidden, ROWS, alone)
    _down[(cdiv(hidden, ROWS * shape.tiles), count)](
        inner, *_matrix(weights.w2), *_matrix(own.w2), *given, found, hidden, width, *parts, *shape,
        num_warps=shape.warps, **overlap(x),
    )  # fmt: skip
    return found


def _shape(width: int, count: int, rows: int, matrices: int) -> int8.Int8Tiles:
    """Return the shape of programs for matrices of `count` rows, of which a tile has `rows`."""
    return int8.shape(width, cdiv(count, rows) * matrices)


def _matrix(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor | None, str, int]:
    blocks = blocks_of(matrix)
    return blocks.rows, table_of(blocks), blocks.kind, blocks.height


@gluon.jit
def _pair(order, position):
    """Return the pair at a position."""
    pair = position
    if order is not None:
        pair = gl.load(order + position, cache_modifier=".cg")
    return pair


@gluon.jit
def _tile(number, rows, order, starts, sizes):
    """Return a tile's row in the stacks, its first position, and its number of pairs."""
    start, size = number, gl.to_tensor(1)
    if order is not None:
        start, size = gl.load(starts + number, cache_modifier=".cg"), gl.load(sizes + number, cache_modifier=".cg")
    return gl.load(rows + number, cache_modifier=".cg").to(gl.int64), start, size


@gluon.jit
def _of_tokens(values, layout: gl.constexpr):
    """Return a number for each of two tokens, [1, 2]; the same twice if there is one."""
    token = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, layout)), 0)
    return gl.where(token == 0, values[0], values[len(values) - 1])


@gluon.jit
def _store(values, to, begins, first, N: gl.constexpr, size):
    """Store values [R, 2] of rows from `first` on. begins: for each token, where its row begins."""
    held: gl.constexpr = values.type.layout
    row = first + gl.expand_dims(gl.arange(0, values.shape[0], gl.SliceLayout(1, held)), 1)
    token = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, held)), 0)
    place = to + (_of_tokens(begins, held) + row)
    gl.store(place, values.to(to.dtype.element_ty), (row < N) & (token < size))


@gluon.jit
def _gated(products, factors, limit, dtype: gl.constexpr):
    """Return the gated product of 8 rows of w1 and the same of w3 times a factor for each token: fp32 [8, 2]."""
    gate, up = gl.split(gl.permute(gl.reshape(products, [2, 8, 2]), (1, 2, 0)))
    values = gated_values(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), limit)
    held: gl.constexpr = values.type.layout
    return values * _of_tokens(factors, held)


@gluon.jit
def _store_gated(
    x, places, w1, w3, table, expert, factors, limit, to, begins, first, size, N: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, HEIGHT: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Store the gated product of an expert's w1 and w3, times a factor for each token: 8 rows of both for each tile."""
    tiles = ()
    for tile in gl.static_range(TILES):
        # missing rows repeat the last one
        row = expert * N + gl.minimum(first + tile * 8 + operand_rows(WARPS) % 8, N - 1)
        gate_rows, place = tile_rows(w1, row, K, KIND, HEIGHT)
        up_rows, _ = tile_rows(w3, row, K, KIND, HEIGHT)
        tiles += ((gl.where(operand_half(WARPS) == 0, gate_rows, up_rows), place),)
    found = products(x, places, tiles, table, K, KIND, HEIGHT, WARPS, EACH, OVERLAP)
    for tile in gl.static_range(TILES):
        _store(_gated(found[tile], factors, limit, to.dtype.element_ty), to, begins, first + tile * 8, N, size)


@gluon.jit
def _store_products(
    x, places, w2, table, expert, to, begins, first, size, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr,
    HEIGHT: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Store the products of an expert's w2: 16 rows for each tile."""
    tiles = ()
    for tile in gl.static_range(TILES):
        row = expert * N + gl.minimum(first + tile * 16 + operand_rows(WARPS), N - 1)
        tiles += (tile_rows(w2, row, K, KIND, HEIGHT),)
    found = products(x, places, tiles, table, K, KIND, HEIGHT, WARPS, EACH, OVERLAP)
    for tile in gl.static_range(TILES):
        _store(found[tile], to, begins, first + tile * 16, N, size)


@gluon_launched
def _up(
    x,  # [T, K]
    w1,  # blocks [E, N, K]
    w3,
    table,
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,  # rows of a tile of blocks
    own_w1,  # of the shared expert [N, K]
    own_w3,
    own_table,
    OWN_KIND: gl.constexpr,
    OWN_HEIGHT: gl.constexpr,
    tile_row,  # as of Tiles; the shared expert's tile precedes them
    order,
    tile_start,
    tile_size,
    routing,  # fp32 [T, PER_TOKEN]
    limit,
    inner,  # [P + T, N], by position
    x_row,
    N: gl.constexpr,
    K: gl.constexpr,
    COUNT: gl.constexpr,  # tokens
    PER_TOKEN: gl.constexpr,
    SHARED: gl.constexpr,  # tiles of the shared expert
    TILES: gl.constexpr,  # of rows
    WARPS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number, first = gl.program_id(1) - SHARED, gl.program_id(0) * (8 * TILES)
    if number < 0:
        places, begins, factors = (), (), ()
        for token in gl.static_range(COUNT):
            places += (gl.to_tensor(token).to(gl.int64) * x_row,)
            begins += (gl.to_tensor(COUNT * PER_TOKEN + token).to(gl.int64) * N,)
            factors += (1.0,)
        _store_gated(
            x, places, own_w1, own_w3, own_table, 0, factors, limit, inner, begins, first, COUNT, N, K, OWN_KIND,
            OWN_HEIGHT, TILES, WARPS, EACH, OVERLAP,
        )  # fmt: skip
    else:
        wait_for_inputs(OVERLAP)
        expert, start, size = _tile(number, tile_row, order, tile_start, tile_size)
        if size > 0:
            places, begins, factors = (), (), ()
            for column in gl.static_range(COUNT):
                # missing pairs repeat the last one
                position = start + gl.minimum(column, size - 1)
                pair = _pair(order, position)
                places += ((pair // PER_TOKEN).to(gl.int64) * x_row,)
                begins += (position.to(gl.int64) * N,)
                factors += (gl.load(routing + pair),)
            _store_gated(
                x, places, w1, w3, table, expert, factors, limit, inner, begins, first, size, N, K, KIND, HEIGHT,
                TILES, WARPS, EACH, False,
            )  # fmt: skip


@gluon_launched
def _down(
    inner,  # [P + T, K], by position
    w2,  # blocks [E, N, K]
    table,
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,
    own_w2,  # of the shared expert [N, K]
    own_table,
    OWN_KIND: gl.constexpr,
    OWN_HEIGHT: gl.constexpr,
    tile_row,  # written before the previous launch
    order,
    tile_start,
    tile_size,
    outputs,  # [P + T, N], by pair
    N: gl.constexpr,
    K: gl.constexpr,
    COUNT: gl.constexpr,
    PER_TOKEN: gl.constexpr,
    SHARED: gl.constexpr,
    TILES: gl.constexpr,
    WARPS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number, first = gl.program_id(1) - SHARED, gl.program_id(0) * (16 * TILES)
    if number < 0:
        places, begins = (), ()
        for token in gl.static_range(COUNT):
            position = gl.to_tensor(COUNT * PER_TOKEN + token).to(gl.int64)
            places += (position * K,)
            begins += (position * N,)
        _store_products(
            inner, places, own_w2, own_table, 0, outputs, begins, first, COUNT, N, K, OWN_KIND, OWN_HEIGHT, TILES,
            WARPS, EACH, OVERLAP,
        )  # fmt: skip
    else:
        expert, start, size = _tile(number, tile_row, order, tile_start, tile_size)
        if size > 0:
            places, begins = (), ()
            for column in gl.static_range(COUNT):
                position = start + gl.minimum(column, size - 1)
                places += (position.to(gl.int64) * K,)
                begins += (_pair(order, position).to(gl.int64) * N,)
            _store_products(
                inner, places, w2, table, expert, outputs, begins, first, size, N, K, KIND, HEIGHT, TILES, WARPS, EACH,
                OVERLAP,
            )  # fmt: skip
        else:
            wait_for_inputs(OVERLAP)
