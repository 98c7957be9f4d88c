"""The router: selects the experts of each token and their weights. Source: official model.py (`Gate`).

A logit is x @ weight.T with exact products, summed in fp32. Its score is sqrt(softplus(logit)) in fp32; softplus is
linear above 20, so that nothing overflows.
Triton requires: evenly spaced rows of x with consecutive columns (kernels/rows.py).
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.routing import ref


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k experts with the highest score + bias, best first, and their weights.

    Weights are the scores without bias, normalized to sum to route_scale. Among equal sums Triton takes the lower
    expert first; torch's order is undefined.

    Args:
        x: [T, D], bf16 or fp32.
        weight: [E, D], fp16, bf16 or fp32.
        bias: fp32 [E].
        routed: int64 [T], the row whose experts and weights each row gets, or None for its own. It must be written
            before the previous launch.

    Returns experts int64 [T, k] and weights fp32 [T, k].
    """
    return choose(x, ref).route(x, weight, bias, k, route_scale, routed)


def route_by_id(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts in a hash layer's table for each token, in its order, and their normalized scores.

    x, weight, routed and the result are as in `route`; table: int64 [vocabulary, k]; ids: int64 [T].
    """
    return choose(x, ref).route_by_id(x, weight, table, ids, route_scale, routed)
