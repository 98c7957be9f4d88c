"""Arguments and state of the compressor's kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EntryPlan:
    """The entries of one ratio that a step of T tokens may complete.

    groups: int64 [G, 5], the groups that may become complete: each sequence's group of its first token and the
    following ones, sequences in the order of their rows:

            0      1        2       3     4
            slot   member   start   end   row

        slot: the sequence's slot. member: position of the group's first member; with overlap it is in the previous
            group, so it may be negative. start, end: the sequence's positions in the step. row: its first row.

        Members before the step are in the rings: position p is in row p mod capacity.
    entries: int64 [G], cell of each group's entry, -1 if it is not complete.
    rotation: complex64 [G, R], of each group.
    positions: int64 [T].
    """

    groups: torch.Tensor
    entries: torch.Tensor
    rotation: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class State:
    """The state of a compressor: rings of raw rows, and entries.

    Attributes:
        kv, score: fp32 [slots, capacity, C], the score including ape; rows that were never written are 0 and -inf.
        capacity is at least the number of members of a group.
        entries: [cells, d] bf16 or fp32, C = d or 2 * d; or e2m1 codes int8 [cells, d / 2] with scale.
        scale: e8m0 [cells, d / 32], or None.
    """

    kv: torch.Tensor
    score: torch.Tensor
    entries: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Compression:
    """One compressor in a step of T tokens: its raw rows, parameters and state.

    Attributes:
        kv, score: fp32 [T, C], the score without ape.
        ape: fp32 [ratio, C], added to the scores by position.
        norm, eps: weight [d] and eps of the entries' rms_norm.
        state: read, then written.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    eps: float
    state: State
