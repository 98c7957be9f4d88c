"""Hyper-connections in Triton: two launches, one over columns (mix, project), one over tokens (weights, collapse).

The projection of all streams is a sum over N * D columns. The first launch distributes it over programs, each of which
stores its part of the sums and of the squares. The second adds the parts in a fixed order, so results are
deterministic. Few tokens take one launch, in which some programs do the work of the second. On Hopper, the first launch
of many tokens is `warp_specialized`.
"""

from typing import NamedTuple

import torch

from dsv4cli.kernels.card import stages_that_fit
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.hyper_connections.kernel import hopper
from dsv4cli.kernels.hyper_connections.kernel.combine import weigh_and_collapse
from dsv4cli.kernels.hyper_connections.kernel.fused import FEW, fused_connect
from dsv4cli.kernels.hyper_connections.kernel.project import mix_and_project, split_weights
from dsv4cli.kernels.hyper_connections.types import Connection
from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.pdl import overlap_of_few
from dsv4cli.kernels.rows import LONGEST, ROWS_EXACT, rows
from dsv4cli.kernels.workspace import words

# tokens whose post and comb one program of `weigh_and_collapse` computes, if their projections have few parts
WEIGHED_TOKENS = 8
# fewest tokens of a program for which splitting the weights into bf16 parts in advance is faster
SPLIT_TOKENS = 64


class SublayerOutput(NamedTuple):
    """A sublayer's output and the weights that mix it into the streams: x [T, D], post [T, N], comb [T, N, N]."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class FusedConnectTiles(NamedTuple):
    """Tokens, columns and warps of a projecting program in the single launch. tokens 0: one token and one stream."""

    tokens: int
    block: int
    warps: int


def fused_tiles(count: int) -> FusedConnectTiles:
    """Return the tiles of the single launch, measured on an H200 at a width of 4096.

    Eight tokens take the same time either way, and are summed in the order of a single token.
    """
    return FusedConnectTiles(0, 128, 8) if count <= ROWS_EXACT else FusedConnectTiles(16, 32, 8)


class ProjectTiles(NamedTuple):
    """Tokens, columns in all and per step (block), warps and stages of a program of the first of two launches."""

    tokens: int
    columns: int
    block: int
    warps: int
    stages: int


def project_tiles(count: int, width: int, projected: bool, device: torch.device) -> ProjectTiles:
    """Return the tiles of the first of two launches, measured on an H200 at a width of 4096."""
    if not projected:
        return ProjectTiles(1, 1024, 1024, 4, 1)
    for most, tile in (
        (64, ProjectTiles(32, 32, 32, 4, 1)),
        (128, ProjectTiles(32, 64, 32, 4, 1)),
        (256, ProjectTiles(64, 128, 32, 4, 2)),
    ):
        if count <= most:
            return tile
    # as many programs as multiprocessors, or a little fewer
    share = min(width * cdiv(count, 64) // 128, width)
    # bytes of a stage: bf16 of four streams and an output for 64 tokens, and four times 32 rows of weights per stream
    return ProjectTiles(64, cdiv(share, 32) * 32, 32, 8, stages_that_fit(device, 4, 52 << 10))


def connect_pre(streams: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _connected(streams, None, connection, None)[1:]


def connect_post_pre(
    x: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    connection: Connection,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _connected(streams, SublayerOutput(x, post, comb), connection, norm_weight)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    _check(streams)
    mixed = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    _sweep(streams, None, SublayerOutput(x, post, comb), mixed)
    return mixed


def connect_head(streams: torch.Tensor, connection: Connection) -> torch.Tensor:
    return _connected(streams, None, connection, None)[1]


def _connected(
    streams: torch.Tensor, output: SublayerOutput | None, connection: Connection, norm: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the streams, the collapsed streams, post and comb.

    The streams are mixed with `output` if there is one, the collapsed streams normed if there is a norm (its weight).
    """
    _check(streams)
    mixed = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device) if output else streams
    if len(streams) <= FEW:
        return mixed, *_fused(streams, output, connection, norm, mixed)
    parts = _sweep(streams, connection.fn, output, mixed)
    return mixed, *_collapsed(mixed, parts, connection, norm)


def _fused(
    streams: torch.Tensor,
    output: SublayerOutput | None,
    connection: Connection,
    norm: torch.Tensor | None,
    mixed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (count, number, width), fn, base, iterations = streams.shape, connection.fn, connection.base, connection.iterations
    y, post, comb = _results(streams, iterations)
    tile, slots = fused_tiles(count), next_power_of_2(len(fn) + 1)
    splits = cdiv(width, tile.block) * (1 if tile.tokens else number)
    x, old_post, old_comb = output or (streams[:, 0], base, base)
    given, options = rows(x), overlap_of_few(streams, count)
    left = words(streams.device, 2, FEW, splits, slots)
    parts = max(next_power_of_2(splits), 32 * tile.warps // slots)  # at least one word of `take` per thread
    if output and options["OVERLAP"] and tile.tokens == 0 and count > 1 and width <= 4096:
        options["maxnreg"] = 128  # two programs per multiprocessor; wider streams would spill
    if count:
        projecting, weighing = splits * (1 if tile.tokens else count), count if iterations else 0
        fused_connect[(projecting + weighing + count,)](
            given, streams, old_post.contiguous(), old_comb.contiguous(), fn.contiguous(), connection.scale, base,
            y if norm is None else norm.contiguous(), mixed, y, post, comb, left,
            count, given.stride(0), *streams.stride()[:2], connection.hc_eps, connection.norm_eps,
            iterations, number, width, len(fn), slots, splits, parts, tile.tokens, tile.block,
            next_power_of_2(width), bool(output), norm is not None,
            num_warps=tile.warps, **options,
        )  # fmt: skip
    return y, post, comb


def _results(streams: torch.Tensor, iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the collapsed streams, post and comb; the last two are empty without iterations."""
    count, number, width = streams.shape
    weighed = count if iterations else 0
    post = streams.new_empty(weighed, number, dtype=torch.float32)
    comb = streams.new_empty(weighed, number, number, dtype=torch.float32)
    return torch.empty(count, width, dtype=streams.dtype, device=streams.device), post, comb


def _sweep(
    streams: torch.Tensor,
    fn: torch.Tensor | None,
    output: SublayerOutput | None,
    mixed: torch.Tensor,
) -> torch.Tensor:
    """Project the streams; if there is an output, mix it in first and store the streams in `mixed`.

    Returns fp32 [splits, T, S]: rows of fn, then the sum of squares, with S >= rows + 1.
    """
    count, number, width = streams.shape
    lines = 0 if fn is None else len(fn)
    if fn is not None and output and hopper.suits(rows(output.x), streams, lines):
        given, post, comb = rows(output.x), output.post.contiguous(), output.comb.contiguous()
        return hopper.mixed_and_projected(given, streams, post, comb, _split(fn.contiguous()), mixed)
    tile, slots = project_tiles(count, width, bool(lines), streams.device), next_power_of_2(lines + 1)
    splits = cdiv(width, tile.columns)
    parts = streams.new_empty(splits if lines else 0, count, slots, dtype=torch.float32)
    x, post, comb = output or (streams, parts, parts)
    given, weights = rows(x) if output else streams, parts if fn is None else fn.contiguous()
    split = tile.tokens >= SPLIT_TOKENS and bool(lines) and streams.dtype == torch.bfloat16
    tensors = given, streams, post.contiguous(), comb.contiguous(), _split(weights) if split else weights, mixed, parts
    if count:
        mix_and_project[(cdiv(count, tile.tokens), splits)](
            *tensors, count, given.stride(0), *streams.stride()[:2], tile.columns, number, width, lines, slots,
            4 if split else 1, tile.tokens, tile.block, bool(output),
            num_warps=tile.warps, num_stages=tile.stages, **overlap_of_few(streams, count),
        )  # fmt: skip
    return parts


def _split(fn: torch.Tensor) -> torch.Tensor:
    """Split fp32 into three bf16 numbers whose sum it is: [3, ...]."""
    parts = fn.new_empty(3, *fn.shape, dtype=torch.bfloat16)
    split_weights[(cdiv(fn.numel(), 1024),)](fn, parts, fn.numel(), 1024, num_warps=4)
    return parts


def _check(streams: torch.Tensor) -> None:
    _, number, width = streams.shape
    rows(streams[:, 0])
    if number & (number - 1):
        raise KernelUnsupported(f"the Triton hyper-connections require a power of two of streams, not {number}")
    if width > LONGEST:
        raise KernelUnsupported(f"the Triton hyper-connections support streams of up to {LONGEST} values, not {width}")


def _collapsed(
    streams: torch.Tensor, parts: torch.Tensor, connection: Connection, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the collapsed streams, normed if there is a weight; post; and comb."""
    (count, number, width), base, iterations = streams.shape, connection.base, connection.iterations
    x, post, comb = _results(streams, iterations)
    tokens = 1 if len(parts) > 8 else WEIGHED_TOKENS
    weighers = cdiv(len(post), tokens)
    if count:
        weigh_and_collapse[(weighers + count,)](
            streams, parts, connection.scale, base, x if weight is None else weight.contiguous(), x, post, comb,
            count, weighers, len(parts), *streams.stride()[:2], connection.hc_eps, connection.norm_eps,
            iterations, number, width, len(base), parts.shape[2], next_power_of_2(len(parts)),
            tokens, next_power_of_2(width), weight is not None, num_warps=4,
            **overlap_of_few(streams, count),
        )  # fmt: skip
    return x, post, comb
