"""The loop that every caller runs: requests are added, each step gives each of them what it got, until they end."""

from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import lost_others
from dsv4cli.engine.runtime.limits import check_text, max_new_tokens
from dsv4cli.engine.runtime.logprobs import Drawn, drawn_of
from dsv4cli.engine.runtime.preparing import OnPreparing
from dsv4cli.engine.runtime.request import Request, Result, Token
from dsv4cli.engine.runtime.runner import Capacity, Ran, Runner
from dsv4cli.engine.runtime.sampler import Draws, sample

# far below any logit, and finite at the lowest temperature
BANNED = -1e30
# the name of an order and what it carries, as JSON has them
Order = tuple[str, dict[str, Any]]


class Followers(Protocol):
    """The other ranks of a model, as the leader's engine sees them: parallel/followers.py."""

    def tell(self, orders: list[Order] | None) -> None:
        """Sends them orders, which keep them busy until `rest`."""

    def rest(self) -> None:
        """They wait for more."""


class Engine:
    """Carries out requests on one model; with several ranks this one leads, and the others follow.

    What a request draws does not depend on the others. Not for several threads at once.
    """

    def __init__(
        self,
        model: Transformer,
        capacity: Capacity,
        device: torch.device | str,
        followers: Followers | None = None,
    ) -> None:
        self.model = model
        self.followers = followers
        self.runner = Runner(model, capacity, device)
        self._orders: list[Order] = [("begin", asdict(capacity))]
        self._count = 0

    @classmethod
    def of(
        cls,
        model: Transformer,
        requests: list[Request],
        device: torch.device | str,
        followers: Followers | None = None,
    ) -> "Engine":
        """An engine for these requests, which are added. Raises UsageError as `add`, before memory is taken; of several
        it names the prompt or the text by its number."""
        if len(requests) > 1:
            for number, one in enumerate(requests):
                one.name = f"{'text' if one.scored else 'prompt'} {number}"
        for one in requests:
            one.end = end_of(model, one)
        longest = None if any(one.scored for one in requests) else max((one.end for one in requests), default=1)
        engine = cls(model, Capacity(len(requests), longest), device, followers)
        for one in requests:
            engine._queue(one)
        return engine

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else a step may be under way, which graphs that go would wait for
            self.runner.close()

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return self.runner.scheduler.busy

    def report_preparing(self, on_preparing: OnPreparing) -> None:
        """Has it called with True where kernels are compiled or graphs captured, and with False after that step."""
        self.runner.preparing.on_preparing = on_preparing

    def add(self, request: Request) -> None:
        """Queues a request. Raises UsageError for a prompt that is empty, fills the context or has ids outside the
        vocabulary, NotEnoughMemory where the state that it begins with finds no room."""
        request.end = end_of(self.model, request)
        self._queue(request)

    def cancel(self, request: Request) -> None:
        """Ends a request before its next step; harmless when it has ended."""
        if self.runner.end(request):
            self._order("end", number=request.number)
            self._rest()

    def step(self) -> list[Result]:
        """What each request of the next step got; a token with `finish` is its last. Raises UnsoundResult for logits
        that are not finite, NotEnoughMemory, RankLost."""
        self._order("step")
        try:
            self._tell()
            ran = self.runner.run()
            drawn = [] if ran.logits is None else self._draw(ran.ready, ran.logits)
        except Exception as error:
            if self.followers is not None and not lost_others(error):
                self.followers.rest()  # whoever watches lost ranks sees which one has ended, and how
            raise
        self._order("take", tokens=[token for token, _, _ in drawn])
        return self._results(ran, dict(zip(ran.ready, drawn, strict=True)))

    def forget(self) -> None:
        """Ends every request and gives back what is kept for later ones."""
        self._order("forget")
        self.runner.forget()
        self._rest()

    def _queue(self, request: Request) -> None:
        request.number = self._count
        self._count += 1
        self._order(
            "add",
            number=request.number,
            prompt=request.prompt,
            prefill_chunk=request.limits.prefill_chunk,
            max_context=request.limits.max_context,
            end=request.end,
            keep=request.keep,
            scored=request.scored,
        )
        self.runner.add(request)

    def _order(self, name: str, **given: Any) -> None:
        if self.followers is not None:
            self._orders.append((name, given))

    def _tell(self) -> None:
        orders, self._orders = self._orders, []
        if self.followers is not None:
            self.followers.tell(orders)

    def _rest(self) -> None:
        if self.followers is not None and not self.busy:
            self.followers.rest()

    def _results(self, ran: Ran, drawn: dict[Request, Drawn]) -> list[Result]:
        results = []
        for chunk in ran.chunks:
            request, tokens = chunk.request, []
            if request in drawn:
                number, logprob, top = drawn[request]
                request.ids.append(number)
                if request.constraint is not None:
                    request.constraint.push(number)
                finish = self._finish(request, number)
                top = top[: request.limits.logprobs]
                tokens.append(Token(number, logprob, top, finish, self.runner.preparing.happened))
            if (request.scored and request.caught_up) or (tokens and tokens[-1].finish):
                self.cancel(request)
            results.append(Result(request, tokens, ran.scores.get(request)))
        return results

    def _draw(self, ready: list[Request], logits: torch.Tensor) -> list[Drawn]:
        """The next token of each: what its sampling draws, where its constraint does not ask for another."""
        tokens = _sampled(ready, _allowed(ready, logits))
        for row, request in enumerate(ready):
            forced = None if request.constraint is None else request.constraint.forced()
            if forced is not None:
                tokens[row] = forced
        count = max(request.limits.logprobs for request in ready)
        drawn = drawn_of(logits, tokens, count)
        for row, request in enumerate(ready):
            other = None if request.constraint is None else request.constraint.instead(drawn[row][0])
            if other is not None:
                drawn[row] = drawn_of(logits[row : row + 1], torch.full_like(tokens[:1], other), count)[0]
        return drawn

    def _finish(self, request: Request, token: int) -> Literal["stop", "length"] | None:
        stop_ids = self.model.config.eos_token_ids if request.stop_ids is None else request.stop_ids
        if token in stop_ids:
            return "stop"
        return "length" if len(request.ids) >= request.end else None


def end_of(model: Transformer, request: Request) -> int:
    """The most tokens of a request's prompt and answer. Raises UsageError for what the model cannot take."""
    if request.scored:
        check_text(request.prompt, model.config, request.limits, request.name)
        return len(request.prompt)
    return len(request.prompt) + max_new_tokens(request.prompt, model.config, request.limits, request.name)


def _allowed(ready: list[Request], logits: torch.Tensor) -> torch.Tensor:
    """The logits fp32 [R, V] without the tokens that constraints ban; the given ones stay."""
    allowed = logits
    for row, request in enumerate(ready):
        banned = () if request.constraint is None else request.constraint.banned()
        if banned:
            allowed = logits.clone() if allowed is logits else allowed
            allowed[row, torch.tensor(banned, device=logits.device)] = BANNED
    return allowed


def _sampled(ready: list[Request], logits: torch.Tensor) -> torch.Tensor:
    """The next token of each request, as its own sampling draws it: fp32 [R, V] -> int64 [R]."""
    lengths = [len(request.ids) for request in ready]
    return sample(logits, Draws.of([request.sampling for request in ready], lengths, logits.device))
