"""DSpark, the drafter of the 0731 and 0813 releases: drafts a block of tokens in parallel; a Markov head links them.

Source: official model.py of Flash-0731. The stages use the target model's hidden states as context. A draft block is
one token and `block_size - 1` noise tokens, and attention inside it is not causal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.block import Block
from dsv4cli.engine.model.head import add_head, collapse
from dsv4cli.engine.model.linear import Embedding, Fp32Linear, Linear, RMSNorm
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.parallel.world import World


class MarkovHead(nn.Module):
    """Low-rank bias of a draft token's logits, computed from the previous token."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.markov_w1 = Embedding(numerics)
        self.markov_w2 = Fp32Linear()


class ConfidenceHead(nn.Module):
    """Predicts whether a draft token is accepted, as a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = Fp32Linear()


class Stage(Block):
    """One stage: a block of ratio 0. The first stage projects the context, the last one has the output heads."""

    norm: RMSNorm

    def __init__(self, config: ModelConfig, numerics: Numerics, layer: int, world: World) -> None:
        super().__init__(config, numerics, layer, world)
        if layer == config.num_hidden_layers:
            self.main_proj = Linear(numerics)
            self.main_norm = RMSNorm(config.rms_norm_eps)
        if layer == len(config.compress_ratios) - 1:
            add_head(self, config)
            self.markov_head = MarkovHead(numerics)
            self.confidence_head = ConfidenceHead()

    def absorb(self, main: torch.Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store the stage's keys for the context [T, D] of a step's tokens in its ring."""
        self.attn.store_keys(main, batch, cache.window)


@dataclass(frozen=True)
class DraftBlock:
    """Output of the stages for B draft blocks of n rows.

    states: fp32 [B, n, D], before the final norm. logits: fp32 [B, n, V], without the Markov head's bias.
    """

    states: torch.Tensor
    logits: torch.Tensor


class DSpark(nn.ModuleList):
    """The stages `mtp.0`, `mtp.1` and `mtp.2`. The embedding and the head are shared with the model."""

    def __init__(self, config: ModelConfig, numerics: Numerics, world: World) -> None:
        count = config.num_hidden_layers
        super().__init__(Stage(config, numerics, count + stage, world) for stage in range(config.draft_stages))
        assert config.dspark is not None
        self.config = config
        self.world = world
        self.block_size = config.dspark.block_size
        self.noise = config.dspark.noise_token_id

    def stages(self) -> list[Stage]:
        """Return the stages in order."""
        return [stage for stage in self if isinstance(stage, Stage)]

    def absorb(self, context: torch.Tensor, batch: Batch, caches: Sequence[LayerCache]) -> None:
        """Store the stages' keys for a step of the model. context: HiddenStates.context [T, L * D] of that step."""
        first = self.stages()[0]
        main = first.main_norm(first.main_proj(context))
        for number, stage in enumerate(self.stages()):
            stage.absorb(main, batch, caches[self.config.num_hidden_layers + number])

    def block(
        self,
        embedded: torch.Tensor,
        batch: Batch,
        caches: Sequence[LayerCache],
        vocabulary: Callable[[torch.Tensor], torch.Tensor],
    ) -> DraftBlock:
        """Run the stages over draft blocks.

        Args:
            embedded: embeddings of batch.ids [B * n, D].
            caches: caches of all layers, the model's and the stages'.
            vocabulary: the model's head, applied to a normed hidden state.
        """
        streams = embedded[:, None].expand(-1, self.config.hc_mult, -1)
        for number, stage in enumerate(self.stages()):
            streams = stage(streams, batch, caches[self.config.num_hidden_layers + number]).connect_post()
        last = self.stages()[-1]
        x = collapse(last, self.config, streams)
        blocks = (-1, self.block_size)
        return DraftBlock(x.float().unflatten(0, blocks), vocabulary(last.norm(x)).unflatten(0, blocks))

    def after(self, previous: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Markov embedding [B, R] of the previous tokens, int64 [B], and the logits [B, V] with its bias."""
        head = self.stages()[-1].markov_head
        memory = head.markov_w1(previous)
        return memory, logits + self.world.gather_columns(head.markov_w2(memory))

    def confidence(self, states: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return acceptance logits fp32 [B] of draft tokens from states fp32 [B, D] and Markov embeddings [B, R]."""
        return self.stages()[-1].confidence_head.proj(torch.cat((states, memory.float()), -1))[:, 0]
