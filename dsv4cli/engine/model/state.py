"""The state of a layer between steps: ring buffers of the latest rows, and pools of compressed entries."""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.compressor import State


class Ring:
    """Ring buffers with the last `capacity` rows of each slot: data [slots, capacity, D].

    `empty` is the value of rows that were never written.
    """

    def __init__(self, data: torch.Tensor, empty: float) -> None:
        self.data = data
        self.empty = empty

    @property
    def capacity(self) -> int:
        """Rows per slot."""
        return self.data.shape[1]


class Pool:
    """Compressed entries of all sequences: data [blocks * per_block, D]. Block b starts at row b * per_block."""

    def __init__(self, data: torch.Tensor, per_block: int) -> None:
        self.data = data
        self.per_block = per_block

    def grow(self, blocks: int) -> None:
        """Allocate memory for `blocks` blocks in total."""
        missing = blocks * self.per_block - self.data.shape[0]
        if missing > 0:
            fresh = self.data.new_zeros(missing, self.data.shape[1])
            self.data = torch.cat((self.data, fresh)) if len(self.data) else fresh  # cat would copy `fresh`


@dataclass
class CompressorState:
    """The state of one compressor: values and scores of the incomplete group, and the finished entries.

    Attributes:
        kv: values, fp32.
        score: scores, fp32, with the position bias `ape`.
        entries: finished entries; FP4 codes for index keys that are rounded to FP4.
        scale: scales of FP4 codes; else None.
    """

    kv: Ring
    score: Ring
    entries: Pool
    scale: Pool | None = None

    def tensors(self) -> State:
        """Return the tensors that a step reads and writes."""
        scale = None if self.scale is None else self.scale.data.view(torch.float8_e8m0fnu)
        return State(self.kv.data, self.score.data, self.entries.data, scale)

    def keep(self, state: State) -> None:
        """Replace the tensors with those after a step."""
        self.kv.data, self.score.data, self.entries.data = state.kv, state.score, state.entries
        if self.scale is not None:
            assert state.scale is not None
            self.scale.data = state.scale.view(self.scale.data.dtype)


@dataclass
class LayerCache:
    """The state of one layer. The layer's ratio decides whether it has `compressed` and `index`."""

    window: Ring
    compressed: CompressorState | None = None
    index: CompressorState | None = None

    def rings(self) -> list[Ring]:
        """Return every ring of the layer, always in the same order."""
        states = [state for state in (self.compressed, self.index) if state is not None]
        return [self.window, *(ring for state in states for ring in (state.kv, state.score))]

    def pools(self) -> list[Pool]:
        """Return every pool of the layer."""
        states = [state for state in (self.compressed, self.index) if state is not None]
        return [pool for state in states for pool in (state.entries, state.scale) if pool is not None]
