"""Embedding lookup in plain PyTorch."""

import torch

from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix


def embed(ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    rows = table.weight[ids.to(table.weight.device)].to(ids.device)
    values = rows if table.block_type is None else BlockMatrix.of(rows, table.block_type).values()
    return values.to(dtype)
