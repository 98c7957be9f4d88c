"""Decides what to record of each step of a model, and passes it to a sink."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.stages import LOGITS, STREAMS


class Sink(Protocol):
    """Receives what was observed. Implemented by recording.Writer."""

    def wants(self, layer: int, stage: str) -> bool:
        """Return whether it records a stage of a layer."""

    def take(self, layer: int, stage: str, first: int, rows: torch.Tensor) -> None:
        """Receive rows of a stage, starting at row `first`."""

    def end_layer(self, layer: int) -> None:
        """Note that a step has completed the layer."""


@dataclass(frozen=True)
class Watched:
    """The tokens of a step that are observed, all of one sequence.

    Attributes:
        start: row of the first token in the step.
        count: number of tokens.
        position: position of the first token in the sequence.
        sequence: index of the sequence in the step.
        text: index of the text in the manifest.
        ids: int64 [count].
    """

    start: int
    count: int
    position: int
    sequence: int
    text: int
    ids: torch.Tensor

    @property
    def rows(self) -> slice:
        """The tokens' rows in the step."""
        return slice(self.start, self.start + self.count)


# perturbs rows of a linear's output [T, N]
Mover = Callable[[torch.Tensor, Watched], torch.Tensor]


class Feed(Protocol):
    """Replaces the input streams of blocks; see feed.py.

    Attributes:
        short: perturbs outputs of FP8 linears where their sums may be short; None if none are.
    """

    @property
    def short(self) -> Mover | None: ...

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """Return the streams [T, N, D] to continue with after a stage. own: the model's own streams."""


class Observer:
    """Observes a manifest's texts as they go through a model one after another, and passes the stages to a sink.

    After the last text, it starts again with the next sink.
    """

    def __init__(
        self,
        manifest: TraceManifest,
        passes: Sequence[tuple[Sink, Feed | None]],
        slot: Callable[[], int | None] | None = None,
    ) -> None:
        """Start with the first pass.

        Args:
            passes: sink and feed of each pass.
            slot: returns the cache slot of the current text, if other sequences share the steps.
        """
        self.manifest, self.slot = manifest, slot
        self.watched: Watched | None = None
        self._passes, self._pass, self._text = passes, 0, -1

    @property
    def sink(self) -> Sink:
        """The sink of the current pass."""
        return self._passes[self._pass][0]

    @property
    def feed(self) -> Feed | None:
        """The feed of the current pass, if any."""
        return self._passes[self._pass][1]

    def wants(self, layer: int, stage: str) -> bool:
        """Return whether a stage of this step is recorded."""
        return self.watched is not None and self.sink.wants(layer, stage)

    def take(self, layer: int, stage: str, rows: torch.Tensor) -> None:
        """Record a stage of all tokens of the step, [T, ...]."""
        if self.watched is not None and self.sink.wants(layer, stage):
            first = self._before("token", layer) + self.watched.position
            self.sink.take(layer, stage, first, rows[self.watched.rows])

    def take_entries(self, layer: int, stage: str, first: int, rows: torch.Tensor) -> None:
        """Record compressed entries of the text, starting at entry `first`."""
        self.sink.take(layer, stage, self._before("entry", layer) + first, rows)

    def given(self, layer: int, stage: str, own: torch.Tensor) -> torch.Tensor:
        """Return the streams to continue with after a stage: the model's own, or what the feed replaces them with."""
        if self.feed is None or self.watched is None:
            return own
        return self.feed.streams(layer, stage, own, self.watched)

    @property
    def moves_sums(self) -> bool:
        """Whether `summed` changes anything in this step."""
        return self.feed is not None and self.feed.short is not None and self.watched is not None

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """Return the output of an FP8 linear [T, N]: unchanged, or perturbed as short sums would be."""
        short = None if self.feed is None else self.feed.short
        return own if short is None or self.watched is None else short(own, self.watched)

    def _before(self, per: str, layer: int) -> int:
        """Return the number of rows of all earlier texts."""
        return sum(self.manifest.rows_of(text, per, layer) for text in self.manifest.texts[: self._text])

    def begin(self, batch: Batch) -> None:
        """Find the text's rows in a step, before the model computes it."""
        self.watched = None
        sequence = self._sequence(batch)
        rows = (batch.sequence == sequence).nonzero().flatten().tolist()
        if not rows:
            return
        start, position = rows[0], int(batch.positions[rows[0]])
        if position == 0:
            self._begin_text()
        # the last token of a text is never followed by drafts
        self.watched = Watched(start, len(rows), position, sequence, self._text, batch.ids[start : start + len(rows)])

    def _begin_text(self) -> None:
        self._text += 1
        if self._text == len(self.manifest.texts):
            self._pass, self._text = self._pass + 1, 0

    def _sequence(self, batch: Batch) -> int:
        """Return the index of the text's sequence in a step; -1 if it is not in it."""
        if self.slot is None:
            return 0
        slots, slot = batch.slots.tolist(), self.slot()
        return slots.index(slot) if slot in slots else -1

    def end(self, model: Transformer, hidden: HiddenStates) -> HiddenStates:
        """Record the output of a step. Return the hidden states for the LM head."""
        layer = len(model.layers)
        self.take(layer, STREAMS, hidden.streams)
        hidden = replace(hidden, streams=self.given(layer, STREAMS, hidden.streams))
        if self.watched is not None and "logits" in self.manifest.what:
            self._logits(model, layer, hidden.streams[self.watched.rows], self.watched)
        self.sink.end_layer(layer)
        return hidden

    def _logits(self, model: Transformer, layer: int, streams: torch.Tensor, watched: Watched) -> None:
        """Record logits of the prompt's last token and of later tokens in the step. All ranks compute them together."""
        last = self.manifest.texts[self._text].prompt - 1
        skipped = min(watched.count, max(0, last - watched.position))
        rows = streams.new_empty(0, model.config.vocab_size, dtype=torch.float32)
        if skipped < watched.count:
            rows = model.logits(streams[skipped:])
        if self.sink.wants(layer, LOGITS):
            first = self._before("logits", layer) + max(0, watched.position + skipped - last)
            self.sink.take(layer, LOGITS, first, rows)
