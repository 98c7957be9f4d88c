"""Manifold-constrained hyper-connections: N residual streams collapsed, expanded and mixed around each sublayer.

Everything in fp32; pre, post and comb come from one projection of all streams, comb is made doubly stochastic by
Sinkhorn iterations. Source: official kernel.py (`hc_split_sinkhorn`), model.py (`hc_pre`, `hc_post`, `hc_head`).
Triton: a power of two of streams, each of up to 16,384 consecutive columns.
"""

import torch

from dsv4cli.kernels.dispatch import choose
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
    return choose(streams, ref).connect_pre(streams, fn, scale, base, iterations, hc_eps, norm_eps)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer: target k = post_k * x + sum_j comb_jk * stream_j, in fp32, rounded once.

    x: [T, D]; streams: [T, N, D]; post, comb as from connect_pre. Returns streams' shape and dtype.
    """
    return choose(streams, ref).connect_post(x, streams, post, comb)


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
    """From one sublayer's output to the next one's normed input: connect_post, connect_pre, norm.rms_norm.

    x, streams, post, comb as for connect_post; fn, scale, base of the next sublayer as for connect_pre; weight: [D], of
    its norm, whose epsilon is norm_eps too. The streams are rounded before they are projected, the collapsed x before
    it is normed. Returns the streams [T, N, D], the normed input [T, D], its post and its comb.
    """
    return choose(streams, ref).connect_post_pre(
        x, streams, post, comb, fn, scale, base, weight, iterations, hc_eps, norm_eps
    )


def connect_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float
) -> torch.Tensor:
    """The streams collapsed before the head: streams [T, N, D], fn fp32 [N, N * D], scale [1], base [N] -> [T, D]."""
    return choose(streams, ref).connect_head(streams, fn, scale, base, hc_eps, norm_eps)
