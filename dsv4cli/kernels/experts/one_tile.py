"""The routed experts and the shared one on a CPU, for the few tokens that fit into one tile of kernels/alike.py.

Each matrix multiplies all tokens at once, which takes as long as one token, and everything between the products is done
for all experts at once. The results have the bits of `ref.mixture`, with half of its operations.
"""

from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from dsv4cli.kernels import alike
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.experts.activation import gated
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

Matrices = tuple[StoredMatrix, StoredMatrix, StoredMatrix]


def suits(x: torch.Tensor, experts: torch.Tensor, weights: "ExpertWeights", shared: "ExpertWeights") -> bool:
    """Return whether `mixture` supports x [T, D]: few tokens on a CPU, and a shared expert like the routed ones.

    It reads the routing weights as numbers, which have no gradients.
    """
    if not x.is_cpu or x.requires_grad or not 0 < x.shape[0] <= alike.TILE:
        return False
    routed, own = weights.w1, shared.w1
    return (
        routed.scale_2 is None
        and own.scale_2 is None
        and (routed.scale is None) == (own.scale is None)
        and routed.weight.shape[-2] == own.weight.shape[-2]
        and all(len({*chosen}) == len(chosen) for chosen in experts.tolist())
    )


def mixture(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inner: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `ref.mixture` of x, whose values are already rounded if they must be."""
    factors = [dict(zip(*token, strict=True)) for token in zip(experts.tolist(), routing.tolist(), strict=True)]
    numbers = sorted({*chain(*factors)})  # ascending, the order in which a token's experts are added
    matrices = [*_matrices(weights, numbers), shared.matrices]
    tile = alike.filled(x.float())
    products = (F.linear(tile, one.values()) for one in [w1 for w1, _, _ in matrices] + [w3 for *_, w3 in matrices])
    gate, up = torch.stack([*products], 1)[: len(x)].to(x.dtype).chunk(2, 1)  # [T, experts, I], the shared one last
    factor = torch.tensor([[*(own.get(number, 0.0) for number in numbers), 1.0] for own in factors], device="cpu")
    inner = (factor.unsqueeze(-1) * gated(gate, up, limit)).to(x.dtype).float()
    if round_inner:
        inner = block_scale.fp8_round(inner, FP8_BLOCK)
    pairs = zip(alike.filled(inner).unbind(1), matrices, strict=True)
    # one matrix is dequantized at a time
    products = (F.linear(rows, w2.values()) for rows, (_, w2, _) in pairs)
    outputs = torch.stack([*products], 1)[: len(x)].to(x.dtype).float()
    if any(len(own) < len(numbers) for own in factors):
        # -0.0 + x has the bits of any x
        unused = torch.tensor([[*(number not in own for number in numbers), False] for own in factors], device="cpu")
        outputs = outputs.masked_fill(unused.unsqueeze(-1), -0.0)
    total, *others = outputs.unbind(1)
    for other in others:
        total = total + other
    return total.to(dtype)


def _matrices(weights: "ExpertWeights", numbers: list[int]) -> list[Matrices]:
    """Return the matrices w1, w2 and w3 of these experts."""
    rows = numbers if weights.rows is None else weights.rows[numbers].tolist()
    return [(weights.w1.row(row), weights.w2.row(row), weights.w3.row(row)) for row in rows]
