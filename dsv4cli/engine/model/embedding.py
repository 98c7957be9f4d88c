"""Rows of a vocabulary by token id."""

import torch
from torch import nn

from dsv4cli.engine.model.linear import unfilled
from dsv4cli.engine.model.numerics import Numerics


class Embedding(nn.Module):
    """Every rank holds the whole of it."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics
        self.weight = unfilled()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]."""
        return self.weight[ids].to(self.numerics.dtype)
