"""The multi-token-prediction (MTP) block of the April releases: drafts the token after the next one."""

import torch

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.block import Block
from dsv4cli.engine.model.head import add_head, collapse
from dsv4cli.engine.model.linear import Linear, RMSNorm
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.parallel.world import World


class MTP(Block):
    """`mtp.0`: a block of ratio 0 whose input is the model's last streams plus the embedding of the next token."""

    norm: RMSNorm

    def __init__(self, config: ModelConfig, numerics: Numerics, layer: int, world: World) -> None:
        super().__init__(config, numerics, layer, world)
        self.e_proj = Linear(numerics)
        self.h_proj = Linear(numerics)
        self.enorm = RMSNorm(config.rms_norm_eps)
        self.hnorm = RMSNorm(config.rms_norm_eps)
        add_head(self, config)

    def absorb(self, streams: torch.Tensor, embedded: torch.Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store the stage's keys for positions that the model has computed. Arguments as in `draft`."""
        x, _, _ = self.connect(self.enter(streams, embedded), "attn")
        self.attn.store_keys(self.attn_norm(x), batch, cache.window)

    def draft(self, streams: torch.Tensor, embedded: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """Return the stage's own streams [T, N, D].

        Args:
            streams: the model's streams [T, N, D] after its last layer, before the hyper-head, or this stage's streams
                one position earlier.
            embedded: embedding [T, D] of the token after each position.
            batch: the positions of `streams`.
        """
        return self(self.enter(streams, embedded), batch, cache).connect_post()

    def enter(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the stage's input streams [T, N, D]. Arguments as in `draft`."""
        hidden = self.h_proj(self.hnorm(streams).flatten(0, 1)).view(streams.shape)
        return self.e_proj(self.enorm(embedded))[:, None] + hidden

    def normed(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the shared head's input [R, D] from the stage's streams [R, N, D]."""
        return self.norm(collapse(self, self.config, streams))
