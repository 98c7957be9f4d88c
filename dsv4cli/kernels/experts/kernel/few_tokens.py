"""Routed experts, with or without the shared one, for few tokens: weights are read once, in three or four launches.

`prepare` rounds and arranges the inputs and sorts the pairs (token, expert) by expert. A program of `up` (w1 and w3) or
`down` (w2) computes some rows of a matrix: few_tokens_gemm.py for a few tokens of one expert, one_token_gemm.py for one
token, which needs no sorting, and whose sum over experts `down` computes in registers. `add` sums over experts for
several tokens. The launches overlap (`wait_for_inputs`): weights are loaded while the previous launch still runs; the
shared expert's at once, those of routed experts if routing or sorting was finished before that launch.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsv4cli.kernels.experts.kernel import few_tokens_gemm, few_tokens_prepare, one_token_gemm
from dsv4cli.kernels.experts.kernel.dequant_mma import FEWEST_ROWS, FP4_TOKENS, FP8_TOKENS
from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.pdl import overlap
from dsv4cli.kernels.rows import planned_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# dtype that holds the scales of 128 columns: four for FP4, eight for NVFP4, one for FP8
SCALE_WORDS = {torch.int8: torch.int32, torch.uint8: torch.int64, torch.float8_e4m3fn: torch.uint8}
# columns of a token that a program of `add` sums
COLUMNS = 512


class ProductTiles(NamedTuple):
    """Rows, warps, prefetched steps, and steps per loop iteration of a program for w1 and w3, or for w2."""

    rows: int
    warps: int
    ahead: int
    each: int


class FewTokensTiles(NamedTuple):
    """Tokens of a routed and of a shared expert's chunk, and the tiles of programs for w1 and w3, and for w2."""

    chunk: int
    shared_chunk: int
    up: ProductTiles
    down: ProductTiles


class OneTokenDown(NamedTuple):
    """Tiles of a program for w2 of one token.

    Rows; prefetched steps and steps per loop iteration, for the routed experts and for the shared one.
    """

    rows: int
    ahead: int
    each: int
    shared_ahead: int
    shared_each: int


ONE_TOKEN_DOWN = OneTokenDown(16, 4, 4, 4, 4)
# most inner width for which a launch of one token has too few programs to saturate memory bandwidth
NARROW = 512
# most inner width, half of an expert, for which programs for w2 of two to four tokens compute fewer rows each
HALF = 1024
# most tokens for which chunks are not listed densely, which takes 1.8 us: few programs find an empty chunk
SPARSE = 32
FEWEST_BINS = 32
# steps per iteration without a shared expert, which leaves registers free (H200: 34.0 us instead of 35.4 us)
ALONE_EACH = 8


def routed_experts(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(_Call(x, weights, None, experts, routing, limit, round_inputs, y))
    return y


def mixture(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(_Call(x, weights, shared, experts, routing, limit, round_inputs, y))
    return y


@dataclass(frozen=True)
class _Call:
    """The arguments of a call.

    Attributes:
        y: receives the sum of the experts, including the shared one if there is one.
    """

    x: torch.Tensor
    weights: "ExpertWeights"
    shared: "ExpertWeights | None"
    experts: torch.Tensor
    routing: torch.Tensor
    limit: float
    round_inputs: bool
    y: torch.Tensor

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Hidden width, inner width, and the shared expert's inner width."""
        inner = [of.w1.weight.shape[-2] if of else 0 for of in (self.weights, self.shared)]
        return self.x.shape[1], inner[0], inner[1]

    def new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def first(self) -> tuple[torch.Tensor | None, ...]:
        """Return w1 and w3 of the routed and of the shared expert (without one, the routed twice), and their
        scale_2.
        """
        words = [_words(matrix) for of in (self.weights, self.shared or self.weights) for matrix in (of.w1, of.w3)]
        return (*chain(*words), self.weights.w1.scale_2, self.weights.w3.scale_2)

    def last(self) -> tuple[torch.Tensor | None, ...]:
        """Return w2 in the form of `first`."""
        routed = self.weights.w2
        return (*_words(routed), *_words(self.shared.w2 if self.shared else routed), routed.scale_2)


def _launch(call: _Call) -> None:
    width, inner, shared_inner = call.widths
    tiles = few_tokens_tiles(call.tokens, inner)
    up = _fitting(tiles.up, width)
    if call.tokens == 1:
        _one_token(call, up)
    else:
        _tokens(call, tiles._replace(up=up, down=_fitting(tiles.down, math.gcd(inner, shared_inner))))


def _prepare(call: _Call, chunk: int, shared_chunks: int, pairs: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs, the shared expert's inputs, the counters; and order, place and chunks of `pairs` pairs."""
    (width, inner, shared_inner), tokens = call.widths, call.tokens
    counts = call.experts.numel() * (inner // 128) + shared_chunks * (shared_inner // 128)
    order, place, counters = (call.new(n, dtype=torch.int32) for n in (pairs, pairs, counts))
    chunks = call.new(pairs, dtype=torch.int64)
    bins = max(next_power_of_2(call.weights.count), FEWEST_BINS) if call.tokens > SPARSE else 0
    small = FP4_TOKENS if chunk > FP4_TOKENS else 0
    inputs, shared_inputs = call.new(tokens, width), call.new(tokens if call.shared else 0, width)
    others = max(cdiv(counts, few_tokens_prepare.COUNTERS), cdiv(pairs, few_tokens_prepare.PAIRS))
    few_tokens_prepare.prepare[(tokens * cdiv(width, few_tokens_prepare.COLUMNS) + others,)](
        call.x, call.experts, call.weights.rows, inputs, shared_inputs, order, place, chunks, counters, tokens, pairs,
        counts, call.x.stride(0), width, chunk, call.shared is not None, call.round_inputs, few_tokens_prepare.COLUMNS,
        few_tokens_prepare.PAIRS, few_tokens_prepare.OTHERS, few_tokens_prepare.COUNTERS, small, bins,
        **overlap(call.x),
    )  # fmt: skip
    return inputs, shared_inputs, counters, order, place, chunks


def _one_token(call: _Call, up: ProductTiles) -> None:
    (width, inner_width, shared_width), per_token = call.widths, call.experts.shape[1]
    inputs, shared_inputs, counters, *_ = _prepare(call, 1, 1 if call.shared else 0, 0)
    inner, shared_inner = call.new(2, per_token, inner_width), call.new(2, shared_width)
    one_token_gemm.up[(shared_width // up.rows + per_token * (inner_width // up.rows),)](
        inputs, shared_inputs, *call.first(), call.experts, call.weights.rows, call.routing, inner, shared_inner,
        counters, call.limit, width, inner_width, shared_width, per_token, call.round_inputs, *up, **overlap(call.x),
        num_warps=up.warps,
    )  # fmt: skip
    _down_by_token(call, inner, shared_inner, None)


def _down_by_token(call: _Call, inner: torch.Tensor, shared_inner: torch.Tensor, place: torch.Tensor | None) -> None:
    """Compute w2 for each token as if it were alone.

    place: the position of each pair in `inner`; None for one token.
    """
    (width, inner_width, shared_width), per_token = call.widths, call.experts.shape[1]
    places = next_power_of_2(per_token)
    splits = math.gcd(places, shared_width // 128)  # with few columns, several warps compute the same
    rows, ahead, each, shared_ahead, shared_each = ONE_TOKEN_DOWN
    each = each if call.shared else ALONE_EACH
    steps, shared_steps = inner_width // 128, shared_width // 64 // splits
    one_token_gemm.down[(width // rows, call.tokens)](
        inner, shared_inner, *call.last(), call.experts, call.weights.rows, place, call.y, width, inner_width,
        shared_width, per_token, places, splits, rows, min(ahead, steps), math.gcd(each, steps),
        min(shared_ahead, shared_steps), math.gcd(shared_each, shared_steps), **overlap(call.x), num_warps=places,
    )  # fmt: skip


def _tokens(call: _Call, tiles: FewTokensTiles) -> None:
    (width, inner_width, shared_width), tokens = call.widths, call.tokens
    chunk, shared_chunk, up, down = tiles
    pairs, per_token, shared_tokens = call.experts.numel(), call.experts.shape[1], tokens if call.shared else 0
    shared_chunks = cdiv(shared_tokens, shared_chunk)
    inputs, shared_inputs, counters, order, place, chunks = _prepare(call, chunk, shared_chunks, pairs)
    inner, shared_inner = call.new(2, pairs, inner_width), call.new(2, tokens, shared_width)
    few_tokens_gemm.up[(shared_chunks * (shared_width // up.rows) + pairs * (inner_width // up.rows),)](
        inputs, shared_inputs, *call.first(), call.routing, inner, shared_inner, counters, order, chunks, tokens, pairs,
        shared_chunks, call.limit, width, inner_width, shared_width, per_token, chunk, shared_chunk, call.round_inputs,
        *up, **overlap(call.x), **_registers(call.x, chunk), num_warps=up.warps,
    )  # fmt: skip
    if planned_rows(tokens, 1) == 1:
        _down_by_token(call, inner, shared_inner, place)
        return
    parts, shared_part = call.new(pairs, width), call.new(shared_tokens, width)
    few_tokens_gemm.down[(width // down.rows, shared_chunks + pairs)](
        inner, shared_inner, *call.last(), parts, shared_part, chunks, tokens, shared_chunks, width, inner_width,
        shared_width, chunk, shared_chunk, *down, **overlap(call.x), **_registers(call.x, chunk), num_warps=down.warps,
    )  # fmt: skip
    columns = math.gcd(width, COLUMNS)
    few_tokens_gemm.add[(tokens, width // columns)](
        parts, shared_part, place, call.y, width, per_token, call.shared is not None, columns, **overlap(call.x)
    )


def few_tokens_tiles(tokens: int, inner: int) -> FewTokensTiles:
    """Return tiles measured on an H200 with 6 of 256 experts of 4096-2048-4096, and with narrower inner widths.

    Inner width 1024 is one rank of two, 512 one of four. At 512, one token takes 17.9 us with eight warps and 25.3 us
    with two; 16 tokens take 97 us with two warps and 104 us with one; 64 tokens 267 us with two and 243 us with one.
    """
    narrow = inner <= NARROW
    warps = 8 if narrow and planned_rows(tokens) == 1 else 2 if tokens <= (16 if narrow else 8) else 1
    up = ProductTiles(16, warps, 2, 2)
    if tokens <= 4:
        # whole experts, four tokens: 111.6 us with 16 rows, 108.1 us with 32
        down = ProductTiles(16, 1, 2, 4) if inner <= HALF else ProductTiles(32, 1, 2, 2)
        return FewTokensTiles(FP4_TOKENS, FP8_TOKENS, up, down)
    if tokens <= 8:
        return FewTokensTiles(2 * FP4_TOKENS, FP8_TOKENS, up, ProductTiles(32, 1, 2, 2))
    # four warps that share inputs (w1 and w3 of 64 tokens: 476.5 us instead of 510.7 us)
    up = up if warps == 2 else ProductTiles(64, 4, 2, 2)
    return FewTokensTiles(2 * FP4_TOKENS, 2 * FP8_TOKENS, up, ProductTiles(128, 4, 2, 2))


def _registers(x: torch.Tensor, chunk: int) -> dict[str, int]:
    """Return launch options that limit the registers of programs with two code paths to what the shorter path needs.

    More warps then fit on a multiprocessor (H200, routed experts of 64 tokens: 862 us with the longer path's registers,
    791 us with 128).
    """
    return {"maxnreg": 128} if chunk > FP4_TOKENS and x.is_cuda and torch.version.hip is None else {}


def _fitting(tiles: ProductTiles, columns: int) -> ProductTiles:
    """Adjust warps and steps so that they divide this many columns."""
    if tiles.rows // tiles.warps >= FEWEST_ROWS.value:  # warps have rows of their own
        warps, steps = tiles.warps, columns // 128
    else:
        warps = math.gcd(tiles.warps, columns // 128)
        steps = columns // 128 // warps
    return ProductTiles(tiles.rows, warps, min(tiles.ahead, steps), math.gcd(tiles.each, steps))


def _words(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix's codes as int32 words, and the scales as words that each cover 128 columns (FP8: as bytes)."""
    weight, scale, _ = matrix
    assert scale is not None
    return weight.view(torch.int32), scale.view(SCALE_WORDS[weight.dtype])
