"""Responses of /v1/chat/completions: one document, or a stream of chunks."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.chat.answer_stream import Delta
from dsv4cli.engine.runtime.request import Token
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.chat_request import ChatRequest, read_chat
from dsv4cli.engine.server.choice import Choice, choices_of, pushed
from dsv4cli.engine.server.incoming import account_of, read_body, service_of
from dsv4cli.engine.server.openai import DONE, IDLE, event, event_of_refusal, usage_of
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.server.streaming import Silence, answered
from dsv4cli.version import __version__


async def chat_completions(http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    service, request = service_of(http), await read_body(http, read_chat)
    requests = await request.plan.requests(service)
    call = service.engine.call(requests, account_of(http))
    reply = ChatReply(service, request, call, choices_of(request.plan, requests, service))
    return await answered(http, call, reply, event_of_refusal, stream=request.stream)


@dataclass
class ChatReply:
    """The response of one call to /v1/chat/completions."""

    service: Service
    request: ChatRequest
    call: EngineCall
    choices: dict[Any, Choice]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict[str, Any]:
        """Return the token counts of the prompt and of all answers, in OpenAI's shape."""
        return usage_of((len(self.request.plan.ids), self.choices.values()))

    async def document(self) -> dict[str, Any]:
        """Wait for all answers, and return them as one document."""
        sampled: dict[Choice, list[Token]] = {choice: [] for choice in self.choices.values()}
        while not all(choice.ended for choice in sampled):
            for choice, (_, taken) in pushed(await self.call.updates(), self.choices, self.call).items():
                sampled[choice] += taken
        choices = [self._choice(choice, taken) for choice, taken in sampled.items()]
        return self._head("chat.completion") | {"choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the deltas of each step as server-sent events."""
        choices, silence = list(self.choices.values()), Silence()
        for choice in choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, None, [])
        while not all(choice.ended for choice in choices):
            updates = await self.call.updates()
            if not updates or silence.long:
                yield silence.ended_by(IDLE)
            for choice, (deltas, taken) in pushed(updates, self.choices, self.call).items():
                # one kind of delta per chunk: some clients read either reasoning or content of a chunk, not both
                parts = [self._delta(choice, [*part]) for _, part in groupby(deltas, key=lambda delta: delta.kind)]
                if not parts and taken and self.request.logprobs:
                    parts = [{}]
                for nth, part in enumerate(parts):
                    yield silence.ended_by(self._chunk(choice, part, None, taken if nth == 0 else []))
                if choice.ended:
                    yield self._chunk(choice, {}, self._finish(choice), [])
        if self.request.include_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage()})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": f"dsv4-{__version__}",
        }

    def _chunk(self, choice: Choice, delta: dict[str, Any], finish: str | None, taken: list[Token]) -> bytes:
        shown = {"index": choice.index, "delta": delta, "logprobs": self._logprobs(taken), "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [shown]})

    def _delta(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        """Return one step's deltas in OpenAI's shape. Several tool calls in a step are distinguished by their index."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for one in deltas:
            if one.kind != "calls":
                for name in ("content",) if one.kind == "content" else self.service.defaults.reasoning_fields:
                    delta[name] = delta.get(name, "") + one.text
                continue
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            if one.name:
                call |= {"id": self._call_id(choice, one.index), "type": "function"}
                call["function"]["name"] = one.name
            call["function"]["arguments"] += one.text
        if calls and self.request.old_calls:  # one call at most
            return delta | {"function_call": calls[0]["function"]}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def _choice(self, choice: Choice, taken: list[Token]) -> dict[str, Any]:
        """Return a finished answer as an entry of `choices`."""
        message = choice.message
        shown: dict[str, Any] = {"role": "assistant", "content": message["content"]}
        if message["reasoning_content"]:
            shown |= dict.fromkeys(self.service.defaults.reasoning_fields, message["reasoning_content"])
        if message["tool_calls"]:
            calls = enumerate(message["tool_calls"])
            made = [{"id": self._call_id(choice, nth), **call} for nth, call in calls]
            shown |= {"function_call": made[0]["function"]} if self.request.old_calls else {"tool_calls": made}
            shown["content"] = message["content"] or None
        logprobs, finish = self._logprobs(taken), self._finish(choice)
        return {"index": choice.index, "message": shown, "logprobs": logprobs, "finish_reason": finish}

    def _finish(self, choice: Choice) -> str | None:
        old = self.request.old_calls and choice.finish == "tool_calls"
        return "function_call" if old else choice.finish

    def _call_id(self, choice: Choice, nth: int) -> str:
        return f"call_{self.id.removeprefix('chatcmpl-')[:16]}_{choice.index}_{nth}"

    def _logprobs(self, taken: list[Token]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": [self._token(one.id, one.logprob) | {"top_logprobs": [self._token(*top) for top in one.top]}
                            for one in taken if one.finish != "stop"]}  # fmt: skip

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        content = self.service.dialogue.tokenizer.token_bytes(token)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}
