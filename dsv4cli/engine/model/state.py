"""What a layer remembers between steps: rings of the last rows, and pools of compressed entries."""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.compressor import State


class Ring:
    """The last `capacity` rows of each slot: data [slots, capacity, D]; `empty` is the value of rows never written."""

    def __init__(self, data: torch.Tensor, empty: float) -> None:
        self.data = data
        self.empty = empty

    @property
    def capacity(self) -> int:
        """Rows per slot."""
        return self.data.shape[1]


class Pool:
    """Compressed entries of all sequences: data [blocks * per_block, D], block b in rows b * per_block onwards."""

    def __init__(self, data: torch.Tensor, per_block: int) -> None:
        self.data = data
        self.per_block = per_block

    def grow(self, blocks: int) -> None:
        """Makes room for `blocks` blocks in all."""
        missing = blocks * self.per_block - self.data.shape[0]
        if missing > 0:
            fresh = self.data.new_zeros(missing, self.data.shape[1])
            self.data = torch.cat((self.data, fresh)) if len(self.data) else fresh  # never twice at once


@dataclass
class CompressorState:
    """One compressor's state: the raw rows of the open window (scores include ape) and the finished entries, of index
    keys that are rounded to FP4 the codes with their scales."""

    kv: Ring
    score: Ring
    entries: Pool
    scale: Pool | None = None

    def tensors(self) -> State:
        """The memory that a step reads and writes."""
        scale = None if self.scale is None else self.scale.data.view(torch.float8_e8m0fnu)
        return State(self.kv.data, self.score.data, self.entries.data, scale)

    def keep(self, state: State) -> None:
        """Replace the memory by that after a step."""
        self.kv.data, self.score.data, self.entries.data = state.kv, state.score, state.entries
        if self.scale is not None:
            assert state.scale is not None
            self.scale.data = state.scale.view(self.scale.data.dtype)


@dataclass
class LayerCache:
    """One layer's state; `compressed` and `index` exist where the layer's ratio asks for them."""

    window: Ring
    compressed: CompressorState | None = None
    index: CompressorState | None = None

    def rings(self) -> list[Ring]:
        """Every ring of the layer, always in the same order."""
        states = [state for state in (self.compressed, self.index) if state is not None]
        return [self.window, *(ring for state in states for ring in (state.kv, state.score))]

    def pools(self) -> list[Pool]:
        """Every pool of the layer."""
        states = [state for state in (self.compressed, self.index) if state is not None]
        return [pool for state in states for pool in (state.entries, state.scale) if pool is not None]
