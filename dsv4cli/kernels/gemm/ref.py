"""Linears in plain PyTorch."""

import torch
import torch.nn.functional as F

from dsv4cli.kernels.block_scale import ref as block_scale


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return linear_fp32(x, block_scale.dequantise(weight, scale)).to(x.dtype)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight.float())


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    groups = x.shape[1]
    matrices = block_scale.dequantise(weight, scale).unflatten(0, (groups, -1))
    return torch.stack([linear_fp32(x[:, g], matrices[g]) for g in range(groups)], 1).to(x.dtype)
