"""Every `ratio` tokens to one compressed entry. Source: official model.py (`Compressor`).

A group pools the raw rows of its tokens; with overlap (raw rows twice as wide as an entry) those of the previous group
join: of the previous group's rows the first half counts, of its own the second.
Triton: consecutive columns, a contiguous state and plan; entries of an even width with the FP8 part in whole blocks of
64, index entries of a power of two from 32 on.
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.compressor import ref
from dsv4cli.kernels.dispatch import choose


@dataclass(frozen=True)
class EntryPlan:
    """What a step of T tokens does with the entries of one ratio.

    groups: int64 [G, 5], the groups that may become complete, of each sequence that of its first token and those behind
    it, sequences in the order of their rows. Of each: the sequence's slot; the position of the first member (of the
    previous group with overlap, so it may be negative); the sequence's first position in the step, the one after its
    last, and its first row. Members before the step are in the rings, position p in row p mod capacity.
    entries: int64 [G], the cell of each, -1 where it is not complete; rotation: complex64 [G, R] of each. positions:
    int64 [T].
    """

    groups: torch.Tensor
    entries: torch.Tensor
    rotation: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class State:
    """A compressor's memory: rings of raw rows kv, score (ape included) fp32 [slots, capacity, C], and entries.

    entries: [cells, d] bf16 or fp32, C = d or 2 * d; or e2m1 codes int8 [cells, d / 2] with scale e8m0 [cells, d / 32].
    Rows that were never written hold 0 and -inf. capacity: the members of a group, and more.
    """

    kv: torch.Tensor
    score: torch.Tensor
    entries: torch.Tensor
    scale: torch.Tensor | None = None


def compress_keys(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: State,
    plan: EntryPlan,
    weight: torch.Tensor,
    eps: float,
    round_keys: bool,
) -> State:
    """Adds the entries that a step's raw rows complete, then keeps the last `capacity` rows of each sequence.

    kv, score: fp32 [T, C], the scores without ape fp32 [ratio, C], which is added by position; weight: [d]. An entry is
    the sum over members of softmax(score) * kv, each channel with its own softmax, in fp32; it is rounded to the
    entries' dtype and goes through rms_norm with weight, rotate and, with round_keys, fp8_round of the leading
    d - 2 * R dims with 64 columns; each rounds as it does alone.
    Rings are read before they are written. Returns the state: the one given, written in place, or one with new tensors
    where a gradient is recorded.
    """
    return choose(kv, ref).compress_keys(kv, score, ape, state, plan, weight, eps, round_keys)


def compress_index_keys(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: State,
    plan: EntryPlan,
    weight: torch.Tensor,
    eps: float,
) -> State:
    """The same for the indexer: after the rotation hadamard and fp4_round with 32 columns.

    Packed entries (int8 with scales) are the codes and scales of fp4_round; before that the values are bf16.
    """
    return choose(kv, ref).compress_index_keys(kv, score, ape, state, plan, weight, eps)


def compress_both(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: State,
    weight: torch.Tensor,
    index_kv: torch.Tensor,
    index_score: torch.Tensor,
    index_ape: torch.Tensor,
    index_state: State,
    index_weight: torch.Tensor,
    plan: EntryPlan,
    eps: float,
    round_keys: bool,
) -> tuple[State, State]:
    """`compress_keys`, and for the indexer `compress_index_keys`: both of one plan, each with its own rows and state.

    Without round_keys both are compress_keys. Returns the state and the indexer's.
    """
    return choose(kv, ref).compress_both(
        kv,
        score,
        ape,
        state,
        weight,
        index_kv,
        index_score,
        index_ape,
        index_state,
        index_weight,
        plan,
        eps,
        round_keys,
    )
