"""Rows of an embedding that lies where the tokens are, or in host memory that a GPU reads in place."""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.embedding import ref


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of table [V, D], consecutive, at ids int64 [T]: [T, D] in its dtype, on the device of ids.

    table: on that device, or in host memory, which has to be pinned where Triton's kernels compute.
    """
    if table.device == ids.device:
        return table[ids]
    return choose(ids, ref).embed(ids, table)
