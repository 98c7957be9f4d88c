"""The indexer of CSA layers: which compressed entries a token attends to."""

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import CompressorState
from dsv4cli.engine.compressor import IndexCompressor
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.linear import Linear
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World
from dsv4cli.kernels import indexer, rope

RATIO = 4


class Indexer(nn.Module):
    """Scores entries with small heads of its own and keeps the best `index_topk`."""

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.numerics = numerics
        self.world = world
        self.width = config.index_head_dim
        self.topk = config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = Linear(numerics)
        self.weights_proj = Linear(numerics)
        self.compressor = IndexCompressor(config, numerics, RATIO)

    def forward(self, x: torch.Tensor, latent: torch.Tensor, batch: Batch, state: CompressorState) -> torch.Tensor:
        """The cells of the chosen entries of each token: int64 [T, k], -1 in unused places.

        x: attention-normed hidden state [T, D]; latent: normed query latent [T, Q].
        """
        self.compressor(x, batch, state)
        step = batch.compress[RATIO]
        scores = self.scores(x, latent, batch, state)
        return step.chosen_entries(indexer.top_entries(scores, step.visible, self.topk))

    def scores(self, x: torch.Tensor, latent: torch.Tensor, batch: Batch, state: CompressorState) -> torch.Tensor:
        """The score of each entry of a token's sequence: [T, E], -inf for entries that the token does not see."""
        step = batch.compress[RATIO]
        q = self.wq_b(latent).unflatten(-1, (-1, self.width))
        q = self.numerics.index(rope.rotate(q, batch.rotations[RATIO]))
        weights = (self.weights_proj(x).float() * self.scale).to(x.dtype)
        keys = state.tensors()
        scores = indexer.index_scores(q, weights, keys.entries, keys.scale, step.table, step.sequence, step.visible)
        return self.world.all_reduce(scores)
