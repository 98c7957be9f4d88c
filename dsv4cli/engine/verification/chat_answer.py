"""A chat answer as a client reads it, from a whole response or put together from a stream. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.verification.calls import DONE, ServerReply

Json = dict[str, Any]


class UnreadableReply(Exception):
    """A response that a client of OpenAI's API cannot read. Its message says why."""


@dataclass
class ToolUse:
    """One tool call: the function's name, and the arguments as JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer with its log-probability, and those of the likeliest tokens."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass
class ChatAnswer:
    """The first choice of a chat response.

    Attributes:
        content: None if the response says null or nothing.
        usage: empty if the response has none.
        tokens: the tokens with log-probabilities; empty if they were not requested.
        deltas: the texts of a stream's deltas, in order; empty for a whole response.
        done: whether a stream ended with `[DONE]`.
        usage_last: whether a stream's last event before `[DONE]` has the usage.
    """

    content: str | None = None
    reasoning: str = ""
    calls: list[ToolUse] = field(default_factory=list)
    finish: str | None = None
    usage: Json = field(default_factory=dict)
    tokens: list[AnswerToken] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    done: bool = True
    usage_last: bool = False

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text with the name of its field."""
        yield "content", self.content or ""
        yield "reasoning", self.reasoning
        for call in self.calls:
            yield "the name of a call", call.name
            yield "arguments", call.arguments

    def count(self, name: str) -> int | None:
        """Return a number of `usage`; None if it is missing."""
        value = self.usage.get(name)
        return value if type(value) is int else None


def read_chat(reply: ServerReply, *, streamed: bool) -> ChatAnswer:
    """Read a chat response.

    Raises:
        UnreadableReply: there is no response, it has another status than 200, or another format.
    """
    if reply.failure or reply.status != 200:
        raise UnreadableReply(reply.summary)
    try:
        return _from_stream(reply) if streamed else _from_document(reply)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnreadableReply(f"not the format of a chat completion ({type(error).__name__}: {error})") from None


def read_raw(reply: ServerReply) -> str:
    """Return the text of a response of `/v1/completions`; "" if it cannot be read."""
    try:
        text = (reply.document or {})["choices"][0]["text"]
    except (LookupError, TypeError):
        return ""
    return text if isinstance(text, str) else ""


def _from_document(reply: ServerReply) -> ChatAnswer:
    if not reply.complete:
        raise UnreadableReply("the connection was closed before the end of the response")
    document = reply.document
    if document is None:
        raise UnreadableReply("the body is not a JSON object")
    choice = document["choices"][0]
    message = choice["message"]
    found = ChatAnswer(message.get("content"), message.get("reasoning_content") or message.get("reasoning") or "")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found.calls.append(ToolUse(str(call.get("id") or ""), function["name"], function["arguments"]))
    found.finish, found.usage = choice.get("finish_reason"), document.get("usage") or {}
    found.tokens = _tokens(choice)
    return _checked(found)


def _from_stream(reply: ServerReply) -> ChatAnswer:
    found, calls = ChatAnswer(done=False), dict[int, ToolUse]()
    for event in reply.events:
        if event == DONE:
            found.done = True
            continue
        if event is None:
            raise UnreadableReply("an event of the stream is not JSON")
        if event.get("error"):
            raise UnreadableReply(f"the stream has an error: {event['error']}")
        if event.get("usage"):
            found.usage = event["usage"]
        found.usage_last = bool(event.get("usage"))
        for choice in (event.get("choices") or ())[:1]:
            _add(found, calls, choice)
    found.calls = [calls[index] for index in sorted(calls)]
    return _checked(found)


def _add(found: ChatAnswer, calls: dict[int, ToolUse], choice: Json) -> None:
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    content = delta.get("content")
    if content is not None:
        found.content = (found.content or "") + content
    found.reasoning += reasoning
    found.deltas += [text for text in (reasoning, content) if text]
    for part in delta.get("tool_calls") or ():
        call = calls.setdefault(int(part.get("index") or 0), ToolUse())
        function = part.get("function") or {}
        call.id = call.id or str(part.get("id") or "")
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""
        found.deltas += [text for text in (function.get("arguments"),) if text]
    found.tokens += _tokens(choice)
    if choice.get("finish_reason") is not None:
        found.finish = choice["finish_reason"]


def _tokens(choice: Json) -> list[AnswerToken]:
    listed = (choice.get("logprobs") or {}).get("content") or ()
    return [
        AnswerToken(
            one["token"],
            float(one["logprob"]),
            {other["token"]: float(other["logprob"]) for other in one.get("top_logprobs") or ()},
        )
        for one in listed
    ]


def _checked(found: ChatAnswer) -> ChatAnswer:
    """Raise TypeError if a text is not a string."""
    for name, text in found.texts():
        if not isinstance(text, str):
            raise TypeError(f"{name} is not a string")
    return found
