"""Capacity limits of the engine, on which the KV cache and the scheduler are built; no torch."""

# tokens of one block of compressed entries: 32 of ratio 4, 1 of ratio 128
BLOCK_TOKENS = 128
# maximum tokens to roll back at once: a step that verifies draft tokens is at most this long
ROLLBACK = 8
# sequences in flight, and tokens in one step: bounds of the memory that a step takes
MAX_SLOTS = 64
MAX_STEP_TOKENS = 8192
# rows of a list that the reference kernels of attention and indexer read at once
LIST_BLOCK = 64
# rows that the reference kernels multiply at once where a step has few
PRODUCT_ROWS = 4
# tokens of a prompt in a step where nothing says more
DEFAULT_CHUNK = 4096
# and on a CPU, where the rows that attention gathers for more are new pages each time
CPU_CHUNK = 512


def divides_from(ranks: int) -> int:
    """Return the smallest step, in tokens, whose rows of the streams are sharded over ranks with peer memory.

    A smaller step of Flash is all-reduced in one launch, and from this size on every rank has some rows.
    """
    return max(257, 2 * ranks**2)
