"""Embedding, linears and norm, with weights as stored: filled by weights/fill.py, shapes from checkpoint/layout.py."""

from collections.abc import Sequence

import torch
from torch import nn

from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.kernels import embedding, gemm, norm
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix


def unfilled() -> nn.Parameter:
    """Return a parameter for a module that is not loaded yet: on the meta device, without a shape."""
    return nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)


class MatrixParameters(nn.Module):
    """Parameters of one matrix, or several stacked, in storage format: a weight and its scales (config/formats.py).

    block_type: the GGUF type, if the weight is rows of blocks.
    """

    block_type: str | None = None
    scale: nn.Parameter | None
    scale_2: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = unfilled()
        self.register_parameter("scale", None)
        self.register_parameter("scale_2", None)

    @property
    def matrix(self) -> StoredMatrix:
        """The matrix as a kernel argument."""
        if self.block_type is not None:
            return BlockMatrix.of(self.weight, self.block_type)
        return StoredMatrix(self.weight, self.scale, self.scale_2)


class Embedding(MatrixParameters):
    """Token embedding. Every rank holds the whole table, on its device or in host memory that the GPU reads."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, D] of ids int64 [T]."""
        return embedding.embed(ids, self.matrix, self.numerics.dtype)


class Linear(MatrixParameters):
    """y = x @ W.T with a weight in any format. If the weight is quantized, the input is quantized first."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.numerics = numerics

    @property
    def projection(self) -> gemm.Projection:
        """This linear as an argument of `gemm.project`."""
        matrix = self.matrix
        rounded = matrix.scale is not None and self.numerics.simulate
        return gemm.Projection(matrix, "rounded" if rounded else "plain")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for x [T, K], both in the dtype of the numerics."""
        return gemm.project_one(x, self.projection)


class GroupedLinear(MatrixParameters):
    """First half of the output projection: one matrix per group. The input is never quantized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, G, N] for x [T, G, K]."""
        return gemm.grouped_linear(x, self.matrix)


class Fp32Linear(MatrixParameters):
    """A linear that computes in fp32 (compressor, head): operands are upcast and sums are not rounded."""

    @property
    def projection(self) -> gemm.Projection:
        """This linear as an argument of `gemm.project`."""
        return gemm.Projection(self.matrix, "fp32")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 [T, N] for x [T, K]."""
        return gemm.project_one(x, self.projection)


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
    return gemm.project(x, [one.projection for one in linears])


def project_normed(x: torch.Tensor, norm: RMSNorm, linears: Sequence[Linear]) -> list[torch.Tensor]:
    """Apply several linears to norm(x), x [T, K]. For few tokens this is one launch."""
    return gemm.project(x, [one.projection for one in linears], (norm.weight, norm.eps))
