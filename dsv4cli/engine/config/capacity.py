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
# most rows that they multiply in such tiles
TILED_ROWS = 64
# values of the head that the reference kernels dequantize at once
HEAD_VALUES = 1 << 25
# tokens of a prompt in a step where nothing says more
DEFAULT_CHUNK = 4096
# and on a CPU, where the rows that attention gathers for more are new pages each time
CPU_CHUNK = 512
# Rows of a captured prefill step: whole tiles of linears. One GPU computes a larger step for longer than the host
# launches its kernels; several ranks do not, so they capture the sizes in RANK_ROWS too
PREFILL_ROWS = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048)
RANK_ROWS = (3072, 4096)


def columns_of(tokens: int) -> int:
    """Return the width of the block table for sequences of this many tokens and their draft tokens."""
    return -(-(tokens + ROLLBACK) // BLOCK_TOKENS)


def captured_rows(columns: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of the prefill steps that are captured, for block tables of this width."""
    rows = PREFILL_ROWS if ranks == 1 else PREFILL_ROWS + RANK_ROWS
    return tuple(size for size in rows if size <= columns * BLOCK_TOKENS)


def divides_from(ranks: int) -> int:
    """Return the smallest step, in tokens, whose rows of the streams are sharded over ranks with peer memory.

    A smaller step of Flash is all-reduced in one launch, and from this size on every rank has some rows.
    """
    return max(257, 2 * ranks**2)
