"""How memory holds the GGUF blocks of a matrix: in tiles, or, for MXFP4, as FP4 codes and their scales.

The tensors of a layout together have the bytes of the file, so rows are copied to them as stored, and then arranged.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.gguf.blocks import mxfp4_codes, mxfp4_scales
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.fill import damaged_block, damaged_scale
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import TYPES, to_tiles

Bytes = NDArray[np.uint8]
# nibbles of a byte
LOW, HIGH = 0x0F, 0xF0


@dataclass(frozen=True, slots=True)
class BlockLayout(ABC):
    """A layout of rows of GGUF blocks in one or several tensors. Layouts that are equal arrange rows together.

    Attributes:
        kind: the GGUF type.
        height: rows that are arranged together.
    """

    kind: str
    height: int

    @abstractmethod
    def write(self, rows: Bytes, into: Sequence[Bytes]) -> None:
        """Arrange rows, uint8 [count, bytes], in host memory: uint8 [count, n] of each tensor, contiguous."""

    @abstractmethod
    def write_alike(self, stored: torch.Tensor, into: Sequence[Sequence[torch.Tensor]]) -> None:
        """Arrange several times the same number of rows on a device, in its current stream.

        Needs device memory for another copy of the rows.

        Args:
            stored: uint8 [places, count, bytes].
            into: for each place, uint8 [count, n] of each tensor.
        """

    @abstractmethod
    def damaged(self, tensors: Sequence[TensorSpec]) -> CheckpointError:
        """Return the error for a block with an invalid scale. tensors: those that hold the blocks."""


class TileLayout(BlockLayout):
    """One tensor in tiles of `height` rows; see `to_tiles`."""

    __slots__ = ()

    def write(self, rows: Bytes, into: Sequence[Bytes]) -> None:
        to_tiles(self.kind, rows, self.height, into[0])

    def write_alike(self, stored: torch.Tensor, into: Sequence[Sequence[torch.Tensor]]) -> None:
        for (place,), tiles in zip(into, to_tiles(self.kind, stored, self.height), strict=True):
            place.copy_(tiles)

    def damaged(self, tensors: Sequence[TensorSpec]) -> CheckpointError:
        return damaged_block(tensors[0])


@dataclass(frozen=True, slots=True)
class Fp4Layout(BlockLayout):
    """MXFP4 as FP4: codes, two columns per byte with the even one in the low nibble, and e8m0 scales.

    A block is its scale and 16 bytes; byte n holds column n in the low nibble, and column 16 + n in the high one.
    """

    kind: str = "MXFP4"
    height: int = 1

    def write(self, rows: Bytes, into: Sequence[Bytes]) -> None:
        codes, scales = into
        mxfp4_codes(rows, codes)
        scales[...] = mxfp4_scales(rows)

    def write_alike(self, stored: torch.Tensor, into: Sequence[Sequence[torch.Tensor]]) -> None:
        blocks = stored.unflatten(-1, (-1, TYPES[self.kind].nbytes))
        even, odd = blocks[..., 1::2], blocks[..., 2::2]
        # codes of the first 16 columns of each block, then those of the others: 8 bytes per block, and as many to make
        # them
        pairs = even & LOW
        pairs |= odd << 4
        _copy_half(pairs, into, 0)
        pairs = odd & HIGH
        pairs |= even >> 4
        _copy_half(pairs, into, 1)
        for (_, scales), rows in zip(into, blocks[..., 0], strict=True):
            scales.copy_(rows)

    def damaged(self, tensors: Sequence[TensorSpec]) -> CheckpointError:
        _, scale = tensors
        return damaged_scale(scale)


def _copy_half(pairs: torch.Tensor, into: Sequence[Sequence[torch.Tensor]], half: int) -> None:
    """Copy the codes of one half of each block, uint8 [places, count, blocks, 8], to their places."""
    for (codes, _), rows in zip(into, pairs, strict=True):
        codes.unflatten(-1, (-1, 2, 8))[..., half, :].copy_(rows)
