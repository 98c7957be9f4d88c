"""Every `ratio` tokens to one compressed entry; with ratio 4 the previous group's tokens join (overlap)."""

from collections.abc import Callable

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import CompressorState
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.linear import Fp32Linear, RMSNorm, unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.kernels import compressor, rope


class Compressor(nn.Module):
    """Pools tokens into entries; `finish` gives a normed and rotated entry the form in which it is stored."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, ratio: int, finish: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.numerics = numerics
        self.ratio = ratio
        self.finish = finish
        self.wkv = Fp32Linear()
        self.wgate = Fp32Linear()
        self.ape = unfilled()
        self.norm = RMSNorm(config.rms_norm_eps)

    def forward(self, x: torch.Tensor, batch: Batch, state: CompressorState) -> None:
        """Takes the step's hidden states x [T, D] into the state and adds the entries that they complete."""
        step = batch.compress[self.ratio]
        kv = self.wkv(x)
        score = self.wgate(x) + self.ape[batch.positions % self.ratio]
        # rings are read before they are written
        all_kv = state.kv.followed_by(batch.slots, kv)
        all_score = state.score.followed_by(batch.slots, score)
        state.kv.store(step.open.cells, kv[step.open.rows])
        state.score.store(step.open.cells, score[step.open.rows])
        if step.cells.numel():
            pooled = compressor.pool(self._halves(all_kv[step.members]), self._halves(all_score[step.members]))
            entries = rope.rotate(self.norm(pooled.to(self.numerics.dtype)), step.rotation)
            state.entries.insert(step.cells, self.finish(entries))

    def _halves(self, rows: torch.Tensor) -> torch.Tensor:
        """The channels that each member gives: with overlap, the previous group's first half, its own second half."""
        if rows.shape[1] == self.ratio:
            return rows
        first, second = rows.chunk(2, -1)
        return torch.cat((first[:, : self.ratio], second[:, self.ratio :]), 1)
