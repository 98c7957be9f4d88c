"""Every `ratio` tokens to one compressed entry. Source: official model.py (`Compressor`).

A group pools the raw rows of its tokens; with overlap (raw rows twice as wide as an entry) those of the previous group
join: of the previous group's rows the first half counts, of its own the second.
Triton: consecutive columns, a contiguous state and plan; entries of an even width with the FP8 part in whole blocks of
64, index entries of a power of two from 32 on.
"""

from dsv4cli.kernels.compressor import ref
from dsv4cli.kernels.compressor.types import Compression, EntryPlan, State
from dsv4cli.kernels.dispatch import choose

__all__ = ["Compression", "EntryPlan", "State", "compress_both", "compress_index_keys", "compress_keys"]


def compress_keys(own: Compression, plan: EntryPlan, round_keys: bool) -> State:
    """Adds the entries that a step's raw rows complete, then keeps the last `capacity` rows of each sequence.

    An entry is the sum over members of softmax(score) * kv, each channel with its own softmax, in fp32; it is rounded
    to the entries' dtype and goes through rms_norm, rotate and, with round_keys, fp8_round of the leading d - 2 * R
    dims with 64 columns; each rounds as it does alone.
    Rings are read before they are written. Returns the state: the one given, written in place, or one with new tensors
    where a gradient is recorded.
    """
    return choose(own.kv, ref).compress_keys(own, plan, round_keys)


def compress_index_keys(own: Compression, plan: EntryPlan) -> State:
    """The same for the indexer: after the rotation hadamard and fp4_round with 32 columns.

    Packed entries (int8 with scales) are the codes and scales of fp4_round; before that the values are bf16.
    """
    return choose(own.kv, ref).compress_index_keys(own, plan)


def compress_both(own: Compression, index: Compression, plan: EntryPlan, round_keys: bool) -> tuple[State, State]:
    """`compress_keys`, and for the indexer `compress_index_keys`: both of one plan and one eps.

    Without round_keys both are compress_keys. Returns the state and the indexer's.
    """
    return choose(own.kv, ref).compress_both(own, index, plan, round_keys)
