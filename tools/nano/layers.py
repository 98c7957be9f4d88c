"""The twin's parts outside attention, differentiable and flat over tokens: norms, RoPE, streams, pooling, experts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.rope import frequencies
from dsv4cli.kernels.compressor.ref import pool
from dsv4cli.kernels.experts.activation import gated
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.hyper_connections import ref as hyper_connections
from dsv4cli.kernels.norm.ref import rms_norm
from dsv4cli.kernels.routing import ref as routing
from tools.nano import quantise

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Turn:
    """cos and sin of the angle of each RoPE pair: fp32 [..., R], broadcast over what is rotated."""

    cos: torch.Tensor
    sin: torch.Tensor


def part_of(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with the prefix, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def connection_of(own: Weights, part: str) -> list[torch.Tensor]:
    """Return the weights of a block that Twin.connect_pre needs for its sublayer "attn" or "ffn"."""
    return [own[f"hc_{part}_{name}"] for name in ("fn", "scale", "base")] + [own[f"{part}_norm.weight"]]


def turn(config: ModelConfig, ratio: int, positions: torch.Tensor) -> Turn:
    """Return the rotation of positions int64 [n] in layers of this ratio: [n, R]. The angle is rounded to fp32."""
    angles = positions.float()[:, None] * frequencies(config, ratio).to(positions.device)
    return Turn(angles.cos(), angles.sin())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last dims of x [..., d], pairs (2i, 2i + 1), in fp32 and round once. cos, sin: [..., R]."""
    width = 2 * cos.shape[-1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def connect_pre(
    config: ModelConfig, streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map streams [T, N, D] to the sublayer's input [T, D] before its norm, post fp32 [T, N], comb fp32 [T, N, N]."""
    connection = Connection(fn, scale, base, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    return hyper_connections.connect_pre(streams, connection)


def connect_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Return target k = post_k * x + sum_j comb_jk * stream_j, without a [T, N, N, D] tensor, like the kernel."""
    total = post[..., None] * x.float()[:, None]
    for source in range(streams.shape[1]):
        total = total + comb[:, source, :, None] * streams[:, source, None].float()
    return total.to(streams.dtype)


def compress(
    config: ModelConfig,
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Compress hidden states [B, S, D] to normed, rotated entries [B, S / ratio, d], not yet rounded.

    S must be a multiple of the ratio. cos, sin: [S / ratio, R], of the first position of each group.
    """
    ratio, hidden = ape.shape[0], x.float()
    kv = F.linear(hidden, wkv).unflatten(1, (-1, ratio))  # [B, G, r, channels]
    score = F.linear(hidden, wgate).unflatten(1, (-1, ratio)) + ape
    if ratio == 4:
        kv, score = overlapped(kv, 0.0), overlapped(score, float("-inf"))
    pooled = pool(kv.flatten(0, 1), score.flatten(0, 1)).unflatten(0, kv.shape[:2])
    return rotate(rms_norm(pooled.to(x.dtype), norm, config.rms_norm_eps), cos, sin)


def overlapped(rows: torch.Tensor, absent: float) -> torch.Tensor:
    """Map [B, G, r, 2 d] to [B, G, 2 r, d]: the previous group's first half of channels, then the own second half."""
    first, second = rows.chunk(2, -1)
    before = torch.cat((torch.full_like(first[:, :1], absent), first[:, :-1]), 1)
    return torch.cat((before, second), 2)


def route(
    config: ModelConfig, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor | None
) -> torch.Tensor:
    """Return the weight of each expert for each token, 0 for experts that are not chosen: x [T, D] -> fp32 [T, E].

    chosen: int64 [T, k] in a hash layer; other layers choose the top k by score + bias.
    """
    score = routing.scores(F.linear(x.float(), gate))
    if chosen is None:
        assert bias is not None
        chosen = routing.choose(score.detach(), bias, config.num_experts_per_tok)
    kept = score * torch.zeros_like(score).scatter(1, chosen, 1.0)
    return kept / kept.sum(-1, keepdim=True) * config.routed_scaling_factor


def experts(
    config: ModelConfig,
    x: torch.Tensor,
    routing_weights: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rounded: bool,
) -> torch.Tensor:
    """Compute all experts over all tokens, weighted (most weights are 0), plus the shared one: [T, D] -> [T, D].

    routed: w1, w3 [E, I, D], w2 [E, D, I]; shared: w1, w3 [I, D], w2 [D, I].
    Dense computation costs E / k times the routed FLOPs. At this size that is cheaper than gathering the tokens.
    """
    inputs, limit = quantise.linear_input(x, rounded), config.swiglu_limit
    gate, up = (F.linear(inputs, w.flatten(0, 1)).unflatten(-1, (len(w), -1)) for w in routed[:2])  # [T, E, I]
    inner = (routing_weights[..., None] * gated(gate, up, limit)).to(x.dtype)
    inner = quantise.linear_input(inner.flatten(1), rounded)
    out = F.linear(inner, routed[2].transpose(0, 1).flatten(1))
    own = gated(F.linear(inputs, shared[0]), F.linear(inputs, shared[1]), limit).to(x.dtype)
    own = F.linear(quantise.linear_input(own, rounded), shared[2])
    return (out.float() + own.float()).to(x.dtype)


def collapse(config: ModelConfig, weights: Weights, prefix: str, streams: torch.Tensor) -> torch.Tensor:
    """Map streams [T, N, D] to the head's normed input [T, D]. prefix: "" for the model, "mtp.0." for the drafter."""
    fn, base, scale = (weights[f"{prefix}hc_head_{name}"] for name in ("fn", "base", "scale"))
    connection = Connection(fn, scale, base, 0, config.hc_eps, config.rms_norm_eps)
    x = hyper_connections.connect_head(streams, connection)
    return rms_norm(x, weights[prefix + "norm.weight"], config.rms_norm_eps)
