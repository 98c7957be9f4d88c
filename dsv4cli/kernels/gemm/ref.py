"""Linears in plain PyTorch."""

from collections.abc import Sequence

import torch

from dsv4cli.kernels import alike
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.norm import ref as norm


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    y = linear_fp32(x, block_scale.dequantise(weight, scale))
    return (y if scale_2 is None else y * scale_2).to(x.dtype)


def rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    return linear(block_scale.fp8_round(x, FP8_BLOCK), weight, scale, scale_2)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return alike.product(x.float(), weight.float())


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    groups = x.shape[1]
    matrices = block_scale.dequantise(weight, scale).unflatten(0, (groups, -1))
    return torch.stack([linear_fp32(x[:, g], matrices[g]) for g in range(groups)], 1).to(x.dtype)


def linears(
    x: torch.Tensor,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    fp32: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    inputs = block_scale.fp8_round(x, FP8_BLOCK) if rounded else x
    return (
        [linear(inputs, weight, scale) for weight, scale in rounded],
        [linear(x, weight, scale) for weight, scale in plain],
        [linear_fp32(x, weight) for weight in fp32],
    )


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plain: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return linears(norm.rms_norm(x, norm_weight, eps), rounded, plain, ())[:2]
