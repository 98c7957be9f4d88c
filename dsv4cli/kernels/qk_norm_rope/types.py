"""What queries and keys go through, and where keys are stored."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyNorm:
    """How keys, and with them queries, are normed and rounded.

    weight: [d], of the keys' rms_norm.
    eps: of both norms.
    rounded: whether the leading d - 2 * R dims of a key go through fp8_round with 64 columns, and the indexer's queries
        through hadamard and fp4_round with 32 columns.
    """

    weight: torch.Tensor
    eps: float
    rounded: bool


@dataclass(frozen=True)
class KeyCells:
    """Where keys are stored.

    ring: [cells, d] in the keys' dtype, written in place.
    cells: int64 [T], of each key, each at most once; -1: the key is not stored.
    """

    ring: torch.Tensor
    cells: torch.Tensor
