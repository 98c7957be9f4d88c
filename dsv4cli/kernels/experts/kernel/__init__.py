"""Gated experts in Triton: selects the kernels by the number of tokens and the weights' format."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import fp8_round
from dsv4cli.kernels.experts.kernel import few_tokens, fp8_hopper, ggml, many_tokens
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm import kernel as gemm
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.rows import rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# most tokens for which `few_tokens` is used
FEW = 64
# weights that `few_tokens` supports, with their scales, of routed experts and of the shared one; e8m0 may be bytes
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
ROUTED = {torch.int8: _E8M0, torch.uint8: (torch.float8_e4m3fn,)}
SHARED = {torch.float8_e4m3fn: _E8M0}
BLOCK = 1024


def routed_experts(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    chosen = experts.contiguous(), routing.contiguous()
    if fp8_hopper.suits(x, weights, experts.numel(), round_inputs):
        return fp8_hopper.mixture(rows(x), weights, None, *chosen, limit, torch.float32)
    if _takes_few(x, weights, ROUTED):
        return few_tokens.routed_experts(rows(x), weights, *chosen, limit, round_inputs)
    return many_tokens.ordered_sum(_outputs(x, weights, experts, routing, limit, round_inputs), experts)


def _outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """Return the output of each of a token's experts: [T * k, D] in x's dtype."""
    family = ggml if ggml.takes(weights) else many_tokens
    return family.routed_outputs(x, weights, experts, routing, limit, round_inputs)


def shared_expert(x: torch.Tensor, weights: "ExpertWeights", limit: float, round_inputs: bool) -> torch.Tensor:
    if weights.w1.scale_2 is not None:
        return _nvfp4_expert(x, weights, limit, round_inputs)
    gate, up = _linears(x, (weights.w1, weights.w3), round_inputs)
    return _linears(gated(gate, up, limit, x.dtype), (weights.w2,), round_inputs)[0]


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
    chosen, round_routed = (experts.contiguous(), routing.contiguous()), round_inputs and weights.w1.scale is not None
    if fp8_hopper.suits(x, weights, experts.numel(), round_routed):
        if fp8_hopper.suits_shared(x, weights, shared):
            return fp8_hopper.mixture(rows(x), weights, shared, *chosen, limit, dtype)
        own = shared_expert(x, shared, limit, round_inputs)
        return fp8_hopper.mixture(rows(x), weights, None, *chosen, limit, dtype, own)
    if _takes_few(x, weights, ROUTED) and _takes_few(x, shared, SHARED):
        return few_tokens.mixture(rows(x), weights, shared, *chosen, limit, round_inputs, dtype)
    if _takes_few(x, weights, ROUTED):
        routed = routed_experts(x, weights, experts, routing, limit, round_routed)
        # summed in fp32 and rounded in one launch
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        return torch.add(routed, shared_expert(x, shared, limit, round_inputs), out=y)
    if ggml.takes_int8(x, weights, shared):
        both = ggml.int8_outputs(x, weights, shared, experts, routing, limit)
        return many_tokens.ordered_sum(both[: experts.numel()], experts, both[experts.numel() :], dtype)
    outputs = _outputs(x, weights, experts, routing, limit, round_routed)
    return many_tokens.ordered_sum(outputs, experts, shared_expert(x, shared, limit, round_inputs), dtype)


def _takes_few(
    x: torch.Tensor, weights: "ExpertWeights", dtypes: Mapping[torch.dtype, Collection[torch.dtype]]
) -> bool:
    """Return whether `few_tokens` supports these tokens and weights.

    dtypes: the weights that it supports, each with the supported dtypes of its scales.
    """
    first = weights.w1.weight
    widths = (x.shape[1], first.shape[-2])
    return (
        0 < len(x) <= FEW
        and x.dtype == torch.bfloat16
        and all(weight.dtype == first.dtype and weight.is_contiguous() for weight, _, _ in weights.matrices)
        and all(
            scale is not None and scale.dtype in dtypes.get(first.dtype, ()) and scale.is_contiguous()
            for _, scale, _ in weights.matrices
        )
        and not any(width % FP8_BLOCK for width in widths)
    )


def _linears(x: torch.Tensor, matrices: Sequence[StoredMatrix], round_inputs: bool) -> list[torch.Tensor]:
    """Return x times each matrix; with round_inputs, x is rounded for matrices with a scale."""
    rounded = [matrix for matrix in matrices if round_inputs and matrix.scale is not None]
    plain = [matrix for matrix in matrices if not (round_inputs and matrix.scale is not None)]
    of_rounded, of_plain, _ = gemm.linears(x, rounded, plain, ())
    return [(of_rounded if round_inputs and one.scale is not None else of_plain).pop(0) for one in matrices]


def _nvfp4_expert(x: torch.Tensor, weights: "ExpertWeights", limit: float, round_inputs: bool) -> torch.Tensor:
    given = fp8_round(x, FP8_BLOCK) if round_inputs else x
    inner = gated(gemm.linear(given, weights.w1), gemm.linear(given, weights.w3), limit, x.dtype)
    inner = fp8_round(inner, FP8_BLOCK) if round_inputs else inner
    return gemm.linear(inner, weights.w2)


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ref.gated, rounded once to dtype."""
    y = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    count = y.numel()
    if count:
        _gated[(cdiv(count, BLOCK),)](gate.contiguous(), up.contiguous(), y, count, limit, BLOCK)
    return y


@launched(do_not_specialize=["count"])
def _gated(gate, up, y, count, limit, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gates = tl.load(gate + place, inside, other=0.0).to(tl.float32)
    ups = tl.load(up + place, inside, other=0.0).to(tl.float32)
    tl.store(y + place, gated_values(gates, ups, limit).to(y.dtype.element_ty), inside)
