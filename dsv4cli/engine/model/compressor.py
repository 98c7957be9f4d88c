"""Compressor: pools each `ratio` tokens into one entry; at ratio 4 with the previous group's tokens too (overlap)."""

from collections.abc import Sequence

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.linear import Fp32Linear, RMSNorm, unfilled
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import CompressorState
from dsv4cli.kernels import compressor
from dsv4cli.kernels.compressor import Compression


class Compressor(nn.Module):
    """Pools tokens into compressed entries, which attention uses as keys and values."""

    def __init__(self, config: ModelConfig, numerics: Numerics, ratio: int) -> None:
        super().__init__()
        self.numerics = numerics
        self.ratio = ratio
        self.wkv = Fp32Linear()
        self.wgate = Fp32Linear()
        self.ape = unfilled()
        self.norm = RMSNorm(config.rms_norm_eps)

    def forward(self, kv: torch.Tensor, score: torch.Tensor, batch: Batch, state: CompressorState) -> None:
        """Store the step's values and scores, fp32 [T, C] each, and add the entries that they complete to the state."""
        plan, round_keys = batch.entry_plan(self.ratio), self.numerics.simulate
        state.keep(compressor.compress_keys(self.compression(kv, score, state), plan, round_keys))

    def compression(self, kv: torch.Tensor, score: torch.Tensor, state: CompressorState) -> Compression:
        """Return the arguments of the kernels."""
        return Compression(kv, score, self.ape, self.norm.weight, self.norm.eps, state.tensors())


def compress_both(
    compressors: tuple[Compressor, Compressor],
    rows: Sequence[torch.Tensor],
    batch: Batch,
    states: tuple[CompressorState, CompressorState],
) -> None:
    """Run both compressors of a CSA layer, attention's and the indexer's. rows: values and scores of each.

    Without simulated rounding the indexer's dot products need neither the Hadamard rotation nor FP4.
    """
    (one, other), (kv, score, index_kv, index_score), (state, index_state) = compressors, rows, states
    own, index = one.compression(kv, score, state), other.compression(index_kv, index_score, index_state)
    made = compressor.compress_both(own, index, batch.entry_plan(one.ratio), one.numerics.simulate)
    for cached, tensors in zip(states, made, strict=True):
        cached.keep(tensors)
