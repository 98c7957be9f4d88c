"""The rows that each of several ranks has; no torch."""

# rows whose int64 numbers begin at 16 bytes, as what kernels are compiled for does
UNIT = 2


def rows_each(tokens: int, ranks: int) -> int:
    """How many of so many rows a rank has, whole units; the last ones have what is left."""
    return -(-tokens // (ranks * UNIT)) * UNIT


def share_of(tokens: int, rank: int, ranks: int) -> slice:
    """A rank's share of so many rows."""
    each = rows_each(tokens, ranks)
    return slice(min(rank * each, tokens), min((rank + 1) * each, tokens))
