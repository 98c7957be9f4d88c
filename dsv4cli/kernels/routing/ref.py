"""The router in plain PyTorch."""

import torch
import torch.nn.functional as F


def scores(logits: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits.float()).sqrt()


def choose(score: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    return (score + bias).topk(k, -1).indices


def weigh(score: torch.Tensor, experts: torch.Tensor, route_scale: float) -> torch.Tensor:
    chosen = score.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * route_scale
