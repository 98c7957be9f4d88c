"""Hyper-connections in plain PyTorch."""

import torch

from dsv4cli.kernels import alike
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.hyper_connections.types import Connection
from dsv4cli.kernels.norm import ref as norm
from dsv4cli.kernels.scalars import scalar
from dsv4cli.kernels.stored_matrix import StoredMatrix


def project(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """Return fn @ streams, scaled by their inverse RMS after the product: fp32 [T, rows of fn]."""
    flat = streams.float().flatten(1)
    projected = gemm.linear_fp32(flat, StoredMatrix(fn))
    return projected * torch.rsqrt(flat.square().mean(-1, keepdim=True) + scalar(norm_eps))


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Normalize rows, then columns, `iterations` times; the first row pass is the softmax. logits: fp32 [T, N, N]."""
    small = scalar(eps)
    comb = logits.softmax(-1) + small
    comb = comb / comb.sum(-2, keepdim=True).add_(small)
    for _ in range(iterations - 1):
        comb = comb / comb.sum(-1, keepdim=True).add_(small)
        comb = comb / comb.sum(-2, keepdim=True).add_(small)
    return comb


def connect_pre(streams: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, count, eps = streams.float(), streams.shape[1], connection.hc_eps
    parts = count, count, count * count
    pre, post, comb = project(values, connection.fn, connection.norm_eps).split(parts, -1)
    pre_scale, post_scale, comb_scale = connection.scale.unbind()
    pre_base, post_base, comb_base = connection.base.split(parts)
    # two sigmoids, as in the official code: a value's rounding depends on which values share a vector with it
    pre = alike.each(torch.sigmoid, pre * pre_scale + pre_base)
    post = alike.each(torch.sigmoid, post * post_scale + post_base)
    comb = sinkhorn((comb * comb_scale + comb_base).unflatten(-1, (count, count)), connection.iterations, eps)
    return collapse(values, pre + scalar(eps)).to(streams.dtype), post * scalar(2.0), comb


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of streams, fp32 [T, N, D]: fp32 [T, D]."""
    return (weights.unsqueeze(-1) * streams).sum(1)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)  # [T, target, D]
    return (post.unsqueeze(-1) * x.float().unsqueeze(1) + mixed).to(streams.dtype)


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
    values = streams.float()
    mix = project(values, connection.fn, connection.norm_eps)
    gates = alike.each(torch.sigmoid, mix * connection.scale + connection.base)
    return collapse(values, gates + scalar(connection.hc_eps)).to(streams.dtype)
