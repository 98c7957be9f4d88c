"""Every `ratio` tokens to one compressed entry; with ratio 4 the previous group's tokens join (overlap)."""

from collections.abc import Sequence

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.linear import Fp32Linear, RMSNorm, unfilled
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import CompressorState
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

    def forward(self, kv: torch.Tensor, score: torch.Tensor, batch: Batch, state: CompressorState) -> None:
        """Takes the raw rows of the step's tokens, fp32 [T, C] each, into the state and adds the entries that they
        complete."""
        plan = batch.compress[self.ratio].plan
        norm, rounded = self.norm, self.numerics.simulate
        state.keep(compressor.compress_keys(kv, score, self.ape, state.tensors(), plan, norm.weight, norm.eps, rounded))


def compress_both(
    compressors: tuple[Compressor, Compressor],
    rows: Sequence[torch.Tensor],
    batch: Batch,
    states: tuple[CompressorState, CompressorState],
) -> None:
    """The same for the two of a CSA layer, attention's and the indexer's: rows are kv and score of each.

    Without simulation the indexer's q . k needs neither Hadamard nor FP4.
    """
    (one, other), (kv, score, index_kv, index_score), (state, index_state) = compressors, rows, states
    made = compressor.compress_both(
        kv, score, one.ape, state.tensors(), one.norm.weight,
        index_kv, index_score, other.ape, index_state.tensors(), other.norm.weight,
        batch.compress[one.ratio].plan, one.norm.eps, one.numerics.simulate,
    )  # fmt: skip
    for cached, tensors in zip(states, made, strict=True):
        cached.keep(tensors)
