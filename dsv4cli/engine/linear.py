"""Linears whose weights stay as stored; parameters are filled by `weights.py`, shapes stand in `layout.py`."""

import torch
from torch import nn

from dsv4cli.engine.numerics import Numerics
from dsv4cli.kernels import gemm, norm


def unfilled() -> nn.Parameter:
    """The place of a parameter before loading: on the meta device, without a shape."""
    return nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


class StoredMatrix(nn.Module):
    """A matrix, or several stacked, as stored: the weight and, where its format has one, the block scale."""

    scale: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()
        self.register_parameter("scale", None)


class Linear(StoredMatrix):
    """y = x @ W.T over a weight in FP8, FP4, bf16 or fp32; the input of a quantised weight is quantised first."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, K] in the numerics' dtype -> [T, N] in it."""
        if self.scale is not None and self.numerics.simulate:
            return gemm.rounded_linear(x, self.weight, self.scale)
        return gemm.linear(x, self.weight, self.scale)


class GroupedLinear(StoredMatrix):
    """The first half of the output projection: one matrix per group, input never quantised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, G, K] -> [T, G, N]."""
        return gemm.grouped_linear(x, self.weight, self.scale)


class Fp32Linear(nn.Module):
    """A linear of the fp32 islands (compressor, router, head): operands upcast, sums not rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, K] -> fp32 [T, N]."""
        return gemm.linear_fp32(x, self.weight)


class RMSNorm(nn.Module):
    """RMS norm with a weight, in fp32 with one rounding."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., D] -> the same shape and dtype."""
        return norm.rms_norm(x, self.weight, self.eps)
