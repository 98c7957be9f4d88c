"""Linears in plain PyTorch."""

from collections.abc import Iterable, Sequence

import torch

from dsv4cli.kernels import alike
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.norm import ref as norm
from dsv4cli.kernels.stored_matrix import StoredMatrix

# values of a matrix that linear_fp32 dequantizes at a time
PART = 1 << 25


def linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return _linear(x.float(), matrix, x.dtype)


def _linear(inputs: torch.Tensor, matrix: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of inputs, fp32 [T, K], rounded once to dtype."""
    y = alike.product(inputs, matrix.values())
    return (y if matrix.scale_2 is None else y * matrix.scale_2).to(dtype)


def rounded_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    # rounded values are exact in x's dtype
    return _linear(block_scale.fp8_round(x.float(), FP8_BLOCK), matrix, x.dtype)


def linear_fp32(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    inputs = x.float()
    # without fp32 values of the whole head at once
    parts = [alike.product(inputs, part.values()) for part in matrix.parts(PART)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    return alike.grouped_product(x.float(), matrix.values().chunk(x.shape[1])).to(x.dtype)


def linears(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
    fp32: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    inputs = x.float()
    of_plain = _linears(inputs, plain, x) if plain else []
    of_fp32 = list(alike.products(inputs, (one.values() for one in fp32))) if fp32 else []
    if rounded:
        inputs = block_scale.fp8_round(inputs, FP8_BLOCK)  # last, in place of the others' inputs
    return _linears(inputs, rounded, x) if rounded else [], of_plain, of_fp32


def _linears(inputs: torch.Tensor, matrices: Iterable[StoredMatrix], like: torch.Tensor) -> list[torch.Tensor]:
    """Return the products of inputs, fp32 [T, K], rounded to the dtype of `like`."""
    weights = (one.values() for one in matrices)
    return [y.type_as(like) for y in alike.products(inputs, weights)]


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return linears(norm.rms_norm(x, norm_weight, eps), rounded, plain, ())[:2]
