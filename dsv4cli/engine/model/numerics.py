"""The dtype and rounding of a forward pass, passed to every module explicitly."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    """Dtype, rounding and determinism of a forward pass.

    Attributes:
        dtype: dtype of activations and of the cache.
        simulate: whether to round values as the official code does.
        exact: whether a row's bits on a GPU are independent of the other rows of the step, for steps of up to
            ROWS_EXACT rows (kernels/rows.py). If False, the last bits of its sums depend on the number of rows. On a
            CPU a row's bits are always independent.
    """

    dtype: torch.dtype
    simulate: bool
    exact: bool = False

    @classmethod
    def reference(cls, exact: bool = False) -> "Numerics":
        """Return numerics with every rounding of the official model: bf16, FP8 inputs and keys, FP4 indexer."""
        return cls(torch.bfloat16, simulate=True, exact=exact)

    @classmethod
    def plain(cls, dtype: torch.dtype = torch.float32, exact: bool = False) -> "Numerics":
        """Return numerics without simulated rounding: one dtype, and fp32 where the official code uses it."""
        return cls(dtype, simulate=False, exact=exact)
