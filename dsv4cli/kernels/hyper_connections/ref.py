"""Hyper-connections in plain PyTorch."""

import torch

from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.norm import ref as norm


def project(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fn @ streams, scaled by their inverse RMS after the product: fp32 [T, rows of fn]."""
    flat = streams.float().flatten(1)
    return gemm.linear_fp32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Rows, then columns, normalised `iterations` times; the first row pass is the softmax. logits: fp32 [T, N, N]."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def connect_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = streams.shape[1]
    pre, post, comb = project(streams, fn, norm_eps).split((count, count, count * count), -1)
    pre_base, post_base, comb_base = base.split((count, count, count * count))
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(-1, (count, count)), iterations, hc_eps)
    return collapse(streams, pre), post, comb


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[..., None] * streams.float()).sum(1).to(streams.dtype)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = (comb[..., None] * streams.float()[:, :, None]).sum(1)  # [T, target, D]
    return (post[..., None] * x.float()[:, None] + mixed).to(streams.dtype)


def connect_post_pre(
    x: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = connect_post(x, streams, post, comb)
    x, post, comb = connect_pre(streams, fn, scale, base, iterations, hc_eps, norm_eps)
    return streams, norm.rms_norm(x, weight, norm_eps), post, comb


def connect_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float
) -> torch.Tensor:
    weights = torch.sigmoid(project(streams, fn, norm_eps) * scale + base) + hc_eps
    return collapse(streams, weights)
