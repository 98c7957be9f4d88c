"""Runs the texts of a recording through a model in the engine's own steps, with forced tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.system.threads import Progress
from dsv4cli.engine.tracing.manifest import Text


class ForcedTokens:
    """A constraint that forces the tokens of a text, whatever the model would sample."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(reversed(tokens))

    def forced(self) -> int | None:
        """Return the next token. After the last one, return None: the sampled token never enters the model."""
        return self._left[-1] if self._left else None

    def banned(self) -> Sequence[int]:
        """Return no tokens."""
        return ()

    def masks(self, drafts: Sequence[int]) -> tuple[()]:
        """Return no masks."""
        return ()

    def instead(self, token: int) -> int | None:
        """Return None: keep the sampled token."""
        return None

    def push(self, token: int) -> None:
        """Remove the token that was sampled."""
        if self._left:
            self._left.pop()


@dataclass(frozen=True)
class Company:
    """Other texts that share the cache with a text.

    Attributes:
        before: run first; the text reuses their slot.
        beside: run in the same steps.
    """

    before: Sequence[Text] = ()
    beside: Sequence[Text] = ()


@dataclass
class Walk:
    """How to run texts through a model.

    Attributes:
        chunk: prompt tokens in a step.
        drafting: draft tokens that a step verifies. They change which rows are computed together, but no token.
        followers: the other ranks.
        company: other texts that share the cache.
        watched: the request of the current text.
    """

    model: Transformer
    device: torch.device
    chunk: int = 4096
    drafting: Drafting = NO_DRAFTS
    followers: Followers | None = None
    company: Company = field(default_factory=Company)
    watched: Request | None = None

    def slot(self) -> int | None:
        """Return the cache slot of the current text, for an observer."""
        sequence = None if self.watched is None else self.watched.sequence
        return None if sequence is None else sequence.slot

    def through(self, texts: Sequence[Text], progress: Progress = lambda done, total: None) -> list[Text]:
        """Run the texts one after another, without CUDA graphs, and return them with the sampled tokens.

        Args:
            progress: called with the tokens done and the total.

        Raises what `Engine.step` raises.
        """
        slots, gone, done, total = 1 + len(self.company.beside), list[Text](), 0, sum(len(text.ids) for text in texts)
        with Engine(self.model, Capacity(slots), self.device, self.followers, self.drafting) as engine:
            for text in texts:
                for one in self.company.before:
                    for _ in self._steps(engine, [self._request(one)]):
                        pass
                self.watched = request = self._request(text)
                for _ in self._steps(engine, [*map(self._request, self.company.beside), request]):
                    progress(done + min(request.done, len(text.ids)), total)
                gone.append(Text(tuple(request.ids[: len(text.ids)]), text.prompt))
                self.watched = None
                done += len(text.ids)
        return gone

    def _request(self, text: Text) -> Request:
        prompt, later = list(text.ids[: text.prompt]), text.ids[text.prompt :]
        given = ForcedTokens(later) if all(token >= 0 for token in later) else None
        limits = Limits(max_tokens=len(later) + 1, prefill_chunk=self.chunk)
        return Request(prompt, Sampling(0.0), limits, constraint=given, stop_ids=())

    @staticmethod
    def _steps(engine: Engine, requests: Sequence[Request]) -> Iterator[None]:
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            yield
