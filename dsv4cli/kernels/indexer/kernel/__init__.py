"""The indexer in Triton: which kernel takes a shape, and in what pieces."""

from typing import NamedTuple

import torch
import triton

from dsv4cli.kernels.card import FP8, is_from
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.indexer.kernel.scores_one_token import scores_of_one_token
from dsv4cli.kernels.indexer.kernel.scores_plain import scores_of_plain_keys
from dsv4cli.kernels.indexer.kernel.scores_tiled import prepare_queries, scores_of_many_tokens
from dsv4cli.kernels.indexer.kernel.topk import choose_entries, choose_prefiltered, takes_prefilter, top_entries
from dsv4cli.kernels.pdl import overlap, overlap_beside

__all__ = ["best_entries", "choose_entries", "index_scores", "top_entries"]

# tokens of a sequence from which on a tile of keys is unpacked once for several of them
MANY = 8


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    _check(q, weights, keys, key_scale, table)
    entries = table.shape[1]
    # rows begin where a wide load may, and have room for one behind their end: top_entries reads them so
    out = torch.empty(q.shape[0], triton.cdiv(entries, 64) * 64, dtype=q.dtype, device=q.device)[:, :entries]
    if not out.numel():
        return out
    if key_scale is None:
        _score_plain(out, q, weights, weight_scale, keys, table, sequence, visible)
    else:
        score = _score_many if q.shape[0] >= MANY * table.shape[0] else _score_few
        words, sizes = keys.view(torch.int32), key_scale.view(torch.uint8)
        score(out, q, weights, weight_scale, words, sizes, table, sequence, visible)
    return out


def _check(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scale: torch.Tensor | None, table: torch.Tensor
) -> None:
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


def _score_plain(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    (tokens, heads, width), entries, rows = q.shape, table.shape[1], 64
    scores_of_plain_keys[(tokens, triton.cdiv(entries, rows))](
        q, weights, weight_scale, keys, table, sequence, visible, out, entries, q.stride(0), weights.stride(0),
        table.stride(0), out.stride(0), heads, width, max(16, _power(heads)), max(16, _power(width)), rows,
        num_warps=4, **overlap(q),
    )  # fmt: skip


def _score_few(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """found: peaks and counts for `choose_prefiltered`, if these are wanted."""
    (tokens, heads, width), entries = q.shape, table.shape[1]
    rows, splits, warps = one_token_tiles(tokens, entries)
    peaks, counts = found or (out, out)
    # four programs of 128 threads leave 8,192 registers of a multiprocessor to one that keeps the high scores
    options = overlap_beside(q, 112) if found and rows == 64 else overlap(q)
    scores_of_one_token[(tokens, splits)](
        q, weights, weight_scale, keys, key_scale, table, sequence, visible, out, peaks, counts, entries, splits,
        q.stride(0), weights.stride(0), table.stride(0), out.stride(0), peaks.stride(0), heads, width,
        max(16, _power(heads)), rows, found is not None, num_warps=warps, **options,
    )  # fmt: skip


def best_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    window_index: torch.Tensor,
    window_columns: torch.Tensor,
    window_rows: int,
) -> torch.Tensor:
    tokens, entries = len(q), table.shape[1]
    if key_scale is None or not takes_prefilter(tokens, entries, k):
        scores = index_scores(q, weights, weight_scale, keys, key_scale, table, sequence, visible)
        return choose_entries(scores, visible, k, table, sequence, window_index, window_columns, window_rows)
    _check(q, weights, keys, key_scale, table)
    # both begin where a wide load may, and have room for one behind their end
    wide = triton.cdiv(entries, 128) * 128
    both = torch.empty(tokens, wide + wide // 8, dtype=q.dtype, device=q.device)
    scores, peaks = both[:, :entries], both[:, wide:]
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    words, sizes = keys.view(torch.int32), key_scale.view(torch.uint8)
    _score_few(scores, q, weights, weight_scale, words, sizes, table, sequence, visible, (peaks, counts))
    return choose_prefiltered(
        scores, peaks, counts, visible, k, table, sequence, window_index, window_columns, window_rows
    )


class OneTokenTiles(NamedTuple):
    """Keys of a tile, programs for a token, warps."""

    keys: int
    splits: int
    warps: int


def one_token_tiles(tokens: int, entries: int) -> OneTokenTiles:
    """An H200 holds four programs of 64 keys a processor, three of 128.

    One token, 8,192 keys: 3.3 us with 64 (3.9 with 128); 262,144 keys: 20.8 us with 128 (21.3 with 64).
    """
    rows, programs = (128, 396) if tokens * entries >= 131_072 else (64, 528)
    return OneTokenTiles(rows, min(triton.cdiv(entries, rows), max(1, programs // tokens)), 4)


def _score_many(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    (tokens, heads, width), entries, padded = q.shape, table.shape[1], max(16, _power(q.shape[1]))
    queries = torch.empty(tokens, padded, width, dtype=_operand(q.device), device=q.device)
    scaled = torch.empty(tokens, padded, dtype=weights.dtype, device=q.device)
    prepare_queries[(tokens,)](
        q, weights, weight_scale, queries, scaled, q.stride(0), weights.stride(0), heads, width, padded, num_warps=4
    )
    # H200, 4,096 tokens and 8,192 keys: 859 us; 64 keys instead of 128 take 970, eight warps 1,043, two stages 894
    rows, per_program, warps, stages = 128, 64, 4, 3
    scores_of_many_tokens[(triton.cdiv(entries, rows), triton.cdiv(tokens, per_program))](
        queries, scaled, keys, key_scale, table, sequence, visible, out, tokens, entries, table.stride(0),
        out.stride(0), width, padded, rows, per_program, stages, num_warps=warps,
    )  # fmt: skip


def _operand(device: torch.device) -> torch.dtype:
    """What the tensor cores multiply: e4m3 holds FP4 values with a scale a row, where there is hardware for it."""
    return torch.float8_e4m3fn if is_from(device, FP8) else torch.bfloat16


def _power(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
