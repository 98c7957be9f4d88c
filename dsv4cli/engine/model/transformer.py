"""The whole model: tokens → embedding → blocks → hyper-head → head → logits, and the drafter beside it."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import nn

from dsv4cli.engine.checkpoint.sharding import check_dimensions
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.block import Block
from dsv4cli.engine.model.dspark import Drafts, DSpark
from dsv4cli.engine.model.embedding import Embedding
from dsv4cli.engine.model.head import add_head, collapse
from dsv4cli.engine.model.linear import Fp32Linear, RMSNorm
from dsv4cli.engine.model.mtp import MTP
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.runtime.cache import Cache, Sequence
from dsv4cli.engine.weights.offload import HostExperts


@dataclass(frozen=True)
class Trunk:
    """What the blocks give for T tokens: streams [T, N, D] after the last layer; context [T, L * D], the mean over the
    streams of each DSpark target layer side by side, None without a DSpark drafter."""

    streams: torch.Tensor
    context: torch.Tensor | None


class Transformer(nn.Module):
    """DeepSeek-V4. Parameters carry the checkpoint's names (experts stacked) and are filled by `weights.fill`.

    host_experts: the routed experts, where not all of them fit on the device.
    """

    norm: RMSNorm
    mtp: nn.ModuleList
    host_experts: HostExperts | None = None

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

    def forward(self, batch: Batch, cache: Cache) -> Trunk:
        """Runs the blocks over the step's tokens; their state goes into the cache, lengths do not change."""
        config = self.config
        state = self.embed(batch.ids)[:, None].expand(-1, config.hc_mult, -1)
        targets = config.dspark.target_layer_ids if config.dspark else ()
        means = []
        for number, layer in enumerate(self.layers):
            state = layer(state, batch, cache.layers[number])
            if number in targets:
                streams = state.joined()
                means.append(streams.float().mean(1).to(streams.dtype))
        return Trunk(state.joined(), torch.cat(means, -1) if means else None)

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams of the wanted rows [R, N, D] -> fp32 [R, V], never rounded."""
        return self.vocabulary(self.norm(collapse(self, self.config, streams)))

    def vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """The shared head over a normed hidden state [R, D] -> fp32 [R, V]."""
        return self.world.gather_columns(self.head(x))

    def mtp_logits(
        self, streams: torch.Tensor, next_ids: torch.Tensor, batch: Batch, cache: Cache, rows: torch.Tensor
    ) -> torch.Tensor:
        """The MTP block over the step's positions: for `rows` int64 [R], the distribution two tokens on, fp32 [R, V].

        streams: Trunk.streams of the step; next_ids: int64 [T], the token after each position.
        """
        number = self.config.num_hidden_layers
        stage = self.mtp[0]
        assert isinstance(stage, MTP)
        drafted = stage.draft(streams, self.embed(next_ids), batch.with_ids(next_ids), cache.layers[number])
        return self.vocabulary(stage.normed(drafted[rows]))

    def dspark_drafts(
        self, work: Items[tuple[Sequence, int]], cache: Cache, choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> Drafts:
        """The DSpark drafts after each sequence's newest token, which is not yet in the cache.

        What the cache holds of the sequences must have gone through `self.mtp.absorb`. choose: see DSpark.draft.
        """
        assert isinstance(self.mtp, DSpark)
        batch = self.mtp.batch(cache, work)
        first = torch.tensor([token for _, token in work], dtype=torch.int64, device=cache.device)
        return self.mtp.draft(self.embed(batch.ids), first, batch, cache, self.vocabulary, choose)
