"""Compression of each `ratio` tokens into one entry. Source: official model.py (`Compressor`).

A group pools the raw rows (values and scores) of its tokens. With overlap, raw rows are twice as wide as an entry, and
a group also pools the previous group: the first half of the previous group's rows, and the second half of its own.
Triton requires: consecutive columns, a contiguous state and plan; an even entry width with an FP8 part in whole blocks
of 64; for index entries a power of two of at least 32.
"""

from dsv4cli.kernels.compressor import ref
from dsv4cli.kernels.compressor.types import Compression, EntryPlan, State
from dsv4cli.kernels.dispatch import choose

__all__ = ["Compression", "EntryPlan", "State", "compress_both", "compress_index_keys", "compress_keys"]


def compress_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> State:
    """Add the entries that a step's raw rows complete, and store the last `capacity` raw rows of each sequence.

    An entry is the sum over members of softmax(score) * kv in fp32, with a separate softmax per channel. It is rounded
    to the entries' dtype, then goes through rms_norm, rotate and, with round_keys, fp8_round of the leading d - 2 * R
    dims in blocks of 64; each rounds as it does alone. Rings are read before they are written.

    Returns the state: the same one, modified in place, or new tensors if a gradient is recorded.
    """
    return choose(own.kv, ref).compress_keys(own, plan, round_keys)


def compress_index_keys(own: Compression, plan: EntryPlan) -> State:
    """Run `compress_keys` for the indexer, with hadamard and fp4_round in blocks of 32 after the rotation.

    Packed entries (int8 with scales) are the codes and scales of fp4_round; before it, values are bf16.
    """
    return choose(own.kv, ref).compress_index_keys(own, plan)


def compress_both(own: Compression, index: Compression, plan: EntryPlan, round_keys: bool) -> tuple[State, State]:
    """Run `compress_keys`, and `compress_index_keys` for the indexer, with the same plan and eps.

    Without round_keys both run compress_keys. Returns the state and the indexer's state.
    """
    return choose(own.kv, ref).compress_both(own, index, plan, round_keys)
