"""A conversation with a model that a server runs: the same questions, answered over OpenAI's API; no torch."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.chat import api_client
from dsv4cli.engine.chat.answer import Pieces
from dsv4cli.engine.chat.api_client import ApiClient, NoAnswer, StreamEnded
from dsv4cli.engine.chat.dropping import answer_room, messages_to_drop
from dsv4cli.engine.chat.remote_answer import RemoteAnswer
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.prompt import Message, without_tools
from dsv4cli.errors import AnswerLost, ServerError, UsageError

COMPLETIONS, MODELS, TOKENIZE = "/v1/chat/completions", "/v1/models", "/tokenize"
# the name of `dsv4 serve` in its list of models
OURS = "dsv4"
# level of thinking: OpenAI's word for it
EFFORTS = {"off": "none", "low": "low", "high": "high", "max": "max"}
# what a prompt has beside its messages, in tokens at most: the texts of efforts and about tools
BESIDE = 4096
# tokens that a context leaves of which nobody knows how long it is
BOUNDLESS = 1 << 30


@dataclass(frozen=True)
class RemoteSampling(Sampling):
    """What is asked of a server, which has values of its own for what is not `given`: the names of those that are."""

    given: frozenset[str] = frozenset()

    def chosen(self, temperature: float | None, top_p: float | None, seed: int | None) -> "RemoteSampling":
        """As `Sampling.chosen`, with the names of what is given."""
        values = {"temperature": temperature, "top_p": top_p}
        given = self.given | {name for name, value in values.items() if value is not None}
        both = super().chosen(temperature, top_p, seed)
        return RemoteSampling(both.temperature, both.top_p, both.seed, given=given)


Reply = Generator[tuple[RemoteAnswer, Pieces], None, None]


class RemoteConversation:
    """Answers one conversation; its messages may be others each time. `model` and `limits` may be set between turns.

    names: of the models that the server has. context: the most tokens of a prompt and its answer, None where it does
    not say. prompt_tokens, reused and prefilled as `Conversation` has them, 0 until an answer is counted.
    """

    drafts = all_drafts = offload = None  # a server says nothing of them
    unread = 0

    def __init__(
        self, client: ApiClient, model: str, level: str, limits: Limits, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Ask the server for its models.

        Args:
            client: of the server.
            model: which is to answer; the server's first where it has none of this name.
            level: how hard to reason.
            limits: of an answer.
            warn: called once where the server does not count tokens in time.

        Raises:
            ServerError: where it does not answer.
            UsageError: for a level that there is not.
        """
        self.client, self.limits, self._warn = client, limits, warn
        self._silent: NoAnswer | None = None  # it has not counted tokens in time, and is not asked again
        self.lookalikes: list[str] = []
        self.prompt_tokens = self.reused = self.prefilled = 0
        self.breakable = False
        self._stopping = False
        self._reply: Reply | None = None
        self._models = _models(client)
        self.model = model if model in self._models else self.names[0]
        self.think(level)

    @property
    def names(self) -> list[str]:
        """Of the server's models."""
        return list(self._models)

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer."""
        length = self._models[self.model].get("max_model_len")
        return length if isinstance(length, int) and length > 0 else None

    @property
    def effort(self) -> str | None:
        """How hard to reason; None for not at all."""
        return None if self._level == "off" else self._level

    def think(self, level: str) -> None:
        """How hard to reason from the next turn on. Raises UsageError."""
        if level not in EFFORTS:
            raise UsageError(f'there is no thinking level "{level}"', f"use one of {', '.join(EFFORTS)}")
        self._level = level

    def tokens(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt of these messages has. Raises ServerError, also where the server cannot count."""
        count = self._tokenized({**self._asked(messages), "add_generation_prompt": True}, "count")
        if not isinstance(count, int):
            raise self.client.other_format()
        return count

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text. Raises ServerError, also where the server cannot count."""
        ids = self._tokenized({"model": self.model, "prompt": text, "add_special_tokens": False}, "tokens")
        if not isinstance(ids, list):
            raise self.client.other_format()
        return ids

    def most_tokens(self, text: str) -> int:
        """How many tokens a text has at most: no token is less than a byte."""
        return len(text.encode(errors="replace"))

    def left(self, messages: Sequence[Message]) -> int:
        """How many tokens of the context the prompt of these messages leaves, as far as that is known."""
        if self.context is None:
            return BOUNDLESS
        try:
            return self.context - self.tokens(messages)
        except ServerError:
            return self.context - self._most_tokens(messages)

    def messages_to_drop(self, messages: Sequence[Message]) -> int:
        """As the function of this name; 0 where only the server knows. It is asked where there may be too many."""
        context, most = self.context, self.limits.max_tokens
        if context is None or self._most_tokens(messages) + answer_room(context, most) <= context:
            return 0
        try:
            return messages_to_drop(messages, self.tokens, context, most)
        except ServerError:
            return 0

    def reply(self, messages: Sequence[Message], sampling: Sampling, *, think_budget: int | None = None) -> Reply:
        """Answers the last of these checked messages: before the first word the answer, still empty, and after each
        event the answer and what that added. An earlier reply ends.

        Raises UsageError at once for a budget that the server does not know; while it runs ServerError, which is
        AnswerLost where something came.
        """
        self.forget()
        body = self._asked(messages) | {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": self.limits.max_tokens, "seed": sampling.seed}
        given = sampling.given if isinstance(sampling, RemoteSampling) else {"temperature", "top_p"}
        body |= {name: getattr(sampling, name) for name in given}
        if self.limits.stops:
            body["stop"] = list(self.limits.stops)
        if think_budget is not None and self._level != "off":
            self._check_budget()
            body["thinking"] = {"type": "enabled", "budget_tokens": think_budget}
        self.prompt_tokens = self.reused = self.prefilled = 0
        self._stopping = False
        self._reply = self._turn(body)
        return self._reply

    def stop(self) -> None:
        """Ends the running reply, from any thread: the connection is closed, and the answer has no `finish`."""
        self._stopping = True
        self.client.close()

    def forget(self) -> None:
        """Ends a running reply."""
        running, self._reply = self._reply, None
        if running is not None:
            running.close()

    def _check_budget(self) -> None:
        if self._models[self.model].get("owned_by") != OURS:
            raise UsageError(
                f"{self.client.url} is no dsv4 serve, and knows no budget of thinking", "leave --think-budget out"
            )

    def _asked(self, messages: Sequence[Message]) -> dict[str, Any]:
        """What is asked, as OpenAI's API has it, and how hard to think, as servers of this model do."""
        plain, tools = without_tools(messages)
        thinks = {"reasoning_effort": EFFORTS[self._level], "chat_template_kwargs": {"thinking": self._level != "off"}}
        return {"model": self.model, "messages": plain} | ({"tools": tools} if tools else {}) | thinks

    def _tokenized(self, body: dict[str, Any], name: str) -> object:
        if self._silent is not None:
            raise self._silent
        try:
            return self.client.post(TOKENIZE, body).get(name)
        except NoAnswer as error:
            self._silent = error
            what = f"{self.client.url} has not answered {TOKENIZE} within {api_client.LONGEST_WAIT:g} s"
            self._warn(f"{what}: tokens are not counted, and no message is left out of a prompt")
            raise

    def _most_tokens(self, messages: Sequence[Message]) -> int:
        return BESIDE + self.most_tokens(json.dumps(messages, ensure_ascii=False))

    def _turn(self, body: dict[str, Any]) -> Reply:
        answer = RemoteAnswer()
        self.breakable = True  # until something has come: nothing is lost then
        yield answer, []
        try:
            with closing(self.client.stream(COMPLETIONS, body)) as events:
                for event in events:
                    if self._stopping:
                        break
                    pieces = self._taken(answer, event)
                    self.breakable = self.breakable and not answer.drawn
                    yield answer, pieces
            if not self._stopping:
                answer.finish = answer.finish or "stop"  # it is complete, whatever the server says of it
        except StreamEnded:
            if not (self._stopping or answer.finish):
                raise self._lost(answer, "the connection ended before the answer did") from None
        except ServerError as error:
            if not self._stopping:
                raise (self._lost(answer, error.message) if answer.drawn else error) from None
        self.prompt_tokens, self.reused = answer.prompt_tokens, answer.cached
        self.prefilled = answer.prompt_tokens - answer.cached
        yield answer, []

    def _taken(self, answer: RemoteAnswer, event: dict[str, Any]) -> Pieces:
        if event.get("error"):
            said = event["error"]
            reason = said.get("message") if isinstance(said, dict) else said
            raise ServerError(f"{self.client.url} has failed: {reason}", "its own log says why")
        try:
            return answer.push(event)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise self.client.other_format() from None

    def _lost(self, answer: RemoteAnswer, reason: str) -> ServerError:
        if not answer.drawn:
            return ServerError(f"{self.client.url}: {reason}", "ask again; its own log may say why")
        return AnswerLost(f"{reason}: what came is kept", "/retry asks again")


def _models(client: ApiClient) -> dict[str, dict[str, Any]]:
    """The server's models by their names, at least one. Raises ServerError."""
    listed = client.get(MODELS).get("data")
    named = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    models = {one["id"]: one for one in named if isinstance(one.get("id"), str)}
    if not models:
        raise client.other_format()
    return models
