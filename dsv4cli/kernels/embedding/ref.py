"""Embedding lookup in plain PyTorch."""

import torch

from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix


def embed(ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(table, BlockMatrix):
        return table.values_of(ids).to(dtype)
    return table.weight[ids.to(table.weight.device)].to(ids.device, dtype)
