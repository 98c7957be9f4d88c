"""Hyper-connections in plain PyTorch."""

import torch

from dsv4cli.kernels import alike
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.hyper_connections.types import Connection
from dsv4cli.kernels.norm import ref as norm


def project(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """Return fn @ streams, scaled by their inverse RMS after the product: fp32 [T, rows of fn]."""
    flat = streams.float().flatten(1)
    return gemm.linear_fp32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Normalize rows, then columns, `iterations` times; the first row pass is the softmax. logits: fp32 [T, N, N]."""
    # a tensor, because PyTorch converts a Python number at each sum, which takes as long as the sum
    small = torch.tensor(eps, device="cpu")
    comb = logits.softmax(-1) + small
    comb = comb / comb.sum(-2, keepdim=True).add_(small)
    for _ in range(iterations - 1):
        comb = comb / comb.sum(-1, keepdim=True).add_(small)
        comb = comb / comb.sum(-2, keepdim=True).add_(small)
    return comb


def connect_pre(streams: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, eps = connection.scale, connection.hc_eps
    count = streams.shape[1]
    pre, post, comb = project(streams, connection.fn, connection.norm_eps).split((count, count, count * count), -1)
    pre_base, post_base, comb_base = connection.base.split((count, count, count * count))
    # two sigmoids, as in the official code: a value's rounding depends on which values share a vector with it
    pre = alike.each(torch.sigmoid, pre * scale[0] + pre_base)
    post = alike.each(torch.sigmoid, post * scale[1] + post_base)
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(-1, (count, count)), connection.iterations, eps)
    return collapse(streams, pre + eps), 2 * post, comb


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
    connection: Connection,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = connect_post(x, streams, post, comb)
    x, post, comb = connect_pre(streams, connection)
    return streams, norm.rms_norm(x, norm_weight, connection.norm_eps), post, comb


def connect_head(streams: torch.Tensor, connection: Connection) -> torch.Tensor:
    mix = project(streams, connection.fn, connection.norm_eps)
    gates = alike.each(torch.sigmoid, mix * connection.scale + connection.base)
    return collapse(streams, gates + connection.hc_eps)
