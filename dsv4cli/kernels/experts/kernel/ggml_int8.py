"""Experts of one token or two over GGUF blocks on int8 tensor cores, with the shared expert in the same launches.

A program computes tiles of eight rows of w1 and the same of w3, or of 16 rows of w2, for one pair of a token and an
expert, or for the pairs of two tokens with one expert. The shared expert's programs come first. Before the router has
finished, programs divide their inputs into digits, and those of the shared expert load weights.
"""

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.int8 import ROWS
from dsv4cli.kernels.ggml.kernel.fields import tile_rows
from dsv4cli.kernels.ggml.kernel.int8 import operand_places, operand_rows, pass_words, products
from dsv4cli.kernels.ggml.kernel.int8_codes import table_of
from dsv4cli.kernels.ggml.kernel.int8_digits import digits_of
from dsv4cli.kernels.ggml.kernel.octets import blocks_of
from dsv4cli.kernels.gluon_barriers import wait_for_inputs
from dsv4cli.kernels.gluon_launch import gluon_launched
from dsv4cli.kernels.pdl import overlap_beside
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights
    from dsv4cli.kernels.experts.kernel.ggml import Tiles

# rows of w1, and of w3, in a tile; widths are multiples of `int8.GROUP`, the rows of two tiles, so each program has all
# its rows
HALF = ROWS // 2


def outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights | None",
    tiles: "Tiles",
    routing: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Return the output of each pair, and of the shared expert for each token: [P (+ T), D] in x's dtype.

    x is read before the previous launch, the router's last one, has ended; see `routed_experts`.
    """
    (tokens, hidden), width, pairs = x.shape, weights.w1.weight.shape[-2], routing.numel()
    extra = 0 if shared is None else 1
    inner = x.new_empty(pairs + extra * tokens, width)
    found = x.new_empty(len(inner), hidden)
    own = weights if shared is None else shared
    given = tiles.row, tiles.order, tiles.start, tiles.sizes
    shape = tokens, routing.shape[1], extra
    # as for one token: the order of its sums must not depend on the other
    stacks = routing.shape[1] + 1
    tiled = int8.shape(hidden, width // HALF * stacks)
    _up[(width // HALF // tiled[0], tiles.number + extra)](
        x, *_alike(weights.w1, weights.w3), *_alike(own.w1, own.w3), *given, routing, limit, inner, x.stride(0), width,
        hidden, *shape, *tiled, num_warps=tiled[0] * tiled[1], **overlap_beside(x, int8.REGISTERS),
    )  # fmt: skip
    tiled = int8.shape(width, hidden // ROWS * stacks)
    _down[(hidden // ROWS // tiled[0], tiles.number + extra)](
        inner, *_alike(weights.w2), *_alike(own.w2), *given, found, hidden, width, *shape, *tiled,
        num_warps=tiled[0] * tiled[1], **overlap_beside(x, int8.REGISTERS),
    )  # fmt: skip
    return found


def _alike(*matrices: StoredMatrix) -> tuple[torch.Tensor | str | int | None, ...]:
    """Return matrices of one type as the kernels take them: each one's blocks, then their table, type and height."""
    blocks = [blocks_of(matrix) for matrix in matrices]
    return *(one.rows for one in blocks), table_of(blocks[0]), blocks[0].kind, blocks[0].height


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
def _store(values, to, begins, first, size):
    """Store values [R, 2] of rows from `first` on. begins: for each token, where its row begins."""
    held: gl.constexpr = values.type.layout
    row = first + gl.expand_dims(gl.arange(0, values.shape[0], gl.SliceLayout(1, held)), 1)
    token = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, held)), 0)
    place = to + (_of_tokens(begins, held) + row)
    gl.store(place, values.to(to.dtype.element_ty), token < size)


@gluon.jit
def _rows_of_both(
    w1, w3, row, K: gl.constexpr, KIND: gl.constexpr, HEIGHT: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Return rows of both matrices, from `row` on, as of `fields.tile_rows`: a tile has eight of w1, then of w3."""
    tile, half, own = operand_places(TILES, PARTS)
    first, place = tile_rows(w1, row + tile * 8 + own, K, KIND, HEIGHT)
    other, _ = tile_rows(w3, row + tile * 8 + own, K, KIND, HEIGHT)
    return gl.where(half == 0, first, other), place


@gluon.jit
def _store_gated(found, factors, limit, to, begins, first, size, TILES: gl.constexpr):
    """Store the gated products of w1 and w3, [TILES * 16, 2], times a factor for each token."""
    gate, up = gl.split(gl.permute(gl.reshape(found, [TILES, 2, 8, 2]), (0, 2, 3, 1)))
    dtype: gl.constexpr = to.dtype.element_ty
    values = gated_values(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), limit)
    values = gl.reshape(values, [TILES * 8, 2])
    held: gl.constexpr = values.type.layout
    _store(values * _of_tokens(factors, held), to, begins, first, size)


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
    TILES: gl.constexpr,
    PARTS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number, first = gl.program_id(1) - SHARED, gl.program_id(0) * (TILES * 8)
    places = ()
    for token in gl.static_range(COUNT):
        places += (gl.to_tensor(token).to(gl.int64) * x_row,)
    # before the wait: see `outputs`
    digits = digits_of(x, places, K, TILES, PARTS, EACH, ".cg")
    if number < 0:
        tokens, begins, factors = (), (), ()
        for token in gl.static_range(COUNT):
            tokens += (token,)
            begins += (gl.to_tensor(COUNT * PER_TOKEN + token).to(gl.int64) * N,)
            factors += (1.0,)
        rows = _rows_of_both(own_w1, own_w3, first, K, OWN_KIND, OWN_HEIGHT, TILES, PARTS)
        words = pass_words(rows, 0, K, OWN_KIND, OWN_HEIGHT, TILES, PARTS, EACH)
        wait_for_inputs(OVERLAP)
        found = products(
            words, rows, digits, tokens, own_table, K, OWN_KIND, OWN_HEIGHT, TILES, PARTS, EACH
        )  # fmt: skip
        _store_gated(found, factors, limit, inner, begins, first, COUNT, TILES)
    else:
        wait_for_inputs(OVERLAP)
        expert, start, size = _tile(number, tile_row, order, tile_start, tile_size)
        if size > 0:
            tokens, begins, factors = (), (), ()
            for column in gl.static_range(COUNT):
                # missing pairs repeat the last one
                position = start + gl.minimum(column, size - 1)
                pair = _pair(order, position)
                tokens += (pair // PER_TOKEN,)
                begins += (position.to(gl.int64) * N,)
                factors += (gl.load(routing + pair),)
            rows = _rows_of_both(w1, w3, expert * N + first, K, KIND, HEIGHT, TILES, PARTS)
            words = pass_words(rows, 0, K, KIND, HEIGHT, TILES, PARTS, EACH)
            found = products(words, rows, digits, tokens, table, K, KIND, HEIGHT, TILES, PARTS, EACH)
            _store_gated(found, factors, limit, inner, begins, first, size, TILES)


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
    PARTS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    number, first = gl.program_id(1) - SHARED, gl.program_id(0) * (TILES * 16)
    row = first + operand_rows(TILES, PARTS)
    if number < 0:
        places, begins, tokens = (), (), ()
        for token in gl.static_range(COUNT):
            position = gl.to_tensor(COUNT * PER_TOKEN + token).to(gl.int64)
            places += (position * K,)
            begins += (position * N,)
            tokens += (token,)
        rows = tile_rows(own_w2, row, K, OWN_KIND, OWN_HEIGHT)
        words = pass_words(rows, 0, K, OWN_KIND, OWN_HEIGHT, TILES, PARTS, EACH)
        wait_for_inputs(OVERLAP)
        digits = digits_of(inner, places, K, TILES, PARTS, EACH, "")
        found = products(
            words, rows, digits, tokens, own_table, K, OWN_KIND, OWN_HEIGHT, TILES, PARTS, EACH
        )  # fmt: skip
        _store(found, outputs, begins, first, COUNT)
    else:
        expert, start, size = _tile(number, tile_row, order, tile_start, tile_size)
        if size > 0:
            places, begins, tokens = (), (), ()
            for column in gl.static_range(COUNT):
                position = start + gl.minimum(column, size - 1)
                places += (position.to(gl.int64) * K,)
                begins += (_pair(order, position).to(gl.int64) * N,)
                tokens += (column,)
            rows = tile_rows(w2, expert * N + row, K, KIND, HEIGHT)
            words = pass_words(rows, 0, K, KIND, HEIGHT, TILES, PARTS, EACH)
            wait_for_inputs(OVERLAP)
            digits = digits_of(inner, places, K, TILES, PARTS, EACH, "")
            found = products(words, rows, digits, tokens, table, K, KIND, HEIGHT, TILES, PARTS, EACH)
            _store(found, outputs, begins, first, size)
        else:
            wait_for_inputs(OVERLAP)
