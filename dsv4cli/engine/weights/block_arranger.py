"""Arrange GGUF blocks on the device that they were copied to, and check their scales there.

The threads that read a file only copy bytes. If they arranged blocks for a GPU with NumPy, they would wait for each
other: every call needs Python's global interpreter lock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.block_layouts import BlockLayout
from dsv4cli.kernels.ggml.types import damaged_blocks


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of GGUF blocks as stored, on a device, in the memory that will hold them in a layout.

    Attributes:
        tensors: the tensors of the layout.
        places: the rows' memory in each of them, contiguous uint8 [count, n]. One after the other, these have the bytes
            of the rows.
    """

    layout: BlockLayout
    tensors: tuple[TensorSpec, ...]
    places: tuple[torch.Tensor, ...]

    @property
    def form(self) -> tuple[BlockLayout, tuple[torch.Size, ...]]:
        """What rows have in common that are arranged together."""
        return self.layout, tuple(place.shape for place in self.places)


class BlockArranger:
    """Arranges rows in place, in the current stream of their device, which nothing here waits for.

    Each call of `arrange` needs device memory for two copies of its rows and for a mask of their blocks.
    """

    def __init__(self) -> None:
        self._arranged: list[StoredRows] = []
        self._damaged: list[torch.Tensor] = []

    def arrange(self, arrived: Iterable[StoredRows]) -> None:
        """Arrange rows, and remember which ones have a damaged block. Consecutive rows share launches."""
        for (layout, _), alike in groupby(arrived, key=lambda one: one.form):
            ours = list(alike)
            count = len(ours[0].places[0])
            stored = torch.cat([place.view(-1) for one in ours for place in one.places]).view(len(ours), count, -1)
            layout.write_alike(stored, [one.places for one in ours])
            self._arranged += ours
            self._damaged.append(damaged_blocks(layout.kind, stored).flatten(1).any(1))

    def raise_if_damaged(self) -> None:
        """Wait for the device once. Raise CheckpointError if a block has a scale that is NaN or infinite."""
        damaged = torch.cat(self._damaged).tolist() if self._damaged else []
        for rows, is_damaged in zip(self._arranged, damaged, strict=True):
            if is_damaged:
                raise rows.layout.damaged(rows.tensors)
