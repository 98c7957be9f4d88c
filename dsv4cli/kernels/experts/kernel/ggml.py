"""Routed experts over GGUF blocks, decoded in registers.

`up` computes the gated product of w1 and w3 for some rows and the pairs (token, expert) of one expert, `down` computes
w2; a third launch sums over a token's experts. Tiles of few pairs multiply codes, larger ones values. On Hopper,
`ggml_hopper` computes the experts of many tokens, and `ggml_int8` those of one token or two.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import fp8_round
from dsv4cli.kernels.experts.kernel import ggml_hopper
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.experts.kernel.sort_by_expert import group
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel.ggml import TILE_OCTETS, TILE_ROWS, TILE_WARPS, splits, suits_few
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.kernel.octets import blocks_of, has_codes
from dsv4cli.kernels.ggml.kernel.products import ROWS, few_products, many_products, operand_rows, operand_tokens
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.rows import rows

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# programs for a token's experts, roughly: the sums of a token must not depend on the number of tokens
PROGRAMS = 1024
# most pairs in a tile that `few_products` multiplies
FEW = 8
# pairs in a full tile, by the most pairs per expert, on average, for which tiles have this size; MOST beyond these
SIZES = {4: 8, 12: 16, 24: 32, 50: 64}
MOST = 128


def takes(weights: "ExpertWeights") -> bool:
    """Return whether some of the matrices are GGUF blocks."""
    return any(matrix.block_type is not None for matrix in weights.matrices)


def takes_int8(x: torch.Tensor, weights: "ExpertWeights", shared: "ExpertWeights | None" = None) -> bool:
    """Return whether these tokens are multiplied on int8 tensor cores, by the shared expert, too, if it is given."""
    inner, given = weights.w1.weight.shape[-2], (weights,) if shared is None else (weights, shared)
    alike = all(
        (one.block_type, one.height, one.weight.shape[-2]) == (of.w1.block_type, of.w1.height, inner)
        for of in given for one in (of.w1, of.w3)
    )  # fmt: skip
    kinds = [matrix.block_type for one in given for matrix in one.matrices]
    coded = all(kind is not None and has_codes(kind) for kind in kinds)
    return coded and alike and int8.takes(x, x.shape[1]) and int8.takes(x, inner)


def int8_outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights | None",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Return the output of each of a token's experts, then of the shared one: [T * k (+ T), D], if `takes_int8`."""
    from dsv4cli.kernels.experts.kernel import ggml_int8  # needs Gluon

    tiles = _tiles(experts, weights, int8.TOKENS)
    return ggml_int8.outputs(rows(x), weights, shared, tiles, routing.contiguous(), limit)


@dataclass(frozen=True)
class Tiles:
    """Pairs cut into tiles of one expert, as `sort_by_expert.Groups` has them.

    Attributes:
        size: most pairs in a tile.
        order, start, sizes: None for a single token, whose pairs are a tile each.
        row: each tile's row in the stacks.
    """

    number: int
    size: int
    row: torch.Tensor
    order: torch.Tensor | None = None
    start: torch.Tensor | None = None
    sizes: torch.Tensor | None = None


def routed_outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """Return the output of each of a token's experts: [T * k, D] in x's dtype. Arguments: as of `routed_experts`."""
    if ggml_hopper.suits(x, weights, experts.numel()):
        return ggml_hopper.routed_outputs(rows(x), weights, experts, routing, limit, round_inputs)
    if takes_int8(x, weights) and not round_inputs:
        return int8_outputs(x, weights, None, experts, routing, limit)
    given = fp8_round(x, FP8_BLOCK) if round_inputs else rows(x)
    pairs, width = experts.numel(), x.shape[1]
    outputs = x.new_empty(pairs, width)
    if not pairs:
        return outputs
    tiles = _tiles(experts, weights)
    inner = _up(given, weights, tiles, routing.contiguous(), limit)
    inner = fp8_round(inner, FP8_BLOCK) if round_inputs else inner
    _down(inner, weights, tiles, outputs)
    return outputs


def _tiles(experts: torch.Tensor, weights: "ExpertWeights", most: int = MOST) -> Tiles:
    """Return tiles of up to `most` pairs."""
    (tokens, _), pairs, count = experts.shape, experts.numel(), weights.count
    if tokens == 1:
        chosen = experts.flatten()
        return Tiles(pairs, 1, chosen if weights.rows is None else weights.rows[chosen])
    size = min(next((size for load, size in SIZES.items() if pairs <= load * count), MOST), most)
    groups = group(experts, weights.rows, count, size)
    return Tiles(len(groups.rows), size, groups.row, groups.order, groups.start, groups.rows)


def _up(x: torch.Tensor, weights: "ExpertWeights", tiles: Tiles, routing: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the gated product of w1 and w3, times the routing weight: [P, I] in the order of positions."""
    w1, w3, count = blocks_of(weights.w1), blocks_of(weights.w3), weights.w1.weight.shape[-2]
    inner = x.new_empty(routing.numel(), count)
    shape = _shape(x, tiles.size, w1.kind, w3.kind)
    _up_kernel[(cdiv(count, shape.rows), tiles.number)](
        x, (w1.rows, w3.rows), (w1.table, w3.table), tiles.row, tiles.order, tiles.start, tiles.sizes, routing, inner,
        x.stride(0), limit, count, x.shape[1], routing.shape[1], w1.kind, w3.kind, w1.height, w3.height, *shape,
        num_warps=shape.warps, **overlap(x),
    )  # fmt: skip
    return inner


def _down(inner: torch.Tensor, weights: "ExpertWeights", tiles: Tiles, outputs: torch.Tensor) -> None:
    w2, count = blocks_of(weights.w2), outputs.shape[1]
    shape = _shape(inner, tiles.size, w2.kind)
    _down_kernel[(cdiv(count, shape.rows), tiles.number)](
        inner, (w2.rows,), (w2.table,), tiles.row, tiles.order, tiles.start, tiles.sizes, outputs, count,
        inner.shape[1], w2.kind, w2.height, *shape, num_warps=shape.warps, **overlap(inner),
    )  # fmt: skip


class Shape(NamedTuple):
    """The shape of a program: rows, columns of pairs, warps, and groups of 32 columns or octets at a time."""

    rows: int
    pairs: int
    warps: int
    each: int
    few: bool


def _shape(x: torch.Tensor, size: int, *kinds: str) -> Shape:
    """Return the shape for tiles of `size` pairs."""
    if size <= FEW and all(suits_few(x, kind) for kind in kinds):
        return Shape(ROWS, 8, *splits(x.shape[1], PROGRAMS), few=True)
    return Shape(TILE_ROWS, max(size, 16), TILE_WARPS, math.gcd(x.shape[1] // 8, TILE_OCTETS), few=False)


@triton.jit
def _tile(number, rows, order, starts, sizes):
    """Return a tile's row in the stacks, its first position, and its number of pairs."""
    start, size = number, 1
    if order is not None:
        start, size = tl.load(starts + number), tl.load(sizes + number)
    return tl.load(rows + number).to(tl.int64), start, size


@triton.jit
def _pair(order, position):
    """Return the pair at a position."""
    pair = position
    if order is not None:
        pair = tl.load(order + position)
    return pair


@launched
def _up_kernel(
    x,  # [T, K]
    weights,  # blocks of w1 and w3 [E, N, K]
    tables,
    tile_row,
    order,  # pairs by expert, and the tiles of them; None if each pair is a tile
    tile_start,
    tile_size,
    routing,  # fp32 [T, PER_TOKEN]
    inner,  # [P, N] in the order of positions
    x_row,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    W1: tl.constexpr,  # types
    W3: tl.constexpr,
    HEIGHT1: tl.constexpr,  # rows of a tile of blocks
    HEIGHT3: tl.constexpr,
    ROWS: tl.constexpr,  # of Shape, as those below
    PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    IS_FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, size = _tile(tl.program_id(1), tile_row, order, tile_start, tile_size)
    first, column = tl.program_id(0) * ROWS, tl.arange(0, PAIRS)
    # missing rows and pairs repeat the last one
    row, position = first + tl.arange(0, ROWS), start + tl.minimum(column, size - 1)
    begin = expert * N
    if size > 0:
        if IS_FEW:
            token = _pair(order, start + tl.minimum(operand_tokens(PAIRS, WARPS), size - 1)) // PER_TOKEN
            own = begin + tl.minimum(first + operand_rows(WARPS), N - 1)
            gate, up = few_products(
                x, token.to(tl.int64) * x_row, weights, tables, own, K, (W1, W3), (HEIGHT1, HEIGHT3), WARPS, EACH, False
            )
        else:
            place = (_pair(order, position) // PER_TOKEN).to(tl.int64) * x_row
            own = begin + tl.minimum(row, N - 1)
            gate = many_products(x, place, weights[0], tables[0], own, K, W1, HEIGHT1, EACH)
            up = many_products(x, place, weights[1], tables[1], own, K, W3, HEIGHT3, EACH)
        factor = tl.load(routing + _pair(order, position))[None]
        dtype: tl.constexpr = inner.dtype.element_ty
        values = gated_values(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), limit) * factor
        to = inner + position.to(tl.int64)[None] * N + row[:, None]
        tl.store(to, values.to(dtype), (column < size)[None] & (row < N)[:, None])


@launched
def _down_kernel(
    inner,  # [P, K] in the order of positions
    weights,  # blocks of w2 [E, N, K]
    tables,
    tile_row,
    order,
    tile_start,
    tile_size,
    outputs,  # [P, N] by pair
    N: tl.constexpr,
    K: tl.constexpr,
    W2: tl.constexpr,  # the type
    HEIGHT: tl.constexpr,  # rows of a tile of blocks
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    IS_FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, size = _tile(tl.program_id(1), tile_row, order, tile_start, tile_size)
    first, column = tl.program_id(0) * ROWS, tl.arange(0, PAIRS)
    row, position = first + tl.arange(0, ROWS), start + tl.minimum(column, size - 1)
    begin = expert * N
    if size > 0:
        if IS_FEW:
            place = (start + tl.minimum(operand_tokens(PAIRS, WARPS), size - 1)).to(tl.int64) * K
            own = begin + tl.minimum(first + operand_rows(WARPS), N - 1)
            (sums,) = few_products(inner, place, weights, tables, own, K, (W2,), (HEIGHT,), WARPS, EACH, False)
        else:
            own = begin + tl.minimum(row, N - 1)
            sums = many_products(inner, position.to(tl.int64) * K, weights[0], tables[0], own, K, W2, HEIGHT, EACH)
        to = outputs + _pair(order, position).to(tl.int64)[None] * N + row[:, None]
        tl.store(to, sums.to(outputs.dtype.element_ty), (column < size)[None] & (row < N)[:, None])
