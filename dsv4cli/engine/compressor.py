"""Every `ratio` tokens to one compressed entry; with ratio 4 the previous group's tokens join (overlap)."""

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import CompressorState
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.linear import Fp32Linear, RMSNorm, unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.kernels import compressor


class Compressor(nn.Module):
    """Pools tokens into entries, the keys of attention."""

    def __init__(self, config: ModelConfig, numerics: Numerics, ratio: int) -> None:
        super().__init__()
        self.numerics = numerics
        self.ratio = ratio
        self.wkv = Fp32Linear()
        self.wgate = Fp32Linear()
        self.ape = unfilled()
        self.norm = RMSNorm(config.rms_norm_eps)

    def forward(self, x: torch.Tensor, batch: Batch, state: CompressorState) -> None:
        """Takes the step's hidden states x [T, D] into the state and adds the entries that they complete."""
        plan = batch.compress[self.ratio].plan
        state.keep(self.compress(self.wkv(x), self.wgate(x), state.tensors(), plan))

    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, state: compressor.State, plan: compressor.Plan
    ) -> compressor.State:
        """The state after a step's raw rows; entries as attention reads them."""
        norm, rounded = self.norm, self.numerics.simulate
        return compressor.compress_keys(kv, score, self.ape, state, plan, norm.weight, norm.eps, rounded)


class IndexCompressor(Compressor):
    """The same for the indexer's keys. Without simulation q . k needs neither Hadamard nor FP4."""

    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, state: compressor.State, plan: compressor.Plan
    ) -> compressor.State:
        """The state after a step's raw rows; entries as the indexer reads them."""
        if not self.numerics.simulate:
            return super().compress(kv, score, state, plan)
        return compressor.compress_index_keys(kv, score, self.ape, state, plan, self.norm.weight, self.norm.eps)
