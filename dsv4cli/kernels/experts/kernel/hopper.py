"""Selects the experts for `warp_specialized`, which needs Gluon and is imported only when used."""

from typing import TYPE_CHECKING

import torch

from dsv4cli.kernels.experts.kernel.sort_by_expert import Groups
from dsv4cli.kernels.launch import takes_gluon
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# pairs of small and large tiles; most pairs per expert for small ones; columns whose scales are loaded at a time
SMALL, LARGE, FEW, COLUMNS = 64, 128, 48, 512
# fewest pairs per expert for which `warp_specialized` is faster
LEAST = 16
# most input values: offsets have 32 bits
MOST = 2**31


def suits(x: torch.Tensor, weights: "ExpertWeights", pairs: int, experts: int) -> bool:
    """Return whether `warp_specialized` supports these weights and inputs x [T, D], and is the fastest for them.

    pairs, experts: the number of pairs and of experts.
    """
    inner, width = weights.w1.weight.shape[1], x.shape[1]
    if pairs < LEAST * experts:
        return False
    # FP4 with e8m0 scales
    if weights.w1.weight.dtype != torch.int8 or x.dtype != torch.bfloat16 or width % COLUMNS or inner % COLUMNS:
        return False
    return max(len(x) * width, pairs * inner) < MOST and takes_gluon(x.device)


def tile(pairs: int, experts: int) -> int:
    """Return the pairs of a tile for this many pairs and experts."""
    return SMALL if pairs <= FEW * experts else LARGE


def gate_up(
    x: torch.Tensor,
    groups: Groups,
    routing: torch.Tensor,
    weights: "ExpertWeights",
    inner: torch.Tensor,
    limit: float,
    pairs: int,
) -> None:
    """Compute `grouped_gemm.gate_up` into inner [P, I].

    x: [T, D] as `grouped_operands.prepare` arranges it. pairs: pairs in a tile.
    """
    from dsv4cli.kernels.experts.kernel import warp_specialized

    warp_specialized.products(x, groups, routing, _words(weights.w1), _words(weights.w3), inner, limit, pairs)


def down(inner: torch.Tensor, groups: Groups, weights: "ExpertWeights", outputs: torch.Tensor, pairs: int) -> None:
    """Compute `grouped_gemm.down` into outputs [P, D]. pairs: pairs in a tile."""
    from dsv4cli.kernels.experts.kernel import warp_specialized

    matrix = _words(weights.w2)
    warp_specialized.products(inner, groups, None, matrix, matrix, outputs, 0.0, pairs)


def _words(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [E, N, K / 8] and scales [E, N, K / 128] as words of 32 bits."""
    assert matrix.scale is not None
    return matrix.weight.view(torch.int32), matrix.scale.view(torch.int32)
