"""Arguments of the indexer's kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class IndexQueries:
    """Queries of the indexer.

    Attributes:
        q: [T, H, d], bf16 or fp32.
        weights: head weights [T, H] in q's dtype; multiplied by `weight_scale` in fp32 and rounded to that dtype.
    """

    q: torch.Tensor
    weights: torch.Tensor
    weight_scale: float


@dataclass(frozen=True)
class IndexKeys:
    """Keys of the indexer.

    Attributes:
        keys: [cells, d] in the queries' dtype, or int8 [cells, d/2], FP4 codes as returned by `fp4_codes` (two e2m1
            codes per byte, low nibble = even column).
        scale: e8m0 [cells, d/32] of FP4 codes, else None.
    """

    keys: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class IndexEntries:
    """The entries visible to each token.

    Attributes:
        table: int64 [B, E], cell of each entry of a sequence; any valid cell if the entry does not exist.
        sequence: int64 [T], row of the table for each token.
        visible: int64 [T], number of entries visible to each token. Further columns of the table cost almost nothing.
        tokens: number of tokens in the step if these T are one rank's share of them; else None.
    """

    table: torch.Tensor
    sequence: torch.Tensor
    visible: torch.Tensor
    tokens: int | None = None


@dataclass(frozen=True)
class WindowList:
    """The window part of an attention list, which precedes the entries.

    Attributes:
        index: int64 [T, W], rows of the window.
        columns: int64 [T], up to W, first column of a token's entries.
        rows: number of rows in the window; it is added to the cells of entries.
    """

    index: torch.Tensor
    columns: torch.Tensor
    rows: int
