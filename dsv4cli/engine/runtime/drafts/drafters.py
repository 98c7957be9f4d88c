"""Drafters: absorb what the model has computed, and draft the tokens that may follow.

Nothing here waits for the device, and all indices are computed on it, so that a graph can hold it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.dspark import DSpark
from dsv4cli.engine.model.mtp import MTP
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.runtime.batch_builder import Extent, Numbers, batch_of
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.kernels.sampling import chance_of

# samples a token int64 [B] from each row of logits fp32 [B, V]; the number counts the drafts of a step from 0
Choose = Callable[[torch.Tensor, int], torch.Tensor]

# more drafts of the MTP block are rarely accepted
MTP_DRAFTS = 3


@dataclass(frozen=True)
class Newest:
    """The newest token of each of B sequences, which is not in the cache yet.

    Attributes:
        tokens, positions, slots: int64 [B].
        streams: [B, N, D], HiddenStates.streams at the position before.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    streams: torch.Tensor


@dataclass(frozen=True)
class Drafts:
    """Draft tokens int64 [B, n], and the drafter's estimate of each one's acceptance probability, fp32 [B, n]."""

    tokens: torch.Tensor
    chances: torch.Tensor


class Drafter(Protocol):
    """A model's drafter and its part of a cache."""

    @property
    def name(self) -> Literal["mtp", "dspark"]:
        """The kind of drafter in the checkpoint."""

    @property
    def most(self) -> int:
        """The maximum number of draft tokens in a step."""

    @property
    def default(self) -> int:
        """The number of draft tokens that pays on prose."""

    @property
    def reads_next(self) -> bool:
        """Whether its state at a position depends on the next token."""

    def absorb(self, hidden: HiddenStates, next_ids: torch.Tensor, batch: Batch) -> None:
        """Absorb a step of the model: its output, and the token after each of its rows, int64 [T]."""

    def draft(self, newest: Newest, count: int, choose: Choose) -> Drafts:
        """Draft `count` tokens, at least one, after each sequence's newest."""


def most_drafts(config: ModelConfig) -> int:
    """Return the maximum number of draft tokens of a sequence in a step. DSpark is limited by its block."""
    return ROLLBACK - 1 if config.dspark is None else min(config.dspark.block_size, ROLLBACK - 1)


def default_drafts(config: ModelConfig) -> int:
    """Return the number of draft tokens that pays on prose: a few for MTP, the block for DSpark, 0 without a
    drafter.
    """
    if config.drafter == "none":
        return 0
    return MTP_DRAFTS if config.dspark is None else most_drafts(config)


def drafter_of(model: Transformer, cache: Cache) -> Drafter | None:
    """Return the drafter that the model was loaded with, if any."""
    if model.config.drafter == "none":
        return None
    return DSparkDrafter(model, cache) if isinstance(model.mtp, DSpark) else MTPDrafter(model, cache)


class MTPDrafter:
    """The MTP block, run again on its own streams for each further draft token."""

    name: Literal["mtp"] = "mtp"
    # the key of a position is made from the token that follows it
    reads_next = True

    def __init__(self, model: Transformer, cache: Cache) -> None:
        stage = model.mtp[0]
        assert isinstance(stage, MTP)
        self._model, self._cache, self._stage = model, cache, stage
        self.most, self.default = most_drafts(model.config), default_drafts(model.config)
        self._layer = cache.layers[model.config.num_hidden_layers]

    def absorb(self, hidden: HiddenStates, next_ids: torch.Tensor, batch: Batch) -> None:
        """See `Drafter.absorb`."""
        self._stage.absorb(hidden.streams, self._model.embed(next_ids), batch, self._layer)

    def draft(self, newest: Newest, count: int, choose: Choose) -> Drafts:
        """See `Drafter.draft`."""
        streams, token = newest.streams, newest.tokens
        tokens, chances = [], []
        for number in range(count):
            batch = draft_batch(self._cache, newest.slots, newest.positions - 1 + number, token, 1)
            streams = self._stage.draft(streams, self._model.embed(token), batch, self._layer)
            logits = self._model.vocabulary(self._stage.normed(streams))
            token = choose(logits, number)
            tokens.append(token)
            chances.append(chance_of(logits, token))
        return Drafts(torch.stack(tokens, 1), torch.stack(chances, 1))


class DSparkDrafter:
    """The DSpark stages over a block of the newest token and noise tokens."""

    name: Literal["dspark"] = "dspark"
    reads_next = False

    def __init__(self, model: Transformer, cache: Cache) -> None:
        assert isinstance(model.mtp, DSpark)
        self._model, self._cache, self._stages = model, cache, model.mtp
        self.most, self.default = most_drafts(model.config), default_drafts(model.config)

    def absorb(self, hidden: HiddenStates, next_ids: torch.Tensor, batch: Batch) -> None:
        """See `Drafter.absorb`. The next tokens are not used."""
        assert hidden.context is not None
        self._stages.absorb(hidden.context, batch, self._cache.layers)

    def draft(self, newest: Newest, count: int, choose: Choose) -> Drafts:
        """See `Drafter.draft`."""
        model, stages = self._model, self._stages
        batch = dspark_batch(stages, self._cache, newest)
        block = stages.block(model.embed(batch.ids), batch, self._cache.layers, model.vocabulary)
        tokens, chances, token = [], [], newest.tokens
        for number in range(count):
            memory, logits = stages.after(token, block.logits[:, number])
            token = choose(logits, number)
            tokens.append(token)
            chances.append(stages.confidence(block.states[:, number], memory).sigmoid())
        return Drafts(torch.stack(tokens, 1), torch.stack(chances, 1))


def draft_batch(cache: Cache, slots: torch.Tensor, starts: torch.Tensor, ids: torch.Tensor, each: int) -> Batch:
    """Return the batch of `each` tokens per sequence, int64 [B * each], for layers with a sliding window only."""
    none = torch.zeros_like(slots)
    numbers = Numbers(slots, starts, torch.full_like(slots, each), none, ids, none[:, None])
    return batch_of(cache, numbers, Extent(each, {}, {}))


def dspark_batch(drafter: DSpark, cache: Cache, newest: Newest) -> Batch:
    """Return the batch of each sequence's draft block: its newest token and noise tokens.

    Every row attends to the last `sliding_window` tokens before the block and to the whole block. Nothing is stored.
    """
    count, size, device = len(newest.tokens), drafter.block_size, cache.device
    ids = torch.full((count, size), drafter.noise, device=device)
    ids[:, 0] = newest.tokens
    batch = draft_batch(cache, newest.slots, newest.positions, ids.flatten(), size)
    window = drafter.config.sliding_window
    capacity, starts = window + cache.rollback, newest.positions[:, None]
    owners = torch.arange(count, device=device)[:, None]
    # the official order: by position modulo the window, the block last
    before = starts - 1 - (starts - 1 - torch.arange(window, device=device)) % window
    ring = torch.where(before >= 0, owners * capacity + before % capacity, -1)
    block = count * capacity + owners * size + torch.arange(size, device=device)
    return replace(
        batch,
        in_rings=False,
        window_rows=count * (capacity + size),
        window_index=torch.cat((ring, block), 1).repeat_interleave(size, 0),
        window_cells=torch.full_like(batch.window_cells, -1),
    )
