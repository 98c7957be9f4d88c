"""What a compressor is given and what it keeps."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EntryPlan:
    """What a step of T tokens does with the entries of one ratio.

    groups: int64 [G, 5], the groups that may become complete, of each sequence that of its first token and those behind
        it, sequences in the order of their rows:

            0      1        2       3     4
            slot   member   start   end   row

        slot: the sequence's. member: the position of the group's first member, with overlap one of the previous group,
        so it may be negative. start, end: the sequence's positions in the step. row: its first row.

        Members before the step are in the rings, position p in row p mod capacity.
    entries: int64 [G], the cell of each group's entry, -1 where it is not complete.
    rotation: complex64 [G, R], of each group.
    positions: int64 [T].
    """

    groups: torch.Tensor
    entries: torch.Tensor
    rotation: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class State:
    """A compressor's memory: rings of raw rows, and entries.

    kv, score: fp32 [slots, capacity, C], the score with ape; rows that were never written hold 0 and -inf. capacity:
        the members of a group, and more.
    entries: [cells, d] bf16 or fp32, C = d or 2 * d; or e2m1 codes int8 [cells, d / 2] with scale.
    scale: e8m0 [cells, d / 32], or None.
    """

    kv: torch.Tensor
    score: torch.Tensor
    entries: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Compression:
    """One compressor in a step of T tokens: its raw rows, its parameters and its memory.

    kv, score: fp32 [T, C], the score without ape.
    ape: fp32 [ratio, C], added to the scores by position.
    norm, eps: [d], of the entries' rms_norm.
    state: read, then written.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    eps: float
    state: State
