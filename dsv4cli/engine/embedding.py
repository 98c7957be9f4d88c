"""Rows of a vocabulary by token id."""

import torch
from torch import nn

from dsv4cli.engine.linear import unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World


class Embedding(nn.Module):
    """A rank holds its share of the vocabulary."""

    def __init__(self, numerics: Numerics, world: World) -> None:
        super().__init__()
        self.numerics = numerics
        self.world = world
        self.weight = unfilled()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]."""
        rows = self.weight.shape[0]
        local = ids - self.world.rank * rows
        here = (local >= 0) & (local < rows)
        x = self.weight[local.clamp(0, rows - 1)].to(self.numerics.dtype)
        return self.world.all_reduce(x.masked_fill(~here[:, None], 0))
