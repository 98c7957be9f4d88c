"""Embedding lookup in a table on the tokens' device, or in host memory that a GPU reads directly."""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.embedding import ref
from dsv4cli.kernels.stored_matrix import StoredMatrix


def embed(ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of a table [V, D] at ids int64 [T]: [T, D], rounded once to `dtype`, on the device of ids.

    table: fp32, fp16, bf16 or GGUF blocks without scales, contiguous, on that device or in host memory, which must be
    pinned for Triton's kernels.
    """
    if table.weight.device == ids.device and table.block_type is None:
        return table.weight[ids].to(dtype)
    return choose(ids, ref).embed(ids, table, dtype)
