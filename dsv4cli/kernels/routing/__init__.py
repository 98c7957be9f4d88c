"""The router: which experts a token goes to, and with what weight. Source: official model.py (`Gate`).

A logit is x @ weight.T with exact products, added up in fp32; its score is sqrt(softplus(logit)) in fp32, softplus
linear above 20, so that nothing overflows.
Triton: rows of x of any even spacing with consecutive columns (kernels/rows.py).
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
    """The k experts with the highest score + bias, best first, and their scores normalised to sum to route_scale.

    x: [T, D] bf16 or fp32; weight: [E, D] bf16 or fp32; bias: fp32 [E]. The weights come from the scores without bias.
    Of equal sums Triton takes the lower expert first; torch leaves the order open.
    routed: int64 [T], the row whose experts and weights each row gets, written before the launch before this one; None:
    its own.
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
    """The experts that a hash layer's table names for each token, in its order, and their normalised scores.

    x, weight, routed as for route; table: int64 [vocabulary, k]; ids: int64 [T]. Returns as route does.
    """
    return choose(x, ref).route_by_id(x, weight, table, ids, route_scale, routed)
