"""Manifold-constrained hyper-connections: N residual streams collapsed, expanded and mixed around each sublayer.

All in fp32. One projection of all streams yields pre, post and comb; Sinkhorn iterations make comb doubly stochastic.
Source: official kernel.py (`hc_split_sinkhorn`), model.py (`hc_pre`, `hc_post`, `hc_head`).
Triton: requires a power of two of streams, each with up to 16,384 consecutive columns.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.hyper_connections import ref
from dsv4cli.kernels.hyper_connections.types import Connection

__all__ = ["Connection", "connect_head", "connect_post", "connect_post_pre", "connect_pre"]


def connect_pre(streams: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sublayer's input and the weights of its output.

    streams: [T, N, D] bf16 or fp32. Returns x [T, D] in streams' dtype (rounded once), post fp32 [T, N], and comb fp32
    [T, N, N], indexed [source stream, target stream], columns normalized last.
    """
    return choose(streams, ref).connect_pre(streams, connection)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Return the streams after a sublayer: target k = post_k * x + sum_j comb_jk * stream_j, in fp32, rounded once.

    x: [T, D]; streams: [T, N, D]; post, comb: from connect_pre. Returns streams' shape and dtype.
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
    """Compute the next sublayer's normed input from a sublayer's output: connect_post, connect_pre, norm.rms_norm.

    The streams are rounded before they are projected, and the collapsed x is rounded before its norm.

    Args:
        x, streams, post, comb: as for connect_post.
        connection: the next sublayer's connection.
        norm_weight: [D], of the next sublayer's norm; its epsilon is norm_eps, too.

    Returns the streams [T, N, D], the normed input [T, D], its post and its comb.
    """
    return choose(streams, ref).connect_post_pre(x, streams, post, comb, connection, norm_weight)


def connect_head(streams: torch.Tensor, connection: Connection) -> torch.Tensor:
    """Collapse the streams [T, N, D] before the head: [T, D]."""
    return choose(streams, ref).connect_head(streams, connection)
