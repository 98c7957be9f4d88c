"""Gated experts: w2(silu(w1 x) * (w3 x)) with clamps, routed or shared. Source: official model.py (`Expert`, `MoE`).

Triton: requires rows of x with any even stride and consecutive columns (kernels/rows.py), contiguous weights and scales
that start at a multiple of 16 bytes, and widths in multiples of 32 for FP4 and NVFP4 weights, of 128 for rounded
inputs. NVFP4 weights with the values of FP4 weights produce the same bits: codes times the scales of 16 columns are
exact in bf16, sums have the same order, and scale_2 multiplies the sums last.
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.experts import ref


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of E experts as stored, each with its scale or None.

    Unpacked shapes: w1, w3 [E, I, D], w2 [E, D, I]. The shared expert's have no E. FP4 scales are exact from 2 ** -92
    to 2 ** 41; with more than 64 tokens, larger ones become NaN.

    Attributes:
        rows: int64 [E], each expert's row in stacks with any number of rows; None if the row is the expert's number.
            The
            rows of experts that are not chosen can be any row of the stacks.
        w1_scale_2, w2_scale_2, w3_scale_2: fp32 [E] of NVFP4, multiply the matrix's sums in fp32; otherwise None.
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
        """The number of experts, E."""
        return len(self.w1 if self.rows is None else self.rows)


def routed_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """Return the sum over a token's experts of w2(g * silu(min(w1 x, limit)) * clamp(w3 x, +-limit)).

    Each linear is rounded to x's dtype, everything else is fp32. A token's experts are added in ascending order.

    Args:
        x: [T, D] bf16 or fp32.
        experts: int64 [T, k].
        routing: fp32 [T, k], the routing weights g, applied before w2.
        limit: 0 for no clamp.
        round_inputs: whether the inputs of both linears go through fp8_round with 128 columns.

    Returns fp32 [T, D].
    """
    return choose(x, ref).routed_experts(x, weights, experts, routing, limit, round_inputs)


def shared_expert(x: torch.Tensor, weights: ExpertWeights, limit: float, round_inputs: bool) -> torch.Tensor:
    """Return w2(silu(min(w1 x, limit)) * clamp(w3 x, +-limit)), the expert that processes every token.

    x: [T, D] bf16 or fp32. round_inputs: whether the input of each linear whose weight has a scale goes through
    fp8_round with 128 columns. Each linear and its input are rounded to x's dtype. Returns [T, D] in x's dtype.
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
    """Return routed_experts + shared_expert, added in fp32 and rounded once to dtype: [T, D].

    dtype: x's dtype, or fp32 if tensor-parallel ranks sum their parts of the inner width. round_inputs: as for
    shared_expert; for the routed experts, too.
    """
    return choose(x, ref).mixture(x, weights, shared, experts, routing, limit, round_inputs, dtype)
