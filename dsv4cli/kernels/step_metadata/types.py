"""The chunks of a step, and the cache rows of its tokens, groups and entries."""

from dataclasses import dataclass

import torch

# the ratio whose groups also pool the previous group's tokens, and the ratio whose entries are all attended to
WITH_PREVIOUS, ALL_LISTED = 4, 128


@dataclass(frozen=True)
class Chunks:
    """The chunk of each of B sequences; a chunk may be empty.

    Attributes:
        slots: int64 [B].
        starts: int64 [B], first position.
        counts: int64 [B], number of tokens.
        fewest: int64 [B], minimum number of list columns before compressed entries. 0 is as in the official code, which
            lists at most as many as the first chunk has tokens; with the window size, lists do not depend on chunks.
        blocks: int64 [B, L], blocks of compressed entries of each sequence, padded with any block.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    fewest: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Sizes of a step that the host knows.

    Attributes:
        tokens: T, tokens of all chunks.
        window: number of positions visible to a token, including its own.
        capacity: rows of a slot's ring; position p is in row p % capacity.
        in_rings: whether window keys are the flat rings of all slots, in which the step's keys are stored first; if
            False, they are the rings of the step's sequences before the step, followed by the step's keys.
        rows: number of rows of window keys.
        block: tokens per block.
        groups: by ratio, ceil(count / ratio) summed over chunks, or more: the last sequence gets the surplus after its
            own groups, and these are never complete.
        entries: by ratio, upper bound of the entries of a sequence after the step.
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

    Attributes:
        groups, cells, rotation: int64 [G, 5], int64 [G] and complex64 [G, R], as in compressor.EntryPlan.
        visible: int64 [T], number of entries visible to a token.
        table: int64 [B, E], cell of each entry of a sequence, padded with cells of any block.
    """

    groups: torch.Tensor
    cells: torch.Tensor
    rotation: torch.Tensor
    visible: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class StepMetadata:
    """Cache indices of the T tokens of a step, computed once for all layers.

    sequence: int64 [T], sequence of each token, counted from 0 within the step.
    positions: int64 [T], of each token.
    last: int64 [B], row of each sequence's final token; undefined if it has none.
    window_index: int64 [T, window], rows of the window's keys visible to a token, oldest first, then -1.
    window_columns: int64 [T], how many of its columns precede compressed entries in a token's list.
    window_cells: int64 [T], cell of a token's key in the flat rings; -1 before the last `capacity` tokens of a chunk,
    so that no two tokens share a cell.
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
