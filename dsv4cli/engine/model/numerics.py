"""Which roundings a forward pass makes: a value handed to the model, never a habit of a module."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    """dtype: of activations and of the cache. simulate: whether values are rounded as the official code rounds them.

    exact: whether a row of a step has the same bits on a GPU whatever the other rows are, for steps of up to
    kernels/rows.py ROWS_EXACT rows; else the last bits of its sums depend on their number. On a CPU they never do.
    """

    dtype: torch.dtype
    simulate: bool
    exact: bool = False

    @classmethod
    def reference(cls, exact: bool = False) -> "Numerics":
        """Every rounding of the official model: bf16, FP8 inputs of quantised linears, FP8 keys, FP4 indexer."""
        return cls(torch.bfloat16, simulate=True, exact=exact)

    @classmethod
    def plain(cls, dtype: torch.dtype = torch.float32, exact: bool = False) -> "Numerics":
        """No simulation: the model's formulas in one dtype, with the official fp32 islands."""
        return cls(dtype, simulate=False, exact=exact)
