"""Sizes of steps: the batches and chunks that CUDA graphs are captured for, and what fits into one. No torch."""

from bisect import bisect_left
from collections.abc import Sequence

from dsv4cli.engine.config.capacity import MAX_SLOTS, PREFILL_ROWS, RANK_ROWS, ROLLBACK

# batch sizes of captured decode steps, and tokens per sequence: the newest token and its drafts
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, MAX_SLOTS)
DECODE_TOKENS = (1, 2, 3, 4, 6, ROLLBACK)
# rows of prefill steps that the scheduling policy chooses from, captured or not
CHUNK_ROWS = PREFILL_ROWS + RANK_ROWS
# the fewest rows of a captured prefill step per sequence. With more sequences the kernels for compressor and indexer,
# which are chosen by rows per sequence, would differ from those of a single prompt
ROWS_PER_SEQUENCE = 18


def rows_needed(counts: Sequence[int]) -> int:
    """Return the rows of a step that holds these numbers of tokens, one per sequence."""
    return counts[0] if len(counts) == 1 else max(sum(counts), ROWS_PER_SEQUENCE * len(counts))


def prefill_sequences(slots: int) -> int:
    """Return the maximum number of sequences in a prefill step of an engine that runs this many at once.

    With the padding of a captured step, it equals that of a decode step: kernels are compiled for this number. A step
    holds at least one prompt.
    """
    return max(slots - 1, 1)


def sequences_in(rows: int, most: int) -> int:
    """Return how many sequences a prefill step of this many rows may have, if no step has more than `most`."""
    return max(min(rows // ROWS_PER_SEQUENCE, most), 1)


def chunk_rows(rows: int) -> int:
    """Return the smallest of CHUNK_ROWS that holds this many rows, or the largest."""
    return CHUNK_ROWS[min(bisect_left(CHUNK_ROWS, rows), len(CHUNK_ROWS) - 1)]


def batch_size(sequences: int) -> int:
    """Return the batch size of the captured decode step for this many sequences: the next power of two."""
    return 1 << max(sequences - 1, 0).bit_length()
