"""Parameters of queries and keys, and the target of keys."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyNorm:
    """Norm and rounding of keys, and of queries.

    Attributes:
        weight: [d], of the keys' rms_norm.
        eps: eps of both norms.
        rounded: whether fp8_round is applied to the leading d - 2 * R dims of a key in blocks of 64, and hadamard and
            fp4_round to the indexer's queries in blocks of 32.
    """

    weight: torch.Tensor
    eps: float
    rounded: bool


@dataclass(frozen=True)
class KeyCells:
    """The target of keys.

    Attributes:
        ring: [cells, d] in the keys' dtype, written in place.
        cells: int64 [T], cell of each key, each at most once; -1 if the key is not stored.
    """

    ring: torch.Tensor
    cells: torch.Tensor
