"""Responses of Anthropic's /v1/messages: one document, or a stream of block events."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.chat.answer_stream import Delta
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.choice import Choice, choices_of, pushed
from dsv4cli.engine.server.incoming import account_of, read_body, service_of
from dsv4cli.engine.server.message_request import MessageRequest, message_ids, read_message
from dsv4cli.engine.server.openai import usage_of
from dsv4cli.engine.server.refusals import Refusal, json_response, to_bytes
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.server.streaming import Silence, answered

# clients return it with the thinking; the server ignores it
SIGNATURE = "dsv4"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    service, request = service_of(http), await read_body(http, read_message)
    requests = await request.plan.requests(service)
    call = service.engine.call(requests, account_of(http))
    [choice] = choices_of(request.plan, requests, service).values()
    reply = MessageReply(service, request, call, choice)
    return await answered(http, call, reply, _event_of_refusal, stream=request.stream)


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    return json_response({"input_tokens": len(await read_body(http, message_ids))})


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + to_bytes({"type": kind, **fields}) + b"\n\n"


def _event_of_refusal(refusal: Refusal) -> bytes:
    return b"event: error\ndata: " + to_bytes(refusal.body(anthropic=True)) + b"\n\n"


@dataclass
class MessageReply:
    """The response of one call to /v1/messages."""

    service: Service
    request: MessageRequest
    call: EngineCall
    choice: Choice
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")

    def usage(self) -> dict[str, Any]:
        """Return the token counts of the prompt and the answer in OpenAI's shape, for the log."""
        return usage_of((len(self.request.plan.ids), [self.choice]))

    async def document(self) -> dict[str, Any]:
        """Wait for the answer, and return it as one document."""
        while not self.choice.ended:
            pushed(await self.call.updates(), {self.choice.request: self.choice}, self.call)
        message = self.choice.message
        content: list[dict[str, Any]] = []
        if self.request.thinking and message["reasoning_content"]:
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": SIGNATURE})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for nth, call in enumerate(message["tool_calls"]):
            content.append(self._tool_use(nth, call["function"]["name"], _input(call["function"]["arguments"])))
        return self._head() | {"content": content, **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's content blocks as server-sent events."""
        usage = {"input_tokens": len(self.request.plan.ids), "output_tokens": 0}
        head = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=head)
        yield _event("ping")
        blocks, silence = MessageBlocks(self), Silence()
        while not self.choice.ended:
            updates = await self.call.updates()
            if not updates or silence.long:
                yield silence.ended_by(_event("ping"))
            for deltas, _ in pushed(updates, {self.choice.request: self.choice}, self.call).values():
                for delta in deltas:
                    if delta.kind != "reasoning" or self.request.thinking:
                        for event in blocks.take(delta):
                            yield silence.ended_by(event)
        for event in blocks.close():
            yield event
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def tool_id(self, nth: int) -> str:
        """Return the id of the tool call at index `nth`."""
        return f"toolu_{self.id.removeprefix('msg_')[:20]}_{nth}"

    def _tool_use(self, nth: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": self.tool_id(nth), "name": name, "input": given}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.service.names[0]}

    def _end(self) -> dict[str, Any]:
        stop = self.choice.stopped_by
        reason = "stop_sequence" if stop is not None else STOP_REASONS[self.choice.finish or "stop"]
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, int]:
        cached = self.choice.cached
        return {
            "input_tokens": len(self.request.plan.ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.choice.sampled,
        }


class MessageBlocks:
    """The content blocks of a message as events. One block is open at a time."""

    def __init__(self, reply: MessageReply) -> None:
        self._reply = reply
        self._index = -1
        self._open = ""  # the kind of the open block

    def take(self, delta: Delta) -> list[bytes]:
        """Return the events for a delta."""
        match delta.kind:
            case "reasoning":
                events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*events, self._delta(type="thinking_delta", thinking=delta.text)]
            case "content":
                return [
                    *self._begin("text", {"type": "text", "text": ""}),
                    self._delta(type="text_delta", text=delta.text),
                ]
        block = {"type": "tool_use", "id": self._reply.tool_id(delta.index), "name": delta.name, "input": {}}
        events = self._begin(f"tool_use {delta.index}", block)
        return [*events, self._delta(type="input_json_delta", partial_json=delta.text)]

    def close(self) -> list[bytes]:
        """Return the events that end the open block, if there is one."""
        if not self._open:
            return []
        signature = [self._delta(type="signature_delta", signature=SIGNATURE)] if self._open == "thinking" else []
        self._open = ""
        return [*signature, _event("content_block_stop", index=self._index)]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if kind == self._open:
            return []
        before = self.close()
        self._index, self._open = self._index + 1, kind
        return [*before, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. A value that is not an object is wrapped as `{"arguments": value}`."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
