"""Gated experts: w2(silu(w1 x) * (w3 x)) with clamps, routed or shared. Source: official model.py (`Expert`, `MoE`).

Triton: requires rows of x with any even stride and consecutive columns (kernels/rows.py), contiguous weights and scales
that start at a multiple of 16 bytes, and widths in multiples of 32 for FP4 and NVFP4 weights, of 128 for rounded
inputs. In the kernels that support both, NVFP4 weights with the values of FP4 weights produce the same bits: codes
times the scales of 16 columns are exact in bf16, sums have the same order, and scale_2 multiplies the sums last.

On Hopper, FP8 tensor cores multiply rounded inputs by FP4 weights for 2 tokens to 24 pairs per expert, or fewer than 16
with a hidden size of 7168, unless rows must be exact (kernels/rows.py); in such steps of up to 64 tokens, also by the
shared expert's FP8 weights. They sum 32 products with few bits; these sums are added in fp32. The error of a product is
2.3e-5 of its norm. It makes some of the values between the products round to another FP8 code, so the routed experts'
output differs by 1.5e-3 to 2.8e-3 of its norm from one with fp32 sums (H200). Within these limits, a token's result
does not depend on the other tokens of the step. One bf16 token or two over GGUF blocks are rounded on Hopper as for
linears (kernels/gemm).
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.experts import ref
from dsv4cli.kernels.stored_matrix import StoredMatrix


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of E experts as stored.

    Unpacked shapes: w1, w3 [E, I, D], w2 [E, D, I]. The shared expert's have no E. FP4 scales are exact from 2 ** -92
    to 2 ** 41; with more than 64 tokens, larger ones become NaN.

    Attributes:
        rows: int64 [E], each expert's row in stacks with any number of rows; None if the row is the expert's number.
            The rows of experts that are not chosen can be any row of the stacks.
    """

    w1: StoredMatrix
    w2: StoredMatrix
    w3: StoredMatrix
    rows: torch.Tensor | None = None

    @property
    def matrices(self) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        """The matrices w1, w2 and w3."""
        return self.w1, self.w2, self.w3

    @property
    def count(self) -> int:
        """The number of experts, E."""
        return len(self.w1.weight if self.rows is None else self.rows)


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
        x: [T, D] bf16 or fp32. It may be read before the previous launch has ended, if that one overlaps this one
            (kernels/pdl.py): it must be the result of an earlier one, such as the one whose result the router reads.
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
