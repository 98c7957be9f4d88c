"""Manifold-constrained hyper-connections: N residual streams collapsed, expanded and mixed around each sublayer.

Everything in fp32; pre, post and comb come from one projection of all streams, comb is made doubly stochastic by
Sinkhorn iterations. Source: official kernel.py (`hc_split_sinkhorn`), model.py (`hc_pre`, `hc_post`, `hc_head`).
Triton: a power of two of streams, each of up to 16,384 consecutive columns.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.hyper_connections import ref
from dsv4cli.kernels.hyper_connections.types import Connection

__all__ = ["Connection", "connect_head", "connect_post", "connect_post_pre", "connect_pre"]


def connect_pre(streams: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sublayer's input and the weights of its output.

    streams: [T, N, D] bf16 or fp32. Returns x [T, D] in streams' dtype (one rounding), post fp32 [T, N], comb fp32
    [T, N, N] indexed [source stream, target stream], columns normalised last.
    """
    return choose(streams, ref).connect_pre(streams, connection)


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
    connection: Connection,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From one sublayer's output to the next one's normed input: connect_post, connect_pre, norm.rms_norm.

    x, streams, post, comb as for connect_post; connection: of the next sublayer; norm_weight: [D], of its norm, whose
    epsilon is norm_eps too. The streams are rounded before they are projected, the collapsed x before it is normed.
    Returns the streams [T, N, D], the normed input [T, D], its post and its comb.
    """
    return choose(streams, ref).connect_post_pre(x, streams, post, comb, connection, norm_weight)


def connect_head(streams: torch.Tensor, connection: Connection) -> torch.Tensor:
    """The streams [T, N, D] collapsed before the head: [T, D]."""
    return choose(streams, ref).connect_head(streams, connection)
