"""The router in plain PyTorch."""

import torch
import torch.nn.functional as F

from dsv4cli.kernels import alike
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.stored_matrix import StoredMatrix


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    score = scores(gemm.linear_fp32(x if routed is None else x[routed], StoredMatrix(weight)))
    experts = choose(score, bias, k)
    return experts, weigh(score, experts, route_scale)


def route_by_id(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    route_scale: float,
    routed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if routed is not None:
        x, ids = x[routed], ids[routed]
    experts = table[ids]
    return experts, weigh(scores(gemm.linear_fp32(x, StoredMatrix(weight))), experts, route_scale)


def scores(logits: torch.Tensor) -> torch.Tensor:
    return alike.each(F.softplus, logits.float()).sqrt()


def choose(score: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    return (score + bias).topk(k, -1).indices


def weigh(score: torch.Tensor, experts: torch.Tensor, route_scale: float) -> torch.Tensor:
    chosen = score.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * route_scale
