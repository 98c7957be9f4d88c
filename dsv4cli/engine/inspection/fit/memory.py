"""Bytes of a model's weights on one device, and the part that is replicated on every device; no torch."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.weights.sizes import BITS


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on each of `ranks` devices. whole: the replicated part, by family."""

    ranks: int
    nbytes: int
    whole: dict[str, int]


def weigh(specs: Collection[TensorSpec], ranks: int) -> Weights:
    """Sum up one rank's part of the table, which `ranks` must divide."""
    total, whole = 0, Counter[str]()
    for spec in specs:
        nbytes = prod(part_shape(spec, ranks)) * BITS[spec.dtype] // 8
        total += nbytes
        if spec.shard is None:
            whole[spec.family] += nbytes
    return Weights(ranks, total, dict(whole.most_common()))
