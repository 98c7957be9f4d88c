"""Manifold-constrained hyper-connections: N residual streams collapsed, expanded and mixed around each sublayer.

Everything in fp32; pre, post and comb come from one projection of all streams, comb is made doubly stochastic by
Sinkhorn iterations. Source: official kernel.py (`hc_split_sinkhorn`), model.py (`hc_pre`, `hc_post`, `hc_head`).
"""

import torch

from dsv4cli.kernels.hyper_connections import ref


def connect_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sublayer's input and the weights of its output.

    streams: [T, N, D] bf16 or fp32; fn: fp32 [(2 + N) * N, N * D] (rows pre, post, comb); scale: fp32 [3];
    base: fp32 [(2 + N) * N]. Returns x [T, D] in streams' dtype (one rounding), post fp32 [T, N], comb fp32 [T, N, N]
    indexed [source stream, target stream], columns normalised last.
    """
    return ref.connect_pre(streams, fn, scale, base, iterations, hc_eps, norm_eps)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: target k = post_k * x + sum_j comb_jk * stream_j, in fp32, rounded once.

    x: [T, D]; streams: [T, N, D]; post, comb as from connect_pre. Returns streams' shape and dtype.
    """
    return ref.connect_post(x, streams, post, comb)


def connect_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float
) -> torch.Tensor:
    """The streams collapsed before the head: streams [T, N, D], fn fp32 [N, N * D], scale [1], base [N] -> [T, D]."""
    return ref.connect_head(streams, fn, scale, base, hc_eps, norm_eps)
