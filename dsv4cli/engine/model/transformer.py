"""The whole model: tokens → embedding → blocks → hyper-head → head → logits, with the drafter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dsv4cli.engine.checkpoint.sharding import check_dimensions
from dsv4cli.engine.config.capacity import DEFAULT_CHUNK
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.block import Block
from dsv4cli.engine.model.dspark import DSpark
from dsv4cli.engine.model.head import add_head, collapse
from dsv4cli.engine.model.linear import Embedding, Fp32Linear, RMSNorm
from dsv4cli.engine.model.mtp import MTP
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.kernels.rows import exact_rows


@dataclass(frozen=True)
class HiddenStates:
    """Output of the blocks for T tokens: residual streams [T, N, D] after the last layer.

    context: [T, L * D], the mean over the streams after each DSpark target layer, concatenated; else None.
    """

    streams: torch.Tensor
    context: torch.Tensor | None = None


class Transformer(nn.Module):
    """DeepSeek-V4. Parameters have the checkpoint's names (experts stacked) and are filled by `weights.fill`."""

    norm: RMSNorm
    mtp: nn.ModuleList
    prefill_chunk = DEFAULT_CHUNK  # default tokens per prefill chunk; loading chooses it by free memory
    stored_bytes = 0  # bytes of this rank's weights in the checkpoint; set by loading

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World = SINGLE) -> None:
        super().__init__()
        check_dimensions(config, world.size)
        self.config = config
        self.numerics = numerics
        self.world = world
        count = config.num_hidden_layers
        self.embed = Embedding(numerics)
        self.layers = nn.ModuleList(Block(config, numerics, layer, world) for layer in range(count))
        add_head(self, config)
        self.head = Fp32Linear()
        if config.drafter == "mtp":
            stages = range(count, count + config.draft_stages)
            self.mtp = nn.ModuleList(MTP(config, numerics, layer, world) for layer in stages)
        elif config.drafter == "dspark":
            self.mtp = DSpark(config, numerics, world)

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> HiddenStates:
        """Run the blocks over the step's tokens and update the layers' caches."""
        config, tokens, means = self.config, len(batch.ids), list[torch.Tensor]()
        state = self.embed(batch.ids[self.world.own_rows(tokens)])[:, None].expand(-1, config.hc_mult, -1)
        targets = config.dspark.target_layer_ids if config.dspark else ()
        with exact_rows(self.numerics.exact):
            for number, layer in enumerate(self.layers):
                state = layer(state, batch, caches[number])
                if number in targets:
                    streams = state.connect_post()
                    means.append(streams.float().mean(1).to(streams.dtype))
                    del streams  # the next layers need its memory
            own = [state.connect_post(), *([torch.cat(means, -1)] if means else [])]
            return HiddenStates(*self.world.gather_rows(own, tokens))

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return logits fp32 [R, V], not rounded, for the streams [R, N, D] of the requested rows."""
        with exact_rows(self.numerics.exact):
            return self.vocabulary(self.norm(collapse(self, self.config, streams)))

    def vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the shared head to a normed hidden state [R, D]: fp32 [R, V]."""
        return self.world.gather_columns(self.head(x))
