"""Arrange GGUF blocks in tiles on the device that they were copied to, and check their scales there.

The threads that read a file only copy bytes. If they arranged blocks for a GPU with NumPy, they would wait for each
other: every call needs Python's global interpreter lock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.fill import damaged_block
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, damaged_blocks, to_tiles


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of GGUF blocks of a tensor on a device: uint8 [count, bytes], as stored; `height` rows become a tile."""

    spec: TensorSpec
    rows: torch.Tensor
    height: int

    @property
    def form(self) -> tuple[str, int, torch.Size]:
        """What rows have in common that are arranged together."""
        return self.spec.dtype, self.height, self.rows.shape


class TileArranger:
    """Arranges rows in tiles in place, in the current stream of their device, which nothing here waits for.

    Each call of `arrange` needs device memory for two copies of its rows and for a mask of their blocks.
    """

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._damaged: list[torch.Tensor] = []

    def arrange(self, arrived: Iterable[StoredRows]) -> None:
        """Arrange rows in tiles, and remember which ones have a damaged block. Consecutive rows share launches."""
        for (dtype, height, _), alike in groupby(arrived, key=lambda one: one.form):
            ours = list(alike)
            self._specs += [one.spec for one in ours]
            self._damaged.append(_arrange(BLOCK_DTYPES[dtype], height, [one.rows for one in ours]))

    def raise_if_damaged(self) -> None:
        """Wait for the device once. Raise CheckpointError if a block has a scale that is NaN or infinite."""
        damaged = torch.cat(self._damaged).tolist() if self._damaged else []
        for spec, is_damaged in zip(self._specs, damaged, strict=True):
            if is_damaged:
                raise damaged_block(spec)


def _arrange(kind: str, height: int, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Arrange rows, uint8 [count, bytes] each, in tiles in place. Return which have a damaged block: bool [places]."""
    stored = torch.stack(tuple(places))  # [places, count, bytes]
    for place, tiles in zip(places, to_tiles(kind, stored, height), strict=True):
        place.copy_(tiles)
    return damaged_blocks(kind, stored).flatten(1).any(1)
