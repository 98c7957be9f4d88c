"""What a step is made of, and where its tokens, groups and entries lie."""

from dataclasses import dataclass

import torch

# the ratio whose groups also take in the tokens of the group before, and the one whose entries are all attended to
WITH_PREVIOUS, ALL_LISTED = 4, 128


@dataclass(frozen=True)
class Chunks:
    """The chunk of each of B sequences, at least one token: its slot, first position and token count, int64 [B]; the
    blocks of compressed entries of the sequence int64 [B, L], any block where it has fewer."""

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """What the host knows. tokens: of all chunks, T. window: how many positions a token sees, its own included.

    capacity: the rows of a slot's ring, position p in row p % capacity. in_rings: whether the window's keys are the
    flat rings of all slots, which take the step's keys first; else they are the rings of the step's sequences as they
    were and then the step's keys. rows: of the window's keys. block: the tokens of a block. By ratio: groups,
    ceil(count / ratio) of all chunks together; entries, the most that a sequence has after the step, or more."""

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
    """Of one ratio. groups int64 [G, 5], cells int64 [G] and rotation complex64 [G, R]: groups, entries and rotation of
    a compressor's plan. visible int64 [T]: how many entries a token sees. table int64 [B, E]: the cell of each entry
    of a sequence, of any block where it has fewer."""

    groups: torch.Tensor
    cells: torch.Tensor
    rotation: torch.Tensor
    visible: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class Places:
    """sequence and positions int64 [T]: of each token. last int64 [B]: the row of a sequence's final token.

    window_index int64 [T, window]: rows of the window's keys that a token sees, oldest first, then -1. window_columns
    int64 [T]: how many of its columns come before compressed entries in a token's list. window_cells int64 [T]: where a
    token's key goes in the flat rings, -1 before the last `capacity` of a chunk, so that no two meet in a cell.
    rotations: complex64 [T, R] by ratio. entries: by ratio. every_entry int64 [T, window + E]: the lists of window rows
    and of all visible entries of ratio 128, those from column window_columns on, a cell counted from `rows` on; -1 in
    all other places. Without that ratio E is 0.
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
