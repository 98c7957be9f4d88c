"""The indexer in Triton: selects the kernel and tile sizes for a shape."""

from typing import NamedTuple

import torch

from dsv4cli.kernels.card import FP8, is_from, multiprocessors
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.indexer.kernel.scores_one_token import scores_of_one_token
from dsv4cli.kernels.indexer.kernel.scores_plain import scores_of_plain_keys
from dsv4cli.kernels.indexer.kernel.scores_tiled import prepare_queries, scores_of_many_tokens
from dsv4cli.kernels.indexer.kernel.topk import choose_entries, choose_prefiltered, takes_prefilter, top_entries
from dsv4cli.kernels.indexer.types import IndexEntries, IndexKeys, IndexQueries, WindowList
from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.pdl import overlap, overlap_beside
from dsv4cli.kernels.rows import planned_rows

__all__ = ["best_entries", "choose_entries", "index_scores", "top_entries"]

# fewest tokens per sequence for which a tile of keys is unpacked once for several tokens; more than a draft step has
# (H200, eight tokens, 1,024 keys: 12.7 us, and 4.0 us with one token per program)
MANY = 16
# keys of a tile for many tokens, with 4 warps and 3 stages (H200, 4,096 tokens and 8,192 keys: 859 us; 64 keys instead
# of 128 take 970, eight warps 1,043, two stages 894)
MANY_KEYS = 128


def index_scores(queries: IndexQueries, keys: IndexKeys, entries: IndexEntries) -> torch.Tensor:
    _check(queries, keys, entries.table)
    q, count = queries.q, entries.table.shape[1]
    # rows are aligned and padded for the wide loads of top_entries
    out = torch.empty(q.shape[0], cdiv(count, 64) * 64, dtype=q.dtype, device=q.device)[:, :count]
    if not out.numel():
        return out
    if keys.scale is None:
        _score_plain(out, queries, keys, entries)
    else:
        tokens = q.shape[0] if entries.tokens is None else entries.tokens
        score = _score_many if tokens >= MANY * entries.table.shape[0] else _score_few
        score(out, queries, _words(keys.keys, keys.scale), entries)
    return out


def _words(keys: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP4 codes as int32 words and their scales as bytes."""
    return keys.view(torch.int32), scale.view(torch.uint8)


def _check(queries: IndexQueries, stored: IndexKeys, table: torch.Tensor) -> None:
    q, weights, keys, key_scale = queries.q, queries.weights, stored.keys, stored.scale
    width = q.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float32) or weights.dtype != q.dtype:
        raise KernelUnsupported(f"the Triton indexer takes bf16 or fp32, not {q.dtype} with weights {weights.dtype}")
    if key_scale is None and keys.dtype != q.dtype:
        raise KernelUnsupported(f"the Triton indexer takes keys like the queries, {q.dtype}, not {keys.dtype}")
    if key_scale is not None and (q.dtype != torch.bfloat16 or width % FP4_BLOCK or width & (width - 1)):
        raise KernelUnsupported(
            f"the Triton indexer takes FP4 keys with bf16 queries of a power of two columns, not {q.dtype} and {width}"
        )
    parts = (q[0] if len(q) else q, keys, *(() if key_scale is None else (key_scale,)))
    if not all(part.is_contiguous() for part in parts) or table.stride(-1) != 1 or weights.stride(-1) != 1:
        raise KernelUnsupported("the Triton indexer takes queries, keys and tables with consecutive columns")


def _score_plain(out: torch.Tensor, queries: IndexQueries, keys: IndexKeys, entries: IndexEntries) -> None:
    q, weights, table = queries.q, queries.weights, entries.table
    (tokens, heads, width), count, rows = q.shape, table.shape[1], 64
    scores_of_plain_keys[(tokens, cdiv(count, rows))](
        q, weights, queries.weight_scale, keys.keys, table, entries.sequence, entries.visible, out, count, q.stride(0),
        weights.stride(0), table.stride(0), out.stride(0), heads, width, max(16, next_power_of_2(heads)),
        max(16, next_power_of_2(width)), rows, num_warps=4, **overlap(q),
    )  # fmt: skip


def _score_few(
    out: torch.Tensor,
    queries: IndexQueries,
    words: tuple[torch.Tensor, torch.Tensor],
    entries: IndexEntries,
    found: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Score a few tokens. found: output tensors (peaks, counts) for `choose_prefiltered`, or None."""
    q, weights, table = queries.q, queries.weights, entries.table
    (tokens, heads, width), count = q.shape, table.shape[1]
    rows, splits, warps = one_token_tiles(tokens, count)
    peaks, counts = found or (out, out)
    # four programs of 128 threads leave 8,192 registers of a multiprocessor for a program of keep_high
    options = overlap_beside(q, 112) if found and rows == 64 else overlap(q)
    scores_of_one_token[(tokens, splits)](
        q, weights, queries.weight_scale, *words, table, entries.sequence, entries.visible, out, peaks, counts, count,
        splits, q.stride(0), weights.stride(0), table.stride(0), out.stride(0), peaks.stride(0), heads, width,
        max(16, next_power_of_2(heads)), rows, found is not None, num_warps=warps, **options,
    )  # fmt: skip


def best_entries(
    queries: IndexQueries, keys: IndexKeys, k: int, entries: IndexEntries, window: WindowList
) -> torch.Tensor:
    q, tokens, count = queries.q, len(queries.q), entries.table.shape[1]
    if keys.scale is None or not takes_prefilter(tokens, count, k):
        return choose_entries(index_scores(queries, keys, entries), k, entries, window)
    _check(queries, keys, entries.table)
    # scores and peaks are aligned and padded for wide loads
    wide = cdiv(count, 128) * 128
    both = torch.empty(tokens, wide + wide // 8, dtype=q.dtype, device=q.device)
    scores, peaks = both[:, :count], both[:, wide:]
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    _score_few(scores, queries, _words(keys.keys, keys.scale), entries, (peaks, counts))
    return choose_prefiltered(scores, peaks, counts, k, entries, window)


class OneTokenTiles(NamedTuple):
    """Keys per tile, programs per token, warps per program."""

    keys: int
    splits: int
    warps: int


def one_token_tiles(tokens: int, entries: int) -> OneTokenTiles:
    """Return the tile sizes. An H200 runs four programs of 64 keys per multiprocessor, or three of 128.

    One token, 8,192 keys: 3.3 us with 64 (3.9 with 128); 262,144 keys: 20.8 us with 128 (21.3 with 64).
    """
    rows, programs = (128, 396) if planned_rows(tokens, 1) * entries >= 131_072 else (64, 528)
    return OneTokenTiles(rows, min(cdiv(entries, rows), max(1, programs // tokens)), 4)


def _score_many(
    out: torch.Tensor, queries: IndexQueries, words: tuple[torch.Tensor, torch.Tensor], entries: IndexEntries
) -> None:
    q, weights, table = queries.q, queries.weights, entries.table
    (tokens, heads, width), count, padded = q.shape, table.shape[1], max(16, next_power_of_2(q.shape[1]))
    padded_q = torch.empty(tokens, padded, width, dtype=_operand(q.device), device=q.device)
    scaled = torch.empty(tokens, padded, dtype=weights.dtype, device=q.device)
    prepare_queries[(tokens,)](
        q,
        weights,
        queries.weight_scale,
        padded_q,
        scaled,
        q.stride(0),
        weights.stride(0),
        heads,
        width,
        padded,
        num_warps=4,
    )
    rows, each = MANY_KEYS, tokens_per_program(tokens, count, q.device)
    scores_of_many_tokens[(cdiv(count, rows), cdiv(tokens, each))](
        padded_q, scaled, *words, table, entries.sequence, entries.visible, out, tokens, count, table.stride(0),
        out.stride(0), width, padded, rows, each, 3, num_warps=4,
    )  # fmt: skip


def tokens_per_program(tokens: int, entries: int, device: torch.device) -> int:
    """Return for how many tokens a program unpacks a tile of keys: fewer if programs would not fill the GPU.

    H200, microseconds with 64 and with 8 tokens per program: 512 tokens and 1,280 keys 48 and 20, 1,024 tokens and
    1,280 keys 70 and 45, 512 tokens and 8,192 keys 128 and 161.
    """
    most, least = 64, 8
    programs = cdiv(entries, MANY_KEYS) * cdiv(tokens, most)
    return most if programs >= 3 * multiprocessors(device) else least


def _operand(device: torch.device) -> torch.dtype:
    """Return the tensor cores' dtype: e4m3 if supported (exact for FP4 values with one scale per row), else bf16."""
    return torch.float8_e4m3fn if is_from(device, FP8) else torch.bfloat16
