"""Embedding and linears whose weights stay as stored: filled by weights/fill.py, shaped by checkpoint/layout.py."""

from collections.abc import Sequence

import torch
from torch import nn

from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.kernels import embedding, gemm, norm


def unfilled() -> nn.Parameter:
    """A parameter before loading: on the meta device, without a shape."""
    return nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


class Embedding(nn.Module):
    """Every rank holds the whole of it, on its device or in host memory, which is read in place."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics
        self.weight = unfilled()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]."""
        return embedding.embed(ids, self.weight).to(self.numerics.dtype)


class StoredMatrix(nn.Module):
    """A matrix, or several stacked, as stored: the weight and the scales that its format has (config/formats.py)."""

    scale: nn.Parameter | None
    scale_2: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()
        self.register_parameter("scale", None)
        self.register_parameter("scale_2", None)


class Linear(StoredMatrix):
    """y = x @ W.T over a weight in any format; the input of a quantised weight is quantised first."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics

    def rounding_scale(self) -> torch.Tensor | None:
        """The scale of a weight whose input is rounded."""
        return self.scale if self.numerics.simulate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, K] in the numerics' dtype -> [T, N] in it."""
        scale = self.rounding_scale()
        if scale is None:
            return gemm.linear(x, self.weight, self.scale, self.scale_2)
        return gemm.rounded_linear(x, self.weight, scale, self.scale_2)


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


def project(x: torch.Tensor, linears: Sequence[Linear | Fp32Linear]) -> list[torch.Tensor]:
    """What each of these linears gives for x [T, K]: of few tokens in one launch."""
    if any(isinstance(one, Linear) and one.scale_2 is not None for one in linears):
        return [one(x) for one in linears]
    kinds = _Kinds(linears)
    return kinds.in_order(gemm.linears(x, kinds.rounded, kinds.plain, kinds.fp32))


def project_normed(x: torch.Tensor, norm: RMSNorm, linears: Sequence[Linear]) -> list[torch.Tensor]:
    """What each of these linears gives for norm(x), x [T, K]: of few tokens in one launch."""
    if any(one.scale_2 is not None for one in linears):
        return project(norm(x), linears)
    kinds = _Kinds(linears)
    return kinds.in_order((*gemm.normed_linears(x, norm.weight, norm.eps, kinds.rounded, kinds.plain), []))


class _Kinds:
    """Linears by what happens to their input and output, as `gemm.linears` takes them."""

    def __init__(self, linears: Sequence[Linear | Fp32Linear]) -> None:
        self.rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.plain: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.fp32: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []  # of each linear its kind, and its number there
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
        """The outputs of all kinds as the linears were given."""
        return [outputs[kind][number] for kind, number in self._places]
