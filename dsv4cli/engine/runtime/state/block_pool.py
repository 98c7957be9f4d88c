"""Memory of a cache's blocks, and copies of one block across all pools.

If all blocks are allocated at once, pools of one kind are one tensor, so that copying a block takes a few launches:
Flash has 83 pools of 4 kinds. Pools that grow are separate tensors, so that growing needs only one of them twice.
"""

from collections.abc import Sequence

import torch

from dsv4cli.engine.model.state import Pool


class BlockPool:
    """The blocks of some pools, empty at first.

    Attributes:
        nbytes: bytes of one block across all pools.
    """

    def __init__(self, pools: Sequence[Pool], device: torch.device) -> None:
        self._pools, self._device = pools, device
        self._pieces: list[torch.Tensor] = []
        self.nbytes = sum(_bytes_of(pool).shape[1] for pool in pools)

    def make(self, blocks: int) -> None:
        """Allocate all blocks; the pools do not grow after that."""
        kinds: dict[tuple[int, int, torch.dtype], list[Pool]] = {}
        for pool in self._pools:
            kinds.setdefault((pool.per_block, pool.data.shape[1], pool.data.dtype), []).append(pool)
        for (per_block, width, dtype), own in kinds.items():
            memory = torch.zeros(len(own), blocks * per_block, width, dtype=dtype, device=self._device)
            for pool, data in zip(own, memory, strict=True):
                pool.data = data
            self._pieces.append(memory.view(torch.uint8).view(len(own), blocks, -1))

    def grow(self, blocks: int) -> None:
        """Grow the pools to this many blocks."""
        for pool in self._pools:
            pool.grow(blocks)

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""
        for piece in self._parts():
            piece[:, target] = piece[:, source]

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies of blocks (int64 [n]): uint8 [n, nbytes], in the order that `write` expects."""
        parts = [piece.transpose(0, 1)[blocks].flatten(1) for piece in self._parts()]
        return torch.cat(parts, 1) if parts else torch.empty(len(blocks), 0, dtype=torch.uint8, device=self._device)

    def write(self, blocks: torch.Tensor, copies: torch.Tensor) -> None:
        """Write back what `read` returned."""
        pieces = self._parts()
        for piece, part in zip(pieces, copies.split([piece[:, 0].numel() for piece in pieces], 1), strict=True):
            piece.index_copy_(1, blocks, part.unflatten(1, (len(piece), -1)).transpose(0, 1))

    def _parts(self) -> list[torch.Tensor]:
        """Return all memory, with pools of one tensor together: uint8 [pools, blocks, n]."""
        return self._pieces or [_bytes_of(pool)[None] for pool in self._pools]


def _bytes_of(pool: Pool) -> torch.Tensor:
    """Return a pool's memory, a row per block: uint8 [blocks, n]."""
    width = pool.per_block * pool.data.shape[1] * pool.data.element_size()
    return pool.data.view(torch.uint8).view(len(pool.data) // pool.per_block, width)
