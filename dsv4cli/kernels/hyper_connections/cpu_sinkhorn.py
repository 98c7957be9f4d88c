"""Sinkhorn iterations in NumPy, for a CPU: an operation on a few values takes a third of PyTorch's time.

The results have the bits of PyTorch's, which adds up to four values one after another.
"""

import numpy as np
import torch

# rows that PyTorch adds in order; it adds more in groups
IN_ORDER = 4


def suits(comb: torch.Tensor) -> bool:
    """Return whether `iterate` has PyTorch's bits for comb [T, N, N] and no gradient is recorded."""
    recorded = comb.requires_grad and torch.is_grad_enabled()
    return comb.is_cpu and comb.dtype == torch.float32 and comb.shape[-1] <= IN_ORDER and not recorded


def iterate(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Return comb, fp32 [T, N, N], after one pass over columns and `iterations` - 1 passes over rows and columns."""
    count, size = comb.shape[:2]
    # eps is one more row and column, so that one operation adds it to the sum; tokens are last, for long inner loops
    cells = np.full((size + 1, size + 1, count), eps, np.float32)
    values, rows, columns = cells[:size, :size], cells[:size], cells[:, :size]
    values[...] = comb.permute(1, 2, 0).numpy()
    row_sums, column_sums = np.empty((size, 1, count), np.float32), np.empty((1, size, count), np.float32)
    add, divide = np.add.reduce, np.divide
    with np.errstate(all="ignore"):
        divide(values, add(columns, 0, None, column_sums, True), values)
        for _ in range(iterations - 1):
            divide(values, add(rows, 1, None, row_sums, True), values)
            divide(values, add(columns, 0, None, column_sums, True), values)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
