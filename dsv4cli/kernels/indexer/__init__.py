"""The indexer: scores of compressed entries, and top-k selection. Source: official model.py (`Indexer`)."""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.indexer import ref
from dsv4cli.kernels.indexer.types import IndexEntries, IndexKeys, IndexQueries, WindowList

__all__ = [
    "IndexEntries",
    "IndexKeys",
    "IndexQueries",
    "WindowList",
    "best_entries",
    "choose_entries",
    "index_scores",
    "top_entries",
]


def index_scores(queries: IndexQueries, keys: IndexKeys, entries: IndexEntries) -> torch.Tensor:
    """Return score[t, e] = sum over heads of relu(q[t, h] . key[e]) * w[t, h], or -inf for e >= visible[t].

    Dot products are summed in fp32 and rounded to q's dtype; so are relu * weight and the sum over heads (computed in
    fp32). Returns [T, E] in q's dtype; the row stride may exceed E.

    Triton requires: FP4 keys with bf16 queries that `fp4_round(q, 32)` leaves unchanged, and a power-of-two width; a
    token's queries, the keys and their scales contiguous. For many tokens of a sequence it multiplies in e4m3 if the
    GPU supports it. That is exact for FP4 values if the scales of a key or a head differ by at most 2 ** 13; otherwise
    they may differ by 2 ** 120.
    """
    return choose(queries.q, ref).index_scores(queries, keys, entries)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k visible entries with the highest scores, in any order; among equal scores, lower entries first.

    The reference lists the best first.

    Args:
        scores: [T, E] without NaN.
        visible: int64 [T]; entries 0 .. visible - 1 count.

    Returns int64 [T, min(k, E)]; unused columns, at the end, are -1.
    Triton requires: bf16 or fp32 with consecutive columns; k up to 16,384 for rows longer than 32,768.
    """
    return choose(scores, ref).top_entries(scores, visible, k)


def choose_entries(scores: torch.Tensor, k: int, entries: IndexEntries, window: WindowList) -> torch.Tensor:
    """Return the selection of `top_entries` as lists for attention: window rows, then cells of entries.

    Returns int64 [T, W + min(k, E)]. Each row starts with its window index. From column `window.columns` on, min(k, E)
    columns hold the cells of the selected entries plus `window.rows`, or -1.
    Triton requires: consecutive columns; otherwise as for `top_entries`.
    """
    return choose(scores, ref).choose_entries(scores, k, entries, window)


def best_entries(
    queries: IndexQueries, keys: IndexKeys, k: int, entries: IndexEntries, window: WindowList
) -> torch.Tensor:
    """Run `index_scores`, then `choose_entries` on the scores, and return its result.

    Triton has the requirements of both. In addition, only queries and keys may be outputs of the previous launch: it
    may still be running when everything else is read.
    """
    return choose(queries.q, ref).best_entries(queries, keys, k, entries, window)
