"""A weight matrix in its storage format, as the kernels take it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.ggml.types import TYPES, decode, from_tiles, tile_height

# values of GGUF blocks that are decoded at once: on a CPU the steps of decoding stay in its cache
CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 25
# values of a block of the simple types
SMALL_BLOCK = 32


class StoredMatrix(NamedTuple):
    """One matrix, or a stack of several, in storage format. The weight's dtype determines the format.

    Attributes:
        weight: [..., N, K], or [..., N, K / 2] for FP4 and NVFP4; formats as for `block_scale.dequantise`.
        scale: block scales, as for `block_scale.dequantise`; None for fp16, bf16 and fp32 weights without scales.
        scale_2: fp32 [...] for NVFP4: one factor per matrix, which multiplies the sums in fp32; otherwise None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None

    @property
    def block_type(self) -> str | None:
        """The GGUF type of the blocks; None for all other formats."""
        return None

    def row(self, number: int) -> "StoredMatrix":
        """Return the matrix in this row of a stack."""
        # fp32 values already include the scale
        scale = None if self.scale is None or self.weight.dtype == torch.float32 else self.scale[number]
        return StoredMatrix(self.weight[number], scale, None if self.scale_2 is None else self.scale_2[number])

    @property
    def columns(self) -> int:
        """The number of columns K of a matrix without scales."""
        return self.weight.shape[-1]

    @property
    def height(self) -> int:
        """The rows of a tile of GGUF blocks; 1 for all other formats."""
        return 1

    def parts(self, size: int) -> Iterator["StoredMatrix"]:
        """Yield the rows of a matrix without scales, as many whole tiles at a time as have up to `size` values."""
        assert self.scale is None, "the rows of a part may end inside a block of scales"
        for weight in self.weight.split(max(size // (self.columns * self.height), 1) * self.height):
            yield self._replaced(weight)

    def _replaced(self, weight: torch.Tensor) -> "StoredMatrix":
        """Return another matrix without scales in the same format."""
        return StoredMatrix(weight)

    def values(self) -> torch.Tensor:
        """Return the fp32 values [..., N, K]. scale_2 is not applied."""
        if self.weight.dtype == torch.float32:
            return self.weight
        return block_scale.dequantise(self.weight, self.scale)


class BlockMatrix(StoredMatrix):
    """One matrix, or a stack of several, of GGUF blocks: weight uint8 [..., N, bytes], without scales.

    Rows are in tiles (`ggml.types.to_tiles`) of `height` rows. Kernels find the type in `block_type`.
    """

    _block_type: str
    _height: int

    @classmethod
    def of(cls, weight: torch.Tensor, block_type: str, height: int | None = None) -> "BlockMatrix":
        """Return the matrix of these rows, which are in tiles.

        height: rows of a tile, for a part of another matrix; None for a whole matrix.
        """
        found = cls(weight)
        found._block_type = block_type
        found._height = tile_height(block_type, weight.shape[-2]) if height is None else height
        return found

    @property
    def block_type(self) -> str:
        """The GGUF type of the blocks."""
        return self._block_type

    @property
    def columns(self) -> int:
        """The number of columns K."""
        kind = TYPES[self._block_type]
        return self.weight.shape[-1] // kind.nbytes * kind.values

    @property
    def height(self) -> int:
        """The rows of a tile."""
        return self._height

    def row(self, number: int) -> "BlockMatrix":
        """Return the matrix in this row of a stack."""
        return self._replaced(self.weight[number])

    def _replaced(self, weight: torch.Tensor) -> "BlockMatrix":
        """Return another matrix of this type, in tiles of as many rows."""
        return BlockMatrix.of(weight, self._block_type, self._height)

    def values(self) -> torch.Tensor:
        """Return the fp32 values [..., N, K], decoded a few rows at a time."""
        rows, columns = self.weight.reshape(-1, self.weight.shape[-1]), self.columns
        tiles = (CPU_CHUNK if rows.device.type == "cpu" else GPU_CHUNK) // (columns * self.height)
        step = max(tiles, 1) * self.height
        values = torch.empty(len(rows), columns, dtype=torch.float32, device=rows.device)
        for start in range(0, len(rows), step):
            some = _in_rows(self._block_type, rows[start : start + step], self.height)
            values[start : start + step] = _decoded(self._block_type, some)
        return values.view(*self.weight.shape[:-1], columns)

    def values_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the fp32 values of some rows of a matrix, decoded on the device of their numbers: [T] -> [T, K]."""
        at = numbers.to(self.weight.device)
        tiles = self.weight.view(-1, self.height, self.weight.shape[-1])[at // self.height]
        rows = _in_rows(self._block_type, tiles, self.height)[torch.arange(len(at), device=at.device), at % self.height]
        return _decoded(self._block_type, rows.to(numbers.device))


def _in_rows(block_type: str, tiles: torch.Tensor, height: int) -> torch.Tensor:
    """Return tiles as rows of blocks. On a CPU, NumPy takes less time."""
    if tiles.device.type == "cpu":
        return torch.from_numpy(from_tiles(block_type, tiles.numpy(), height))
    found: torch.Tensor = from_tiles(block_type, tiles, height)
    return found


def _decoded(block_type: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the values of some rows of blocks.

    On a CPU, NumPy takes less time for the many steps of large blocks. Two cores, 64 rows of 4,096 values: Q2_K 28 M
    values/s instead of 2, IQ2_XXS 22 instead of 4, Q4_K 70 instead of 43.
    """
    if rows.device.type == "cpu" and TYPES[block_type].values > SMALL_BLOCK:
        return torch.from_numpy(decode(block_type, rows.numpy()))
    found: torch.Tensor = decode(block_type, rows)
    return found
