"""Responses of /v1/completions: continuations of texts and, with echo and logprobs, the scores of their own tokens."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.completion_choice import CompletionChoice
from dsv4cli.engine.server.completion_request import CompletionRequest, read_completion
from dsv4cli.engine.server.engine_thread import Update
from dsv4cli.engine.server.incoming import account_of, read_body, service_of
from dsv4cli.engine.server.openai import DONE, IDLE, event, event_of_refusal, usage_of
from dsv4cli.engine.server.plan import MOST_CHOICES, check_followed
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.server.streaming import Silence, answered


async def completions(http: HttpRequest) -> Response:
    """POST /v1/completions."""
    service, request = service_of(http), await read_body(http, read_completion, MOST_CHOICES)
    scoring, drawing = request.scoring(), await request.drawing(service)
    call = service.engine.call([*scoring, *(one for own in drawing for one in own)], account_of(http))
    reply = CompletionReply(service, request, call, scoring, drawing)
    return await answered(http, call, reply, event_of_refusal, stream=request.stream)


@dataclass
class CompletionReply:
    """The response of one call to /v1/completions.

    Attributes:
        scoring: the request that scores each prompt; empty if none are scored.
        drawing: for each prompt, the requests that sample its continuations.
    """

    service: Service
    request: CompletionRequest
    call: EngineCall
    scoring: Sequence[Request]
    drawing: Sequence[Sequence[Request]]
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        tokenizer = self.service.dialogue.tokenizer
        self.choices: list[CompletionChoice] = []
        self._scored: dict[Request, list[CompletionChoice]] = {one: [] for one in self.scoring}
        for nth, (plan, requests) in enumerate(zip(self.request.plans, self.drawing, strict=True)):
            own: Sequence[Request | None] = requests or [None]
            for request in own:
                choice = CompletionChoice(len(self.choices), plan, request, tokenizer)
                self.choices.append(choice)
                if self.scoring:
                    self._scored[self.scoring[nth]].append(choice)
        self._drawn = {choice.request: choice for choice in self.choices if choice.request is not None}
        self._taken: dict[CompletionChoice, list[Token]] = {choice: [] for choice in self.choices}

    def usage(self) -> dict[str, Any]:
        """Return the token counts of all prompts and continuations, in OpenAI's shape."""
        return usage_of(
            *((len(plan.ids), [one for one in self.choices if one.plan is plan]) for plan in self.request.plans)
        )

    async def document(self) -> dict[str, Any]:
        """Wait for all texts, and return them as one document."""
        while self.call.open:
            for update in await self.call.updates():
                self._take(update)
        self._take_likeliest()
        return self._head() | {"choices": [self._choice(one) for one in self.choices], "usage": self.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the texts as server-sent events: each step's deltas, or complete texts if the prompts are scored."""
        if self.scoring:
            silence = Silence()
            while self.call.open:
                updates = await self.call.updates()
                for update in updates:
                    self._take(update)
                if not updates or silence.long:
                    yield silence.ended_by(IDLE)
            self._take_likeliest()
            for choice in self.choices:
                yield self._chunk(self._choice(choice))
        else:
            async for chunk in self._drawn_events():
                yield chunk
        if self.request.include_usage:
            yield event(self._head() | {"choices": [], "usage": self.usage()})
        yield DONE

    async def _drawn_events(self) -> AsyncGenerator[bytes, None]:
        for choice in self.choices if self.request.echo else ():
            finish = choice.finish if choice.ended else None
            yield self._chunk(self._piece(choice, self._prompt(choice), [], finish))
        silence = Silence()
        while self.call.open:
            updates = await self.call.updates()
            if not updates or silence.long:
                yield silence.ended_by(IDLE)
            for update in updates:
                choice = self._drawn[update.request]
                if choice.ended:
                    continue  # this step ran before its request was cancelled
                added, taken = self._take(update)
                if added or taken or choice.ended:
                    piece = self._piece(choice, added, taken, choice.finish if choice.ended else None)
                    yield silence.ended_by(self._chunk(piece))

    def _take(self, update: Update) -> tuple[str, list[Token]]:
        """Apply an update, and return the text and the tokens that it adds. A stop text ends the request too."""
        if update.scores is not None:
            for choice in self._scored[update.request]:
                choice.take_scores(update.scores)
            return "", []
        choice = self._drawn[update.request]
        added, taken = self._push(choice, update.tokens)
        if choice.ended:
            self.call.finish(update.request)
            check_followed(update.request, choice.answer.tokens[-1], choice.plan.shape.field)
        return added, taken

    def _push(self, choice: CompletionChoice, given: list[Token]) -> tuple[str, list[Token]]:
        """Add tokens to a text, and return what `CompletionChoice.push` does."""
        sampled = choice.sampled
        added, taken = choice.push(given)
        self._taken[choice] += taken
        self.service.metrics.count_generated(choice.sampled - sampled)
        return added, taken

    def _take_likeliest(self) -> None:
        """Add the token after each prompt, if scoring has already found it."""
        if self.request.follows and self.request.one_greedy:
            for choice in self.choices:
                choice.ended = False
                self._push(choice, [choice.likeliest(self.service.dialogue.config.eos_token_ids)])

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.service.names[0]}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event(self._head() | {"choices": [choice]})

    def _prompt(self, choice: CompletionChoice) -> str:
        return self.service.dialogue.tokenizer.decode(choice.plan.ids)

    def _choice(self, choice: CompletionChoice) -> dict[str, Any]:
        """Return a finished text as an entry of `choices`."""
        prompt = self._prompt(choice) if self.request.echo else ""
        return self._piece(choice, prompt + choice.text, self._taken[choice], choice.finish)

    def _piece(self, choice: CompletionChoice, text: str, taken: list[Token], finish: str | None) -> dict[str, Any]:
        logprobs = None if self.request.logprobs is None else choice.logprobs(self.request.scored, taken)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
