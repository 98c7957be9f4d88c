"""Gated experts in plain PyTorch."""

from typing import TYPE_CHECKING

import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.experts import one_tile
from dsv4cli.kernels.experts.activation import gated
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights


def routed_experts(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    return _routed(
        block_scale.fp8_round(x, FP8_BLOCK) if round_inputs else x, weights, experts, routing, limit, round_inputs
    )


def _routed(
    inputs: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inner: bool,
) -> torch.Tensor:
    """Compute routed_experts of inputs that have already been rounded if they must be."""
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # pairs (token, place) by expert
    tokens, factors = order // experts.shape[1], routing.flatten()[order, None]
    counts = torch.bincount(chosen, minlength=weights.count).tolist()
    stacked = range(len(counts)) if weights.rows is None else weights.rows.tolist()
    # sums start at -0.0, because -0.0 + x has the bits of any x
    total, start = inputs.new_full(inputs.shape, -0.0, dtype=torch.float32), 0
    for expert, count in enumerate(counts):  # ascending, the order in which a token's experts are added
        if count:
            rows = slice(start, start + count)
            outputs = _expert(inputs[tokens[rows]], weights, stacked[expert], factors[rows], limit, round_inner)
            total.index_add_(0, tokens[rows], outputs.float())
            start += count
    return total


def _expert(
    x: torch.Tensor, weights: "ExpertWeights", row: int, factors: torch.Tensor, limit: float, round_inputs: bool
) -> torch.Tensor:
    """Return the output of one routed expert for x [n, D]; factors: fp32 [n, 1]."""
    gate, up = gemm.linear(x, weights.w1.row(row)), gemm.linear(x, weights.w3.row(row))
    inner = (factors * gated(gate, up, limit)).type_as(x)
    if round_inputs:
        inner = block_scale.fp8_round(inner, FP8_BLOCK)
    return gemm.linear(inner, weights.w2.row(row))


def shared_expert(x: torch.Tensor, weights: "ExpertWeights", limit: float, round_inputs: bool) -> torch.Tensor:
    return _shared(x, _rounded(x, round_inputs, weights.w1, weights.w3), weights, limit, round_inputs)


def _shared(
    x: torch.Tensor, rounded: torch.Tensor, weights: "ExpertWeights", limit: float, round_inner: bool
) -> torch.Tensor:
    """Compute shared_expert; `rounded` is the input for weights with a scale, x for weights without one."""
    gate, up = (gemm.linear(x if one.scale is None else rounded, one) for one in (weights.w1, weights.w3))
    inner = gated(gate, up, limit).type_as(x)
    if round_inner and weights.w2.scale is not None:
        inner = block_scale.fp8_round(inner, FP8_BLOCK)
    return gemm.linear(inner, weights.w2)


def mixture(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    # rounded once for the routed experts and the shared one
    rounded = _rounded(x, round_inputs, weights.w1, shared.w1, shared.w3)
    round_routed = round_inputs and weights.w1.scale is not None
    if one_tile.suits(x, experts, weights, shared):
        return one_tile.mixture(
            rounded if round_routed else x, weights, shared, experts, routing, limit, round_routed, dtype
        )
    routed = _routed(rounded if round_routed else x, weights, experts, routing, limit, round_routed)
    return (routed + _shared(x, rounded, shared, limit, round_inputs).float()).to(dtype)


def _rounded(x: torch.Tensor, round_inputs: bool, *matrices: StoredMatrix) -> torch.Tensor:
    """Return fp8_round of x if one of the matrices has a scale, otherwise x."""
    wanted = round_inputs and any(matrix.scale is not None for matrix in matrices)
    return block_scale.fp8_round(x, FP8_BLOCK) if wanted else x
