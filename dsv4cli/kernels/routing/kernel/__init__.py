"""The router in Triton: one launch computes logits, split over experts and columns; a second selects and weighs.

For a few tokens a single launch does both.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from dsv4cli.kernels.card import stages_that_fit
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.routing.kernel.fused import FEW, fused_route, with_products
from dsv4cli.kernels.routing.kernel.topk import best_of, score_of, store_choice
from dsv4cli.kernels.rows import planned_rows, rows
from dsv4cli.kernels.workspace import words

# the most tokens for which a hash layer reads only the weight rows of the selected experts, one token per program
GATHERED_TOKENS = 512


class FusedRouteTiles(NamedTuple):
    """Tile sizes of a program that sums logits in the single launch: tokens, experts, columns."""

    tokens: int
    experts: int
    block: int
    warps: int


def fused_tiles(count: int) -> FusedRouteTiles:
    """Return the tile sizes, measured on an H200 with 256 experts and a width of 4096."""
    return FusedRouteTiles(1, 1, 1024, 1) if planned_rows(count, 1) == 1 else FusedRouteTiles(16, 16, 512, 1)


class LogitTiles(NamedTuple):
    """Tile sizes of a program of `_logits`: tokens, experts, columns per iteration; and the programs per sum."""

    tokens: int
    experts: int
    block: int
    splits: int
    warps: int
    stages: int


def logit_tiles(count: int, device: torch.device) -> LogitTiles:
    """Return the tile sizes, measured on an H200 with 256 experts and a width of 4096."""
    for most, tile in (
        (32, LogitTiles(16, 16, 512, 8, 4, 1)),
        (128, LogitTiles(32, 64, 128, 16, 4, 2)),
        (256, LogitTiles(64, 64, 64, 8, 4, 4)),
        (512, LogitTiles(64, 64, 64, 4, 4, 6)),
        (2048, LogitTiles(64, 64, 128, 2, 4, 3)),
    ):
        if count <= most:
            return tile
    # bytes of a pipeline stage: 64 bf16 columns of 128 tokens and 128 experts
    return LogitTiles(128, 128, 64, 2, 8, stages_that_fit(device, 5, 32 << 10))


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x) <= FEW:
        return _routed(x, weight, bias, k, route_scale, routed)
    experts = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    return experts, _select(_parts(x, weight, routed), bias, experts, None, routed, route_scale)


def route_by_id(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    experts = torch.empty(len(x), table.shape[1], dtype=torch.int64, device=x.device)
    if len(x) > GATHERED_TOKENS:
        by_id = table.contiguous(), ids.contiguous()
        return experts, _select(_parts(x, weight, routed), None, experts, by_id, routed, route_scale)
    given, (count, k) = rows(x), experts.shape
    weights = torch.empty(count, k, device=x.device)
    if count:
        _gathered[(count,)](
            given, weight.contiguous(), table.contiguous(), ids.contiguous(), routed, experts, weights,
            given.stride(0), route_scale,
            given.shape[1], k, next_power_of_2(k), min(4096, next_power_of_2(given.shape[1])),
            num_warps=8, **overlap(x),
        )  # fmt: skip
    return experts, weights


def _routed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    route_scale: float,
    routed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    given, (count, width), number, tile = rows(x), x.shape, len(weight), fused_tiles(len(x))
    experts = torch.empty(count, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(count, k, device=x.device)
    block = min(tile.block, max(16, next_power_of_2(width)))
    splits = cdiv(width, block)
    every = max(next_power_of_2(number), 32 * tile.warps)  # at least one word of `take` per thread
    if count:
        fused_route[(cdiv(number, tile.experts) * splits + count,)](
            given, weight.contiguous(), bias, words(x.device, FEW, splits, number), routed, experts, weights,
            count, given.stride(0), route_scale,
            number, width, splits, next_power_of_2(splits), k, every, next_power_of_2(k),
            tile.tokens, tile.experts, block, num_warps=tile.warps, **overlap(x),
        )  # fmt: skip
    return experts, weights


def _parts(x: torch.Tensor, weight: torch.Tensor, routed: torch.Tensor | None) -> torch.Tensor:
    """Return the logits as partial sums over the columns, fp32 [splits, T, E]."""
    given, (count, width), number = rows(x), x.shape, len(weight)
    tile = logit_tiles(count, x.device)
    columns = cdiv(cdiv(width, tile.splits), tile.block) * tile.block
    parts = torch.empty(cdiv(width, columns), count, number, device=x.device)
    if count:
        _logits[(cdiv(number, tile.experts), cdiv(count, tile.tokens), len(parts))](
            given, weight.contiguous(), routed, parts, count, given.stride(0),
            number, width, columns, tile.tokens, tile.experts, tile.block,
            num_warps=tile.warps, num_stages=tile.stages, **overlap(x),
        )  # fmt: skip
    return parts


@launched(do_not_specialize=["count"])
def _logits(
    x,  # [count, WIDTH]
    weight,  # [NUMBER, WIDTH]
    routed,  # [count] the row of x of each token, or None
    parts,  # [splits, count, NUMBER]
    count,
    stride,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)[:, None]
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    first = tl.program_id(2) * COLUMNS
    row = token if routed is None else tl.load(routed + token, token < count, other=0, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    sums = tl.zeros([EXPERTS, TOKENS], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = first + start + tl.arange(0, BLOCK)[None]
        place = x + row.to(tl.int64) * stride + column
        values = tl.load(place, (token < count) & (column < WIDTH), other=0.0)  # [TOKENS, BLOCK]
        factors = tl.load(weight + expert * WIDTH + column, (expert < NUMBER) & (column < WIDTH), other=0.0)
        sums = with_products(sums, factors, values)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)[None]
    place = parts + (tl.program_id(2) * count.to(tl.int64) + token) * NUMBER + expert
    tl.store(place, tl.trans(sums), (token < count) & (expert < NUMBER))


def _select(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    by_id: tuple[torch.Tensor, torch.Tensor] | None,
    routed: torch.Tensor | None,
    route_scale: float,
) -> torch.Tensor:
    """Write the experts, selected by biased score or, given (table, ids), by token id; return their weights."""
    (splits, count, number), k = parts.shape, experts.shape[1]
    weights = torch.empty(count, k, device=parts.device)
    table, ids = by_id or (experts, experts)
    if count:
        _choose[(count,)](
            parts, parts if bias is None else bias, table, ids, None if by_id is None else routed, experts,
            weights, count, route_scale,
            number, splits, k, next_power_of_2(number), next_power_of_2(k),
            by_id is not None, num_warps=1, **overlap(parts),
        )  # fmt: skip
    return weights


@launched(do_not_specialize=["count"])
def _choose(
    parts,  # [SPLITS, count, NUMBER]
    bias,  # [NUMBER]
    table,  # [ids, K]
    ids,  # [count]
    routed,  # [count] the row of the ids of each token, or None
    experts,  # [count, K]
    weights,  # [count, K]
    count,
    route_scale,
    NUMBER: tl.constexpr,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,  # NUMBER, rounded up
    PLACES: tl.constexpr,  # K, rounded up
    BY_ID: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    wait_for_inputs(OVERLAP)
    logits = tl.zeros([EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        row = parts + (split * count.to(tl.int64) + token) * NUMBER
        logits += tl.load(row + expert, expert < NUMBER, other=0.0)
    scores = score_of(logits)
    if BY_ID:
        own = token if routed is None else tl.load(routed + token)
        row = table + tl.load(ids + own) * K + place
        chosen = tl.load(row, place < K, other=0).to(tl.int32)
        bits = tl.where(chosen[:, None] == expert[None], scores.to(tl.int32, bitcast=True)[None], 0)
        values = tl.sum(bits, 1).to(tl.float32, bitcast=True)
    else:
        biased = scores + tl.load(bias + expert, expert < NUMBER, other=0.0)
        chosen, values = best_of(scores, biased, NUMBER, K, PLACES)
    store_choice(experts, weights, token, chosen, values, route_scale, K)


@launched
def _gathered(
    x,  # [count, WIDTH]
    weight,  # [experts, WIDTH]
    table,  # [ids, K]
    ids,  # [count]
    routed,  # [count] the row of x and of the ids of each token, or None
    experts,  # [count, K]
    weights,  # [count, K]
    stride,
    route_scale,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,  # K, rounded up
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    row = token if routed is None else tl.load(routed + token, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    chosen = tl.load(table + tl.load(ids + row) * K + place, place < K, other=0)
    sums = tl.zeros([PLACES, BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * stride + column, column < WIDTH, other=0.0).to(tl.float32)
        place_inside = (place < K)[:, None] & (column < WIDTH)[None]
        factors = tl.load(weight + chosen[:, None] * WIDTH + column[None], place_inside, other=0.0)
        sums += factors.to(tl.float32) * values[None]
    store_choice(experts, weights, token, chosen, score_of(tl.sum(sums, 1)), route_scale, K)
