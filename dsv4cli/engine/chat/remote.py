"""A conversation with a model on a server, over OpenAI's API. Does not import torch."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

from dsv4cli.engine.chat import api_client
from dsv4cli.engine.chat.answer import Pieces
from dsv4cli.engine.chat.api_client import ApiClient, NoAnswer, StreamEnded
from dsv4cli.engine.chat.dropping import answer_tokens, messages_to_drop
from dsv4cli.engine.chat.remote_answer import RemoteAnswer
from dsv4cli.engine.settings import MORE_SAMPLING, NOTHING, Limits, Sampling
from dsv4cli.engine.text.prompt import Message, without_tools
from dsv4cli.errors import AnswerLost, ServerError, UsageError

COMPLETIONS, MODELS, TOKENIZE = "/v1/chat/completions", "/v1/models", "/tokenize"
# "owned_by" in the model list of `dsv4 serve`
OURS = "dsv4"
# OpenAI's reasoning_effort by thinking level
EFFORTS = {"off": "none", "low": "low", "high": "high", "max": "max"}
# the most tokens of a prompt in addition to its messages: the texts about effort and tools
BESIDE = 4096
# tokens left if the context length is unknown
BOUNDLESS = 1 << 30


@dataclass(frozen=True)
class RemoteSampling(Sampling):
    """Sampling parameters for a server, which uses its own defaults for parameters that are not `given`."""

    given: frozenset[str] = frozenset()

    def chosen(
        self, temperature: float | None, top_p: float | None, seed: int | None, more: Mapping[str, Any] = NOTHING
    ) -> Self:
        """Return what `Sampling.chosen` does, and record which parameters are given."""
        values = {"temperature": temperature, "top_p": top_p} | {name: more.get(name) for name in MORE_SAMPLING}
        given = self.given | {name for name, value in values.items() if value is not None}
        return replace(super().chosen(temperature, top_p, seed, more), given=given)


class AnswerFailed(ServerError):
    """A server reports an error in place of the rest of an answer."""


Reply = Generator[tuple[RemoteAnswer, Pieces], None, None]


class RemoteConversation:
    """Answers a conversation, whose messages may change between turns. So may `model` and `limits`.

    Attributes:
        prompt_tokens, reused, prefilled: as in `Conversation`; 0 until the server reports its token counts.
    """

    drafts = all_drafts = offload = None  # servers do not report them
    unread = 0

    def __init__(
        self, client: ApiClient, model: str, level: str, limits: Limits, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Request the list of models from the server.

        Args:
            client: the server.
            model: name of the model to use; the server's first model if it has none of this name.
            level: the thinking level.
            limits: the limits of an answer.
            warn: called once if the server does not count tokens in time.

        Raises:
            ServerError: the server does not respond as expected.
            UsageError: the thinking level does not exist.
        """
        self.client, self.limits, self._warn = client, limits, warn
        # set if the server fails to count tokens in time; then it is not asked again
        self._silent: NoAnswer | None = None
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
        """The names of the server's models."""
        return list(self._models)

    @property
    def context(self) -> int | None:
        """The context length in tokens, including the answer; None if the server does not report it."""
        length = self._models[self.model].get("max_model_len")
        return length if isinstance(length, int) and length > 0 else None

    @property
    def effort(self) -> str | None:
        """The reasoning effort; None if thinking is off."""
        return None if self._level == "off" else self._level

    def think(self, level: str) -> None:
        """Set the thinking level of the following turns. Raises UsageError for an unknown level."""
        if level not in EFFORTS:
            raise UsageError(f'there is no thinking level "{level}"', f"use one of {', '.join(EFFORTS)}")
        self._level = level

    def tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of the prompt for these messages.

        Raises:
            ServerError: the server cannot be reached, or cannot count tokens.
        """
        count = self._tokenized({**self._prompt_fields(messages), "add_generation_prompt": True}, "count")
        if not isinstance(count, int):
            raise self.client.other_format()
        return count

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises ServerError, also if the server cannot tokenize."""
        ids = self._tokenized({"model": self.model, "prompt": text, "add_special_tokens": False}, "tokens")
        if not isinstance(ids, list):
            raise self.client.other_format()
        return ids

    def most_tokens(self, text: str) -> int:
        """Return an upper bound for the number of tokens of a text: each token has at least one byte."""
        return len(text.encode(errors="replace"))

    def left(self, messages: Sequence[Message]) -> int:
        """Return how many tokens of the context the prompt for these messages leaves, as far as it is known."""
        if self.context is None:
            return BOUNDLESS
        try:
            return self.context - self.tokens(messages)
        except ServerError:
            return self.context - self._most_tokens(messages)

    def messages_to_drop(self, messages: Sequence[Message]) -> int:
        """Return what the function `messages_to_drop` does; 0 if the server reports no context length or cannot count.

        The server counts only if a local upper bound exceeds the context.
        """
        context, most = self.context, self.limits.max_tokens
        if context is None or self._most_tokens(messages) + answer_tokens(context, most) <= context:
            return 0
        try:
            return messages_to_drop(messages, self.tokens, context, most)
        except ServerError:
            return 0

    def reply(self, messages: Sequence[Message], sampling: Sampling, *, think_budget: int | None = None) -> Reply:
        """Answer the last of these validated messages. A running reply ends first.

        Yields the answer, still empty, before the first event; then, after each event, the answer and its added text.

        Raises:
            UsageError: raised immediately if the server does not support a thinking budget.
            ServerError: raised while the answer is generated; AnswerLost if a part of it has arrived.
        """
        self.forget()
        body = self.body(messages, sampling, self.limits)
        if think_budget is not None and self._level != "off":
            self._check_budget()
            body["thinking"] = {"type": "enabled", "budget_tokens": think_budget}
        self.prompt_tokens = self.reused = self.prefilled = 0
        self._stopping = False
        self._reply = self._turn(body)
        return self._reply

    def body(
        self, messages: Sequence[Message], sampling: Sampling, limits: Limits, level: str | None = None
    ) -> dict[str, Any]:
        """Return the request for a streamed answer.

        Args:
            level: the thinking level; None for the conversation's.
        """
        body = self._prompt_fields(messages, level) | {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": limits.max_tokens, "seed": sampling.seed}
        given = sampling.given if isinstance(sampling, RemoteSampling) else {"temperature", "top_p"}
        body |= {name: getattr(sampling, name) for name in sorted(given)}
        return body | ({"stop": list(limits.stops)} if limits.stops else {})

    def stop(self) -> None:
        """End the running reply from any thread: the connection is closed, and the answer has no `finish`."""
        self._stopping = True
        self.client.close()

    def forget(self) -> None:
        """End a running reply."""
        running, self._reply = self._reply, None
        if running is not None:
            running.close()

    def _check_budget(self) -> None:
        if self._models[self.model].get("owned_by") != OURS:
            raise UsageError(
                f"{self.client.url} is not a dsv4 server and has no thinking budget", "omit --think-budget"
            )

    def _prompt_fields(self, messages: Sequence[Message], level: str | None = None) -> dict[str, Any]:
        """Return the request in OpenAI's format, with the thinking level in the fields that such servers read."""
        plain, tools = without_tools(messages)
        level = level or self._level
        thinks = {"reasoning_effort": EFFORTS[level], "chat_template_kwargs": {"thinking": level != "off"}}
        return {"model": self.model, "messages": plain} | ({"tools": tools} if tools else {}) | thinks

    def _tokenized(self, body: dict[str, Any], name: str) -> object:
        if self._silent is not None:
            raise self._silent
        try:
            return self.client.post(TOKENIZE, body).get(name)
        except NoAnswer as error:
            self._silent = error
            what = f"{self.client.url} did not respond to {TOKENIZE} within {api_client.LONGEST_WAIT:g} s"
            self._warn(f"{what}: tokens are not counted, and no messages are dropped from prompts")
            raise

    def _most_tokens(self, messages: Sequence[Message]) -> int:
        return BESIDE + self.most_tokens(json.dumps(messages, ensure_ascii=False))

    def _turn(self, body: dict[str, Any]) -> Reply:
        answer = RemoteAnswer()
        self.breakable = True  # until something has arrived; nothing is lost before that
        yield answer, []
        try:
            with closing(self.client.stream(COMPLETIONS, body)) as events:
                for event in events:
                    if self._stopping:
                        break
                    pieces = push_event(self.client, answer, event)
                    self.breakable = self.breakable and not answer.sampled
                    yield answer, pieces
            if not self._stopping:
                answer.finish = answer.finish or "stop"  # the stream is complete, even if the server sent no reason
        except StreamEnded:
            if not (self._stopping or answer.finish):
                raise self._lost(answer, "the connection closed before the answer was complete") from None
        except ServerError as error:
            if not self._stopping:
                raise (self._lost(answer, error.message) if answer.sampled else error) from None
        self.prompt_tokens, self.reused = answer.prompt_tokens, answer.cached
        self.prefilled = answer.prompt_tokens - answer.cached
        yield answer, []

    def _lost(self, answer: RemoteAnswer, reason: str) -> ServerError:
        if not answer.sampled:
            return ServerError(f"{self.client.url}: {reason}", "try again; see also the server's log")
        return AnswerLost(f"{reason}: the part that arrived is kept", "/retry asks again")


def push_event(client: ApiClient, answer: RemoteAnswer, event: dict[str, Any]) -> Pieces:
    """Add an event of a client's stream to an answer, and return its text by kind. Raises ServerError."""
    if event.get("error"):
        said = event["error"]
        reason = said.get("message") if isinstance(said, dict) else said
        raise AnswerFailed(f"{client.url} has failed: {reason}", "see the server's log")
    try:
        return answer.push(event)
    except (TypeError, ValueError, LookupError, AttributeError):
        raise client.other_format() from None


def _models(client: ApiClient) -> dict[str, dict[str, Any]]:
    """Return the server's models by name, at least one. Raises ServerError."""
    listed = client.get(MODELS).get("data")
    named = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    models = {one["id"]: one for one in named if isinstance(one.get("id"), str)}
    if not models:
        raise client.other_format()
    return models
