"""What a step is made of, and where its tokens, groups and entries lie."""

from dataclasses import dataclass

import torch

# the ratio whose groups also take in the tokens of the group before, and the one whose entries are all attended to
WITH_PREVIOUS, ALL_LISTED = 4, 128


@dataclass(frozen=True)
class Chunks:
    """The chunk of each of B sequences, which may have no token.

    slots: int64 [B].
    starts: int64 [B], the first position.
    counts: int64 [B], how many tokens.
    fewest: int64 [B], how many columns of its tokens' lists come before compressed entries at least: 0 as in the
        official code, which lists no more than a first chunk has; the window, and lists do not depend on chunks.
    blocks: int64 [B, L], the blocks of compressed entries of the sequence, any block where it has fewer.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    fewest: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """What the host knows of a step.

    tokens: T, those of all chunks.
    window: how many positions a token sees, its own included.
    capacity: the rows of a slot's ring, position p in row p % capacity.
    in_rings: whether the window's keys are the flat rings of all slots, which take the step's keys first; else they
        are the rings of the step's sequences as they were and then the step's keys.
    rows: how many rows the window's keys have.
    block: the tokens of a block.
    groups: by ratio, ceil(count / ratio) of all chunks together, or more: the last sequence has those too many, behind
        its own and never complete.
    entries: by ratio, the most that a sequence has after the step, or more.
    """

    tokens: int
    window: int
    capacity: int
    in_rings: bool
    rows: int
    block: int
    groups: dict[int, int]
    entries: dict[int, int]


@dataclass(frozen=True)
class Entries:
    """Compressed entries of one ratio.

    groups, cells, rotation: int64 [G, 5], int64 [G] and complex64 [G, R], as in compressor.EntryPlan.
    visible: int64 [T], how many entries a token sees.
    table: int64 [B, E], the cell of each entry of a sequence, of any block where it has fewer.
    """

    groups: torch.Tensor
    cells: torch.Tensor
    rotation: torch.Tensor
    visible: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class StepMetadata:
    """Where the T tokens of a step lie, computed once for all layers.

    sequence: int64 [T], the sequence of each token, counted from 0 within the step.
    positions: int64 [T], of each token.
    last: int64 [B], the row of each sequence's final token; anything where it has none.
    window_index: int64 [T, window], the rows of the window's keys that a token sees, oldest first, then -1.
    window_columns: int64 [T], how many of its columns come before compressed entries in a token's list.
    window_cells: int64 [T], where a token's key goes in the flat rings, -1 before the last `capacity` of a chunk, so
        that no two meet in a cell.
    rotations: complex64 [T, R] by ratio.
    entries: by ratio.
    every_entry: int64 [T, window + E], each token's list: window rows, then all visible entries of ratio 128 (at most
        E, 0 without that ratio). With window 4, window_columns 3, E 3 and two visible entries:

            column   0     1     2     3             4             5    6
            holds    row   row   row   rows + cell   rows + cell   -1   -1
    """

    sequence: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    window_index: torch.Tensor
    window_columns: torch.Tensor
    window_cells: torch.Tensor
    rotations: dict[int, torch.Tensor]
    entries: dict[int, Entries]
    every_entry: torch.Tensor
