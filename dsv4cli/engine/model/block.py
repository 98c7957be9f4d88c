"""A transformer block: attention and experts, each wrapped in hyper-connections."""

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
    """The output x [T, D] of a block's last sublayer, not yet added to the residual streams [T, N, D].

    post [T, N] weighs x in each stream, comb [T, N, N] mixes the streams. The next block applies both in the kernel
    that also computes its own input.
    """

    x: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def connect_post(self) -> torch.Tensor:
        """Apply the residual connection: streams [T, N, D] after the block."""
        return hyper_connections.connect_post(*self)


class Block(nn.Module):
    """A layer of the model or a stage of the drafter; `layer` counts both. Its ratio selects the kind of attention."""

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
        """Run the block on residual streams [T, N, D], or on the previous block's output."""
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
        """Return the hyper-connection of a sublayer, 'attn' or 'ffn'."""
        config = self.config
        return Connection(
            getattr(self, f"hc_{part}_fn"),
            getattr(self, f"hc_{part}_scale"),
            getattr(self, f"hc_{part}_base"),
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
        )

    def step(
        self, before: PendingResidual, part: str, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Apply the pending residual. Return the streams and the next sublayer's normed input, post and comb
        weights.
        """
        return hyper_connections.connect_post_pre(*before, self.connection(part), norm.weight)

    def connect(self, streams: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the input [T, D] of a sublayer ('attn' or 'ffn') and its post [T, N] and comb [T, N, N] weights."""
        return hyper_connections.connect_pre(streams, self.connection(part))
