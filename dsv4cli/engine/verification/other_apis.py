"""Checks of the other APIs of a server: Anthropic's messages and OpenAI's Responses. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsv4cli.engine.verification.calls import ApiCall, ServerReply
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.replies import MARKUP, readable

QUESTION = "What is 17 + 25?"
MOST = 32
REASON = "Each API of a server has its own code that builds prompts and formats answers."
MEANING = "Clients of one API get other answers than clients of the others."


def api_checks(server: CheckedServer) -> list[Check]:
    """Return the checks. Each compares the text of an answer with that of the chat API."""
    chat = server.chat("replies.apis/chat", QUESTION, most=MOST)
    messages = [server.message(f"replies.messages/{kind}", QUESTION, MOST, stream=kind == "stream") for kind in KINDS]
    responses = [
        server.response(f"replies.responses/{kind}", QUESTION, MOST, stream=kind == "stream") for kind in KINDS
    ]
    off: Mapping[str, Any] = {"reasoning": {"effort": "none"}}
    responses = [ApiCall(one.key, one.path, {**_body(one), **off}, tokens_in=one.tokens_in) for one in responses]
    return [
        _check("messages", chat, messages, server.messages, "the server has no /v1/messages"),
        _check("responses", chat, responses, server.responses, "the server has no /v1/responses"),
    ]


KINDS = ("whole", "stream")


def _body(call: ApiCall) -> Mapping[str, Any]:
    assert isinstance(call.body, Mapping)
    return call.body


def _check(name: str, chat: ApiCall, calls: Sequence[ApiCall], there: bool, missing: str) -> Check:
    def judge(replies: Replies) -> Iterator[Problem]:
        for _, answer in readable([chat], replies):
            for call in calls:
                text = text_of(replies[call.key], streamed=call.streams)
                if text is None:
                    yield Problem(f"an answer of {call.path} cannot be read", [replies[call.key].summary], call)
                elif any(mark in text for mark in MARKUP):
                    yield Problem(f"an answer of {call.path} contains special tokens", [repr(text[:200])], call)
                elif text.strip() != (answer.content or "").strip():
                    lines = [f"chat: {answer.content!r}", f"{call.path}: {text!r}"]
                    yield Problem(f"the same question has another answer in {call.path}", lines, call)

    steps = [fixed([chat, *calls])] if there else []
    return Check(f"replies.{name}", REASON, MEANING, steps, judge, "" if there else missing)


def text_of(reply: ServerReply, *, streamed: bool) -> str | None:
    """Return the text of an answer of either API, without reasoning; None if it cannot be read."""
    if reply.status != 200 or reply.failure or not reply.complete:
        return None
    try:
        return _streamed(reply) if streamed else _whole(reply.document or {})
    except (TypeError, LookupError, AttributeError):
        return None


def _whole(document: Mapping[str, Any]) -> str:
    if "output" in document:
        parts = [part for item in document["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")
    return "".join(block["text"] for block in document["content"] if block["type"] == "text")


def _streamed(reply: ServerReply) -> str | None:
    texts, ended = list[str](), False
    for event in reply.events:
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "response.output_text.delta":
            texts.append(event["delta"])
        elif kind == "content_block_delta" and event["delta"]["type"] == "text_delta":
            texts.append(event["delta"]["text"])
        ended = ended or kind in ("response.completed", "message_stop")
    return "".join(texts) if ended else None
