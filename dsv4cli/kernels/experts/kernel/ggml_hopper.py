"""Experts of many tokens over GGUF blocks on Hopper.

The kernel is `ggml_wgmma`, which needs Gluon and is imported only when used.
"""

from typing import TYPE_CHECKING

import torch

from dsv4cli.kernels.block_scale.kernel import fp8_round
from dsv4cli.kernels.experts.kernel.sort_by_expert import group
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.ggml.kernel.fp16 import halves_in_place, input_halves, row_shifts
from dsv4cli.kernels.ggml.kernel.octets import blocks_of, has_codes
from dsv4cli.kernels.launch import takes_gluon

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# widths must be multiples of this many columns: an iteration of the kernel's loop
COLUMNS = 256
# most pairs per expert, on average, for which tiles of few pairs are faster (H200, IQ2_XXS and Q2_K, 6 of 256 experts:
# 128 tokens take 2.5 ms instead of 5.2, but 256 take 14.3 instead of 5.7)
FEW = 4


def suits(x: torch.Tensor, weights: "ExpertWeights", pairs: int) -> bool:
    """Return whether `routed_outputs` supports x [T, D] and these weights, and is the fastest for them."""
    if x.dtype != torch.bfloat16 or pairs <= FEW * weights.count or not takes_gluon(x.device):
        return False
    kinds = [matrix.block_type for matrix in weights.matrices]
    decoded = all(kind is not None and has_codes(kind) for kind in kinds)
    alike = weights.w1.block_type == weights.w3.block_type
    return decoded and alike and not any(matrix.columns % COLUMNS for matrix in (weights.w1, weights.w2))


def routed_outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """Return the output of each of a token's experts: [T * k, D] in bf16. Arguments: as of `routed_experts`.

    Products have an error of up to 2 ** -11, or 2 ** -10 for types with offsets: at most a quarter of the rounding of
    results; see `ggml.kernel.fp16`.
    """
    from dsv4cli.kernels.experts.kernel import ggml_stages, ggml_wgmma

    (pairs, width), inner_width = (experts.numel(), x.shape[1]), weights.w1.weight.shape[-2]
    groups = group(experts, weights.rows, weights.count, ggml_stages.PAIRS.value)
    given = fp8_round(x, FP8_BLOCK) if round_inputs else x
    w1, w2, w3 = (blocks_of(matrix) for matrix in (weights.w1, weights.w2, weights.w3))
    up_shifts = row_shifts(w1, width), row_shifts(w3, width)
    sorted_halves = input_halves(given, groups.order, experts.shape[1], paired=True)
    inner = x.new_empty(pairs, inner_width)
    ggml_wgmma.products(*sorted_halves, groups, routing.contiguous(), w1, w3, up_shifts, inner, limit)
    # these inputs are as large as the outputs
    del sorted_halves
    inner = fp8_round(inner, FP8_BLOCK) if round_inputs else inner
    outputs = x.new_empty(pairs, width)
    down_shifts = row_shifts(w2, inner_width)
    ggml_wgmma.products(
        *halves_in_place(inner, paired=True), groups, None, w2, w2, (down_shifts, down_shifts), outputs, limit
    )  # fmt: skip
    return outputs
