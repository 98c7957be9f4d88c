"""Which roundings a forward pass makes: a value handed to the model, never a habit of a module."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    """dtype: of activations and of the cache. simulate: whether values are rounded as the official code rounds them."""

    dtype: torch.dtype
    simulate: bool

    @classmethod
    def reference(cls) -> "Numerics":
        """Every rounding of the official model: bf16, FP8 inputs of quantised linears, FP8 keys, FP4 indexer."""
        return cls(torch.bfloat16, simulate=True)

    @classmethod
    def plain(cls, dtype: torch.dtype = torch.float32) -> "Numerics":
        """No simulation: the model's formulas in one dtype, with the official fp32 islands."""
        return cls(dtype, simulate=False)
