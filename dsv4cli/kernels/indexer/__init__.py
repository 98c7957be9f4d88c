"""The indexer: scores of compressed entries and the choice of the top k. Source: official model.py (`Indexer`)."""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.indexer import ref


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
    """score[t, e] = sum over heads of relu(q[t, h] . key[e]) * w[t, h], -inf from entry visible[t] on.

    q: [T, H, d]; weights: [T, H] in q's dtype, w = weights * weight_scale in fp32, rounded to that dtype; keys:
    [cells, d] in q's dtype with key_scale None, or int8 [cells, d/2] (two e2m1 codes a byte, low nibble = even column)
    with key_scale e8m0 [cells, d/32], as `fp4_codes` gives them; table: int64 [B, E], the cell of entry e of a sequence
    (any valid cell where there is no such entry); sequence: int64 [T], the row of `table` of each token; visible:
    int64 [T], how many entries a token sees; further ones, of a table that has room for more, cost next to nothing.
    Products of q and key are summed in fp32 and rounded to q's dtype, so are relu * weight and the sum over heads
    (taken in fp32). Returns [T, E] in q's dtype, rows that may lie further apart than E.
    Triton: FP4 keys with bf16 queries that `fp4_round(q, 32)` leaves as they are, and a power of two of columns; a
    token's queries, keys and their scales contiguous. Many tokens of a sequence are multiplied in e4m3 where the GPU
    can: it holds FP4 values exactly while the scales of a key or a head are at most 2 ** 13 apart; elsewhere they may
    be 2 ** 120 apart.
    """
    return choose(q, ref).index_scores(q, weights, weight_scale, keys, key_scale, table, sequence, visible)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k visible entries with the highest scores, each once and in any order; of equal scores the lower entry.

    scores: [T, E] without NaN; visible: int64 [T], entries 0 .. visible - 1 count. Returns int64 [T, min(k, E)], -1 in
    the places that are left over, which are the last. The reference lists the best first.
    Triton: bf16 or fp32 with consecutive columns, k up to 16,384 of rows longer than 32,768.
    """
    return choose(scores, ref).top_entries(scores, visible, k)


def choose_entries(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    table: torch.Tensor,
    sequence: torch.Tensor,
    window_index: torch.Tensor,
    window_columns: torch.Tensor,
    window_rows: int,
) -> torch.Tensor:
    """What `top_entries` chooses as lists for attention: rows of the window, then cells of entries.

    scores, visible and k as there; table int64 [B, E] and sequence int64 [T] as in index_scores; window_index: int64
    [T, W], rows of the window; window_columns: int64 [T], up to W, the column from which on a token's entries are
    listed. Returns int64 [T, W + min(k, E)]: window_index, then -1; from column window_columns on min(k, E) columns
    hold the cells of the chosen entries plus window_rows, -1 behind them.
    Triton: consecutive columns; the rest as in top_entries.
    """
    return choose(scores, ref).choose_entries(
        scores, visible, k, table, sequence, window_index, window_columns, window_rows
    )


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
    """The lists that `choose_entries` makes of the scores of `index_scores`; arguments and result as there.

    Triton: as there; and what the operation just before gives may be q, weights, keys and key_scale, but nothing else,
    for it may still run when the rest is read.
    """
    return choose(q, ref).best_entries(
        q, weights, weight_scale, keys, key_scale, table, sequence, visible, k, window_index, window_columns,
        window_rows,
    )  # fmt: skip
