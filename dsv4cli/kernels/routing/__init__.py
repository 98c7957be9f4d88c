"""The router: which experts a token goes to, and with what weight. Source: official model.py (`Gate`)."""

import torch

from dsv4cli.kernels.routing import ref


def scores(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(logits)), fp32 [T, E]; softplus is linear above 20, so nothing overflows."""
    return ref.scores(logits)


def choose(score: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    """The k experts with the highest score + bias, best first: score fp32 [T, E], bias fp32 [E] -> int64 [T, k]."""
    return ref.choose(score, bias, k)


def weigh(score: torch.Tensor, experts: torch.Tensor, route_scale: float) -> torch.Tensor:
    """The chosen experts' scores, without bias, normalised to sum to route_scale: int64 [T, k] -> fp32 [T, k]."""
    return ref.weigh(score, experts, route_scale)
