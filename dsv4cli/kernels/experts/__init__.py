"""Gated experts: w2(silu(w1 x) * (w3 x)) with clamps, routed or shared. Source: official model.py (`Expert`, `MoE`).

Triton: rows of x of any even spacing with consecutive columns (kernels/rows.py); contiguous weights and scales that
begin at a multiple of 16 bytes; widths in multiples of 32 for FP4 and NVFP4 weights, of 128 for rounded inputs.
NVFP4 weights whose values are FP4's give the same bits as these: codes times the scales of 16 columns are exact in
bf16, sums follow in the same order, and scale_2 multiplies them last.
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.experts import ref


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of E experts as stored, each with its scale or None: w1, w3 [E, I, D], w2 [E, D, I] unpacked.

    Of the shared expert without E. rows: int64 [E], where each expert lies in stacks of any number of them; None where
    that is its number. Of those that are not chosen any row in the stacks. scale_2: of NVFP4, fp32 [E] of each matrix,
    which multiply its sums in fp32; else None. Scales of FP4 are exact from 2 ** -92 to 2 ** 41; more than 64 tokens
    make NaN of larger ones.
    """

    w1: torch.Tensor
    w1_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    w3: torch.Tensor
    w3_scale: torch.Tensor | None
    rows: torch.Tensor | None = None
    w1_scale_2: torch.Tensor | None = None
    w2_scale_2: torch.Tensor | None = None
    w3_scale_2: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """E."""
        return len(self.w1 if self.rows is None else self.rows)


def routed_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """The sum over a token's experts of w2(g * silu(min(w1 x, limit)) * clamp(w3 x, +-limit)).

    x: [T, D] bf16 or fp32; experts: int64 [T, k]; routing: fp32 [T, k], the weights g, which multiply before w2.
    limit 0 clamps nothing. round_inputs: the inputs of both linears go through fp8_round with 128 columns. Each linear
    is rounded to x's dtype, the rest is fp32; a token's experts are added in ascending order. Returns fp32 [T, D].
    """
    return choose(x, ref).routed_experts(x, weights, experts, routing, limit, round_inputs)


def shared_expert(x: torch.Tensor, weights: ExpertWeights, limit: float, round_inputs: bool) -> torch.Tensor:
    """w2(silu(min(w1 x, limit)) * clamp(w3 x, +-limit)), the expert that every token goes through.

    x: [T, D] bf16 or fp32. round_inputs: the input of each linear whose weight has a scale goes through fp8_round with
    128 columns. Each linear is rounded to x's dtype, its input too. Returns [T, D] in it.
    """
    return choose(x, ref).shared_expert(x, weights, limit, round_inputs)


def mixture(
    x: torch.Tensor,
    weights: ExpertWeights,
    shared: ExpertWeights,
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """routed_experts + shared_expert, added in fp32 and rounded once to dtype: [T, D].

    dtype: x's, or fp32 where ranks add up what each has of the inner widths. round_inputs: as shared_expert, of the
    routed experts as well.
    """
    return choose(x, ref).mixture(x, weights, shared, experts, routing, limit, round_inputs, dtype)
