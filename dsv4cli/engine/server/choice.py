"""One answer on its way to a client: the tokens of a request as reasoning, content and calls, and how it ended."""

from dataclasses import dataclass
from typing import Literal

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.async_engine import Call
from dsv4cli.engine.server.engine_thread import Update
from dsv4cli.engine.server.plan import Plan
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message


@dataclass(frozen=True)
class Delta:
    """What a step has added to an answer. kind "call": the name of call number `call`; "arguments": a piece of their
    JSON text."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = -1


class Choice:
    """index: among the answers to one prompt. reasoning_tokens: how many tokens it thought for, the end of that
    included."""

    def __init__(self, index: int, request: Request, thinks: bool, service: Service) -> None:
        self.index, self.request = index, request
        self.answer = Answer(service.dialogue.tokenizer, thinks, request.limits.stops)
        self.reasoning_tokens = 0
        self._thinks = thinks
        self._think_end = service.dialogue.tokenizer.token_id(tokens.THINK_END)
        self._calls = 0

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self.answer.finish is not None

    @property
    def drawn(self) -> int:
        """How many tokens it has, the end token included."""
        return len(self.answer.tokens)

    @property
    def cached(self) -> int:
        """How many tokens of the prompt a cache held."""
        return self.request.cached

    @property
    def message(self) -> Message:
        """The whole answer, which has ended."""
        return self.answer.message()[0]

    def push(self, given: list[Token], call: Call) -> tuple[list[Delta], list[Token]]:
        """What tokens add, and those of them that belong to the answer; one that ends with a stop text ends its
        request too."""
        deltas, taken = list[Delta](), list[Token]()
        for token in given:
            if self.ended:
                break
            taken.append(token)
            self.reasoning_tokens += self._thinks
            self._thinks = self._thinks and token.id != self._think_end
            for kind, text in self.answer.push(token):
                if kind != "calls":
                    deltas.append(Delta(kind, text))
        if self.ended:
            deltas += self._call_deltas()
            call.cancel(self.request)
        return deltas, taken

    def _call_deltas(self) -> list[Delta]:
        deltas = []
        for nth, one in enumerate(self.message["tool_calls"]):
            deltas.append(Delta("call", one["function"]["name"], nth))
            deltas.append(Delta("arguments", one["function"]["arguments"], nth))
        return deltas


def choices_of(plan: Plan, requests: list[Request], service: Service) -> dict[Request, Choice]:
    """The answers to a plan, by their requests."""
    thinks = service.thinks(plan.ids)
    return {one: Choice(index, one, thinks, service) for index, one in enumerate(requests)}


def pushed(
    updates: list[Update], choices: dict[Request, Choice], call: Call
) -> dict[Choice, tuple[list[Delta], list[Token]]]:
    """What updates add to each answer that they are of."""
    tokens_of: dict[Choice, list[Token]] = {}
    for update in updates:
        tokens_of.setdefault(choices[update.request], []).extend(update.tokens)
    return {choice: choice.push(given, call) for choice, given in tokens_of.items() if given}
