"""One block: hyper-connections around attention, hyper-connections around the experts."""

import torch
from torch import nn

from dsv4cli.engine.attention import Attention
from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import LayerCache
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.linear import RMSNorm, unfilled
from dsv4cli.engine.moe import MoE
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World
from dsv4cli.kernels import hyper_connections


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

    def forward(self, streams: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """streams: [T, N, D] -> the same shape."""
        config = self.config
        numbers = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        x, post, comb = self.connect(streams, "attn")
        x = self.attn(self.attn_norm(x), batch, cache)
        streams, x, post, comb = hyper_connections.connect_step(
            x, streams, post, comb, *self.connection("ffn"), self.ffn_norm.weight, *numbers
        )
        return hyper_connections.connect_post(self.ffn(x, batch), streams, post, comb)

    def connection(self, part: str) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        """fn, scale and base of a sublayer's hyper-connection, 'attn' or 'ffn'."""
        return (
            self.get_parameter(f"hc_{part}_fn"),
            self.get_parameter(f"hc_{part}_scale"),
            self.get_parameter(f"hc_{part}_base"),
        )

    def connect(self, streams: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The input [T, D] of a sublayer ('attn' or 'ffn') and its post [T, N] and comb [T, N, N] weights."""
        config = self.config
        return hyper_connections.connect_pre(
            streams, *self.connection(part), config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )
