"""The indexer: scores of compressed entries and the choice of the top k. Source: official model.py (`Indexer`)."""

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
    """score[t, e] = sum over heads of relu(q[t, h] . key[e]) * w[t, h], -inf from entry visible[t] on.

    Products of q and key are summed in fp32 and rounded to q's dtype, so are relu * weight and the sum over heads
    (taken in fp32). Returns [T, E] in q's dtype, rows that may lie further apart than E.
    Triton: FP4 keys with bf16 queries that `fp4_round(q, 32)` leaves as they are, and a power of two of columns; a
    token's queries, keys and their scales contiguous. Many tokens of a sequence are multiplied in e4m3 where the GPU
    can: it holds FP4 values exactly while the scales of a key or a head are at most 2 ** 13 apart; elsewhere they may
    be 2 ** 120 apart.
    """
    return choose(queries.q, ref).index_scores(queries, keys, entries)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k visible entries with the highest scores, each once and in any order; of equal scores the lower entry.

    scores: [T, E] without NaN; visible: int64 [T], entries 0 .. visible - 1 count. Returns int64 [T, min(k, E)], -1 in
    the places that are left over, which are the last. The reference lists the best first.
    Triton: bf16 or fp32 with consecutive columns, k up to 16,384 of rows longer than 32,768.
    """
    return choose(scores, ref).top_entries(scores, visible, k)


def choose_entries(scores: torch.Tensor, k: int, entries: IndexEntries, window: WindowList) -> torch.Tensor:
    """What `top_entries` chooses as lists for attention: rows of the window, then cells of entries.

    scores and k as there. Returns int64 [T, W + min(k, E)]: the window's index, then -1; from its columns on min(k, E)
    columns hold the cells of the chosen entries plus the window's rows, -1 behind them.
    Triton: consecutive columns; the rest as in top_entries.
    """
    return choose(scores, ref).choose_entries(scores, k, entries, window)


def best_entries(
    queries: IndexQueries, keys: IndexKeys, k: int, entries: IndexEntries, window: WindowList
) -> torch.Tensor:
    """The lists that `choose_entries` makes of the scores of `index_scores`; arguments and result as there.

    Triton: as there; and what the operation just before gives may be the queries and keys, but nothing else, for it may
    still run when the rest is read.
    """
    return choose(queries.q, ref).best_entries(queries, keys, k, entries, window)
