"""Embedding, linears and norm, with weights as stored: filled by weights/fill.py, shapes from checkpoint/layout.py."""

from collections.abc import Sequence

import torch
from torch import nn

from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.kernels import embedding, gemm, norm


def unfilled() -> nn.Parameter:
    """Return a parameter for a module that is not loaded yet: on the meta device, without a shape."""
    return nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


class Embedding(nn.Module):
    """Token embedding. Every rank holds the whole table, on its device or in host memory that the GPU reads."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics
        self.weight = unfilled()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, D] of ids int64 [T]."""
        return embedding.embed(ids, self.weight).to(self.numerics.dtype)


class StoredMatrix(nn.Module):
    """One matrix, or several stacked, in storage format: a weight and its format's scales (config/formats.py)."""

    scale: nn.Parameter | None
    scale_2: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()
        self.register_parameter("scale", None)
        self.register_parameter("scale_2", None)


class Linear(StoredMatrix):
    """y = x @ W.T with a weight in any format. If the weight is quantized, the input is quantized first."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics

    def rounding_scale(self) -> torch.Tensor | None:
        """Return the weight's scale if the input must be rounded, else None."""
        return self.scale if self.numerics.simulate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for x [T, K], both in the dtype of the numerics."""
        scale = self.rounding_scale()
        if scale is None:
            return gemm.linear(x, self.weight, self.scale, self.scale_2)
        return gemm.rounded_linear(x, self.weight, scale, self.scale_2)


class GroupedLinear(StoredMatrix):
    """First half of the output projection: one matrix per group. The input is never quantized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, G, N] for x [T, G, K]."""
        return gemm.grouped_linear(x, self.weight, self.scale)


class Fp32Linear(nn.Module):
    """A linear that computes in fp32 (compressor, router, head): operands are upcast and sums are not rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 [T, N] for x [T, K]."""
        return gemm.linear_fp32(x, self.weight)


class RMSNorm(nn.Module):
    """RMS norm with a weight, computed in fp32 and rounded once."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., D]; shape and dtype stay the same."""
        return norm.rms_norm(x, self.weight, self.eps)


def project(x: torch.Tensor, linears: Sequence[Linear | Fp32Linear]) -> list[torch.Tensor]:
    """Apply several linears to the same x [T, K]. For few tokens this is one launch."""
    if any(isinstance(one, Linear) and one.scale_2 is not None for one in linears):
        return [one(x) for one in linears]
    kinds = _Kinds(linears)
    return kinds.in_order(gemm.linears(x, kinds.rounded, kinds.plain, kinds.fp32))


def project_normed(x: torch.Tensor, norm: RMSNorm, linears: Sequence[Linear]) -> list[torch.Tensor]:
    """Apply several linears to norm(x), x [T, K]. For few tokens this is one launch."""
    if any(one.scale_2 is not None for one in linears):
        return project(norm(x), linears)
    kinds = _Kinds(linears)
    return kinds.in_order((*gemm.normed_linears(x, norm.weight, norm.eps, kinds.rounded, kinds.plain), []))


class _Kinds:
    """Linears grouped by rounding of their input and dtype of their output, as `gemm.linears` expects them."""

    def __init__(self, linears: Sequence[Linear | Fp32Linear]) -> None:
        self.rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.plain: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.fp32: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []  # (kind, index within the kind) of each linear
        for one in linears:
            scale = one.rounding_scale() if isinstance(one, Linear) else None
            if isinstance(one, Fp32Linear):
                self._places.append((2, len(self.fp32)))
                self.fp32.append(one.weight)
            elif scale is None:
                self._places.append((1, len(self.plain)))
                self.plain.append((one.weight, one.scale))
            else:
                self._places.append((0, len(self.rounded)))
                self.rounded.append((one.weight, scale))

    def in_order(self, outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the outputs of all kinds in the order of the linears."""
        return [outputs[kind][number] for kind, number in self._places]
