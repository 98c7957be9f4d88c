"""A weight matrix in its storage format, as the kernels take it."""

from typing import NamedTuple

import torch


class StoredMatrix(NamedTuple):
    """One matrix, or a stack of several, in storage format. The weight's dtype determines the format.

    Attributes:
        weight: [..., N, K], or [..., N, K / 2] for FP4 and NVFP4; formats as for `block_scale.dequantise`.
        scale: block scales, as for `block_scale.dequantise`; None for bf16 and fp32 weights without scales.
        scale_2: fp32 [...] for NVFP4: one factor per matrix, which multiplies the sums in fp32; otherwise None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None

    def row(self, number: int) -> "StoredMatrix":
        """Return the matrix in this row of a stack."""
        scale = None if self.scale is None else self.scale[number]
        return StoredMatrix(self.weight[number], scale, None if self.scale_2 is None else self.scale_2[number])
