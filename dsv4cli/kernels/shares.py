"""The rows that each of several ranks owns. No torch."""

# shares start at a multiple of this many rows: one int64 per row then starts at a multiple of 16 bytes, which compiled
# kernels require
UNIT = 2


def rows_each(tokens: int, ranks: int) -> int:
    """Return the rows of a rank's share, a multiple of UNIT. The last ranks may have fewer."""
    return -(-tokens // (ranks * UNIT)) * UNIT


def share_of(tokens: int, rank: int, ranks: int) -> slice:
    """Return a rank's share of this many rows."""
    each = rows_each(tokens, ranks)
    return slice(min(rank * each, tokens), min((rank + 1) * each, tokens))
