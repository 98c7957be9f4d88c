"""Embedding lookup in a table on the tokens' device, or in host memory that a GPU reads directly."""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.embedding import ref


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the rows of table [V, D] at ids int64 [T]: [T, D] in the table's dtype, on the device of ids.

    table: contiguous, on that device or in host memory, which must be pinned for Triton's kernels.
    """
    if table.device == ids.device:
        return table[ids]
    return choose(ids, ref).embed(ids, table)
