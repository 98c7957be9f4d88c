"""The indexer: scores of compressed entries and the choice of the top k. Source: official model.py (`Indexer`)."""

import torch

from dsv4cli.kernels.indexer import ref


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """score[t, e] = sum over heads of relu(q[t, h] . key[e]) * weights[t, h].

    q: [T, H, d]; weights: [T, H]; keys: [cells, d], all of one dtype; table: int64 [B, E], the cell of entry e of a
    sequence (any valid cell where there is no such entry); sequence: int64 [T], the row of `table` of each token.
    Products of q and key are summed in fp32 and rounded to q's dtype, so are relu * weight and the sum over heads
    (taken in fp32). Returns [T, E] in q's dtype; the caller masks entries that a token does not see.
    """
    return ref.index_scores(q, weights, keys, table, sequence)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k visible entries with the highest scores, best first, equal scores by lower entry.

    scores: [T, E]; visible: int64 [T], entries 0 .. visible - 1 count. Returns int64 [T, min(k, E)], -1 in unused
    places.
    """
    return ref.top_entries(scores, visible, k)
