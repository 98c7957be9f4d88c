"""Sends the texts of a recording through a model: the engine's own steps, token by token as they are given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.tracing.manifest import Text

# called with how many are done, and of how many
Progress = Callable[[int, int], None]


class ForcedTokens:
    """A constraint that gives a request the tokens of a text, whichever it would draw."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(reversed(tokens))

    def forced(self) -> int | None:
        """The next one; behind the last what is drawn, which goes through no model."""
        return self._left[-1] if self._left else None

    def banned(self) -> Sequence[int]:
        """None."""
        return ()

    def masks(self, drafts: Sequence[int]) -> tuple[()]:
        """None."""
        return ()

    def instead(self, token: int) -> int | None:
        """Nothing."""
        return None

    def push(self, token: int) -> None:
        """It has come."""
        if self._left:
            self._left.pop()


@dataclass(frozen=True)
class Company:
    """Who shares the cache with a text: before, whose slot it gets; beside, who are in its steps."""

    before: Sequence[Text] = ()
    beside: Sequence[Text] = ()


@dataclass
class Walk:
    """How texts go through a model. chunk: tokens of a prompt in a step. drafting: how many drafts a step verifies;
    which rows are computed together then changes, and no token. followers: the other ranks."""

    model: Transformer
    device: torch.device
    chunk: int = 4096
    drafting: Drafting = NO_DRAFTS
    followers: Followers | None = None
    company: Company = field(default_factory=Company)
    watched: Request | None = None

    def slot(self) -> int | None:
        """The slot of the text that goes through now, for an observer."""
        sequence = None if self.watched is None else self.watched.sequence
        return None if sequence is None else sequence.slot

    def through(self, texts: Sequence[Text], progress: Progress = lambda done, total: None) -> list[Text]:
        """Each text, one after another, in steps that no graph holds; gives them with the tokens that were drawn.
        progress: tokens done and in all. Raises what `Engine.step` raises."""
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
