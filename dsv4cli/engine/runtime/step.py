"""A step: which requests share it, their chunks, and what it computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates
from dsv4cli.engine.runtime.graphs.decode_graphs import CapturedStep
from dsv4cli.engine.runtime.request import Request, RowScores


@dataclass(frozen=True)
class StepChoice:
    """Which requests share a step that not all share. The default: every request that decodes.

    Attributes:
        requests: numbers of the requests whose prompts are prefilled. The first gets its part whatever is left for the
            others.
        tokens: the rows of the step, at most.
        decoding: numbers of requests whose next token is computed in front of the prompts.
        shared: the rows of a step that several requests share, at most; 0 for as many as `tokens`.
    """

    requests: Sequence[int] = ()
    tokens: int = 0
    decoding: Sequence[int] = ()
    shared: int = 0


@dataclass(frozen=True)
class Chunk:
    """One request's part of a step.

    Attributes:
        request: the request.
        first: the index of its first token in the step.
        end: one more than the index of its last token, draft tokens aside.
        row: the row of its first token.
        drafts: draft tokens in the rows after these.
    """

    request: Request
    first: int
    end: int
    row: int
    drafts: list[int]

    @property
    def tokens(self) -> int:
        """The number of its tokens, draft tokens included."""
        return self.end - self.first + len(self.drafts)

    @property
    def ids(self) -> list[int]:
        """Its token ids, draft tokens included."""
        return self.request.ids[self.first : self.end] + self.drafts

    @property
    def last_row(self) -> int:
        """The row of its last token, draft tokens included."""
        return self.row + self.tokens - 1


@dataclass(frozen=True)
class ComputedStep:
    """A step that the model has computed.

    Attributes:
        chunks: its chunks.
        bases: the row of each chunk's first token.
        ready: the chunks whose requests have caught up and get tokens.
        hidden: what the model returned.
        batch: the batch that it was called with.
        step: the captured step that computed it, if one did.
        logits: fp32 [R, V] of the newest token of each ready chunk and of the draft tokens after it.
        scores: log-probabilities of scored rows.
    """

    chunks: list[Chunk]
    bases: list[int]
    ready: list[Chunk]
    hidden: HiddenStates
    batch: Batch
    step: CapturedStep | None = None
    logits: torch.Tensor | None = None
    scores: dict[Request, RowScores] = field(default_factory=dict)

    def newest(self) -> list[int]:
        """Return the row of the newest token of each ready chunk."""
        pairs = zip(self.chunks, self.bases, strict=True)
        rows = {id(chunk): base + chunk.end - chunk.first - 1 for chunk, base in pairs}
        return [rows[id(chunk)] for chunk in self.ready]

    def rows(self) -> list[int]:
        """Return the rows of the step that `logits` has."""
        pairs = zip(self.ready, self.newest(), strict=True)
        return [row + number for chunk, row in pairs for number in range(1 + len(chunk.drafts))]
