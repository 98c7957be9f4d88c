"""What is looked at of each step of a model, and where what is seen goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.stages import LOGITS, STREAMS


class Sink(Protocol):
    """Takes what is seen: recording.Writer."""

    def wants(self, layer: int, stage: str) -> bool:
        """Whether a stage of a layer is to be given to it."""

    def take(self, layer: int, stage: str, first: int, rows: torch.Tensor) -> None:
        """Rows from `first` on of a stage."""

    def end_layer(self, layer: int) -> None:
        """A step has gone through the layer."""


@dataclass(frozen=True)
class Watched:
    """The tokens of a step that are looked at, all of one sequence.

    start: the row of the first. count: how many. position: of the first. sequence: its number in the step. text: which
    of the manifest's texts it is. ids: int64 [count].
    """

    start: int
    count: int
    position: int
    sequence: int
    text: int
    ids: torch.Tensor

    @property
    def rows(self) -> slice:
        """Their rows in the step."""
        return slice(self.start, self.start + self.count)


# what moves rows of a linear [T, N]
Mover = Callable[[torch.Tensor, Watched], torch.Tensor]


class Feed(Protocol):
    """What blocks are given in place of what the block before has computed: feed.py. short: moves what FP8 linears give
    where their sums may be short, None where none are."""

    @property
    def short(self) -> Mover | None: ...

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """The streams [T, N, D] that go on from a stage; own: those that would."""


class Observer:
    """Sees the texts of a manifest go through a model, one after another, and gives what it sees to a sink.

    When all have gone through, it begins anew, with the next sink.
    """

    def __init__(
        self,
        manifest: TraceManifest,
        passes: Sequence[tuple[Sink, Feed | None]],
        slot: Callable[[], int | None] | None = None,
    ) -> None:
        """passes: of each its sink, and what blocks are fed with. slot: tells which slot of the cache holds the text,
        where other sequences are beside it."""
        self.manifest, self.slot = manifest, slot
        self.watched: Watched | None = None
        self._passes, self._pass, self._text = passes, 0, -1

    @property
    def sink(self) -> Sink:
        """Where what is seen now goes."""
        return self._passes[self._pass][0]

    @property
    def feed(self) -> Feed | None:
        """What blocks are fed with now."""
        return self._passes[self._pass][1]

    def wants(self, layer: int, stage: str) -> bool:
        """Whether a stage of this step is looked at."""
        return self.watched is not None and self.sink.wants(layer, stage)

    def take(self, layer: int, stage: str, rows: torch.Tensor) -> None:
        """A stage of all tokens of the step: [T, ...]."""
        if self.watched is not None and self.sink.wants(layer, stage):
            first = self._before("token", layer) + self.watched.position
            self.sink.take(layer, stage, first, rows[self.watched.rows])

    def take_entries(self, layer: int, stage: str, first: int, rows: torch.Tensor) -> None:
        """Compressed entries of the text, from its entry number `first` on."""
        self.sink.take(layer, stage, self._before("entry", layer) + first, rows)

    def given(self, layer: int, stage: str, own: torch.Tensor) -> torch.Tensor:
        """The streams that go on from a stage: its own, or what is fed in their place."""
        if self.feed is None or self.watched is None:
            return own
        return self.feed.streams(layer, stage, own, self.watched)

    @property
    def moves_sums(self) -> bool:
        """Whether `summed` moves anything now."""
        return self.feed is not None and self.feed.short is not None and self.watched is not None

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """What goes on from an FP8 linear [T, N]: its own sums, or short ones."""
        short = None if self.feed is None else self.feed.short
        return own if short is None or self.watched is None else short(own, self.watched)

    def _before(self, per: str, layer: int) -> int:
        """The rows of the texts before this one."""
        return sum(self.manifest.rows_of(text, per, layer) for text in self.manifest.texts[: self._text])

    def begin(self, batch: Batch) -> None:
        """Before the model computes a step."""
        self.watched = None
        sequence = self._sequence(batch)
        rows = (batch.sequence == sequence).nonzero().flatten().tolist()
        if not rows:
            return
        start, position = rows[0], int(batch.positions[rows[0]])
        if position == 0:
            self._begin_text()
        # no draft is behind the last token of a text
        self.watched = Watched(start, len(rows), position, sequence, self._text, batch.ids[start : start + len(rows)])

    def _begin_text(self) -> None:
        self._text += 1
        if self._text == len(self.manifest.texts):
            self._pass, self._text = self._pass + 1, 0

    def _sequence(self, batch: Batch) -> int:
        """The number of the text's sequence in a step, -1 where it has no part in it."""
        if self.slot is None:
            return 0
        slots, slot = batch.slots.tolist(), self.slot()
        return slots.index(slot) if slot in slots else -1

    def end(self, model: Transformer, hidden: HiddenStates) -> HiddenStates:
        """After a step; returns what goes to the head."""
        layer = len(model.layers)
        self.take(layer, STREAMS, hidden.streams)
        hidden = replace(hidden, streams=self.given(layer, STREAMS, hidden.streams))
        if self.watched is not None and "logits" in self.manifest.what:
            self._logits(model, layer, hidden.streams[self.watched.rows], self.watched)
        self.sink.end_layer(layer)
        return hidden

    def _logits(self, model: Transformer, layer: int, streams: torch.Tensor, watched: Watched) -> None:
        """Of the prompt's last token and of those behind it, if the step has any. Ranks compute them together."""
        last = self.manifest.texts[self._text].prompt - 1
        skipped = min(watched.count, max(0, last - watched.position))
        rows = streams.new_empty(0, model.config.vocab_size, dtype=torch.float32)
        if skipped < watched.count:
            rows = model.logits(streams[skipped:])
        if self.sink.wants(layer, LOGITS):
            first = self._before("logits", layer) + max(0, watched.position + skipped - last)
            self.sink.take(layer, LOGITS, first, rows)
