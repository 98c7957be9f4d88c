"""The rows that each of several ranks has; no torch."""

# rows whose int64 numbers begin at 16 bytes, as what kernels are compiled for does
UNIT = 2


def share_of(tokens: int, rank: int, ranks: int) -> slice:
    """A rank's share of so many rows: the ranks have equally many, whole units, but the last has what is left."""
    each = -(-tokens // (ranks * UNIT)) * UNIT
    return slice(min(rank * each, tokens), min((rank + 1) * each, tokens))
