"""One block: hyper-connections around attention, hyper-connections around the experts."""

from typing import NamedTuple

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.linear import RMSNorm, unfilled
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.parallel.world import World
from dsv4cli.kernels import hyper_connections
from dsv4cli.kernels.hyper_connections import Connection


class PendingResidual(NamedTuple):
    """What a block gives: the output x [T, D] of its last sublayer, not yet added to the streams [T, N, D].

    post [T, N] and comb [T, N, N] say how; the next block adds it in the same kernel that makes its own input.
    """

    x: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def connect_post(self) -> torch.Tensor:
        """The streams after the block: [T, N, D]."""
        return hyper_connections.connect_post(*self)


class Block(nn.Module):
    """A main layer or a draft stage; `layer` counts both, ratio says which kind of attention it has."""

    def __init__(self, config: ModelConfig, numerics: Numerics, layer: int, world: World) -> None:
        super().__init__()
        self.config = config
        for part in ("attn", "ffn"):
            for name in ("fn", "base", "scale"):
                self.register_parameter(f"hc_{part}_{name}", unfilled())
        self.attn_norm = RMSNorm(config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.rms_norm_eps)
        self.attn = Attention(config, numerics, config.compress_ratios[layer], world)
        self.ffn = MoE(config, numerics, config.is_hash_layer(layer), world)

    def forward(self, before: torch.Tensor | PendingResidual, batch: Batch, cache: LayerCache) -> PendingResidual:
        """before: the streams [T, N, D], or what the block before gives."""
        if isinstance(before, PendingResidual):
            streams, x, post, comb = self.step(before, "attn", self.attn_norm)
        else:
            streams = before
            x, post, comb = self.connect(streams, "attn")
            x = self.attn_norm(x)
        output = PendingResidual(self.attn(x, batch, cache), streams, post, comb)
        streams, x, post, comb = self.step(output, "ffn", self.ffn_norm)
        return PendingResidual(self.ffn(x, batch), streams, post, comb)

    def connection(self, part: str) -> Connection:
        """A sublayer's hyper-connection, 'attn' or 'ffn'."""
        config = self.config
        return Connection(
            self.get_parameter(f"hc_{part}_fn"),
            self.get_parameter(f"hc_{part}_scale"),
            self.get_parameter(f"hc_{part}_base"),
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
        )

    def step(
        self, before: PendingResidual, part: str, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The streams after `before`, and of the sublayer `part` what `connect` gives, its input normed."""
        return hyper_connections.connect_post_pre(*before, self.connection(part), norm.weight)

    def connect(self, streams: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The input [T, D] of a sublayer ('attn' or 'ffn') and its post [T, N] and comb [T, N, N] weights."""
        return hyper_connections.connect_pre(streams, self.connection(part))
