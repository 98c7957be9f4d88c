"""One step's tokens, flat: which sequence and position each has, and where everything it reads and writes lies.

What depends only on the batch is computed here, once a step; layers index with it.
"""

from dataclasses import dataclass, replace

import torch

from dsv4cli.kernels.compressor import EntryPlan


@dataclass(frozen=True)
class CompressStep:
    """What a step does with compressed entries of one ratio.

    plan: the entries that it may complete, as many as for any step with the same numbers of tokens.
    visible int64 [T]: how many entries a token sees. table int64 [B, E]: the cell of each entry of each sequence; cell
    0 where a sequence has fewer than E.
    """

    plan: EntryPlan
    visible: torch.Tensor
    table: torch.Tensor
    sequence: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, each sequence's tokens together and in order.

    ids, positions, sequence: int64 [T] (sequence counts from 0 within the batch); slots int64 [B]; last int64 [B], the
    row of each sequence's final token. window_index int64 [T, window]: rows of the window's keys (window_rows in all)
    that a token sees, oldest first, then -1. With in_rings these keys are the flat rings, which take the step's keys
    first; else they are [rings of the step's sequences as they were, fresh rows]. window_columns int64 [T]: how many of
    its columns come before compressed entries in a token's list; window_cells int64 [T]: where a token's key goes in
    the flat rings, -1 for nowhere. rotations: complex64 [T, .] by ratio. compress: by ratio. every_entry: the lists of
    HCA layers, window rows and all entries that a token sees, int64 [T, window + E].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    in_rings: bool
    window_index: torch.Tensor
    window_columns: torch.Tensor
    window_rows: int
    window_cells: torch.Tensor
    rotations: dict[int, torch.Tensor]
    compress: dict[int, CompressStep]
    every_entry: torch.Tensor

    def with_ids(self, ids: torch.Tensor) -> "Batch":
        """The same places with other token ids int64 [T] (the drafter reads the token after each position)."""
        return replace(self, ids=ids)
