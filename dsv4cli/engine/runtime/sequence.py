"""A sequence's place in the KV cache. No torch."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """A sequence in a cache.

    Attributes:
        slot: its row in each ring buffer.
        length: tokens in the cache.
        high: the largest length since these tokens were written: what lies beyond `length` was rolled back.
        blocks: its block table.
        changes: how often the block table changed.
        fewest_columns: see `step_metadata.Chunks.fewest`.
    """

    slot: int
    length: int = 0
    high: int = 0
    blocks: list[int] = field(default_factory=list)
    changes: int = 0
    fewest_columns: int = 0
