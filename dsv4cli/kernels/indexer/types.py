"""What the indexer scores, and what it lists."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class IndexQueries:
    """q: [T, H, d] bf16 or fp32; weights: [T, H] in q's dtype, times weight_scale in fp32, rounded to that dtype."""

    q: torch.Tensor
    weights: torch.Tensor
    weight_scale: float


@dataclass(frozen=True)
class IndexKeys:
    """keys: [cells, d] in the queries' dtype with scale None, or int8 [cells, d/2] (two e2m1 codes a byte, low nibble =
    even column) with scale e8m0 [cells, d/32], as `fp4_codes` gives them."""

    keys: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class IndexEntries:
    """The entries that tokens see.

    table: int64 [B, E], the cell of each entry of a sequence, any valid cell where there is no such entry.
    sequence: int64 [T], the row of the table of each token.
    visible: int64 [T], how many entries a token sees; further ones, of a table that has room for more, cost next to
        nothing.
    tokens: all of the step's, where these T are a rank's share of them: how many there are for a row of the table.
    """

    table: torch.Tensor
    sequence: torch.Tensor
    visible: torch.Tensor
    tokens: int | None = None


@dataclass(frozen=True)
class WindowList:
    """What stands before entries in a list.

    index: int64 [T, W], rows of the window.
    columns: int64 [T], up to W, the column from which on a token's entries are listed.
    rows: how many rows the window has; a cell is counted from there on.
    """

    index: torch.Tensor
    columns: torch.Tensor
    rows: int
