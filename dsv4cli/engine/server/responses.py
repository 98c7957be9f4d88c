"""OpenAI's /v1/responses: one document, a stream of numbered events, or an answer in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from traceback import format_exception
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.server.accounts import Account
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.choice import Choice, choices_of, pushed
from dsv4cli.engine.server.incoming import account_of, read_body, service_of
from dsv4cli.engine.server.openai import IDLE, usage_of
from dsv4cli.engine.server.refusals import Refusal, json_response, refusal_of, to_bytes
from dsv4cli.engine.server.response_input import new_id
from dsv4cli.engine.server.response_output import Event, ResponseOutput
from dsv4cli.engine.server.response_request import ResponseRequest, read_response, response_ids
from dsv4cli.engine.server.response_store import ResponseStore
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.server.streaming import Silence, answered
from dsv4cli.errors import Dsv4Error

# in a body that refers to a stored response or item
REFERENCES = (b"previous_response_id", b'"id"')
T = TypeVar("T")
# fields of a response that are null until there is something to say
EMPTY = dict.fromkeys(("error", "incomplete_details", "usage", "completed_at"))


async def _read(http: HttpRequest, read: Callable[[dict[str, Any], Service, Account], T]) -> T:
    """Return the result of `read` for the body of a request, with the account whose responses it may refer to."""
    owner = account_of(http)
    return await read_body(http, lambda body, service: read(body, service, owner), references=REFERENCES)


async def create_response(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    service, request = service_of(http), await _read(http, read_response)
    requests = await request.plan.requests(service)
    call = service.engine.call(requests, account_of(http))
    [choice] = choices_of(request.plan, requests, service).values()
    reply = ResponseReply(service, request, call, choice, account_of(http))
    if request.background:
        assert service.responses is not None
        return json_response(_start(reply, service.responses))
    return await answered(http, call, reply, reply.failed, stream=request.stream)


async def count_input(http: HttpRequest) -> Response:
    """POST /v1/responses/input_tokens."""
    ids = await _read(http, response_ids)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


def _start(reply: "ResponseReply", store: ResponseStore) -> dict[str, Any]:
    """Begin an answer in the background, and return the response as it is now."""
    document = reply.head("in_progress")
    store.put(document, reply.request.inputs, reply.owner)
    task = asyncio.create_task(_finish(reply, store))
    store.tasks[reply.id] = task
    return document


async def _finish(reply: "ResponseReply", store: ResponseStore) -> None:
    """Store a background answer when it is complete."""
    try:
        with reply.call:
            await reply.document()
    except asyncio.CancelledError:
        store.replace(reply.head("cancelled"))
    except Exception as error:  # noqa: BLE001 - a client that polls must see that its answer has failed
        store.replace(reply.head("failed") | {"error": _error(refusal_of(error))})
        if not isinstance(error, Refusal | Dsv4Error):
            reply.service.log("".join(format_exception(error)))
    finally:
        del store.tasks[reply.id]
        usage = reply.usage()
        reply.service.metrics.count_usage(usage)
        tokens = f"{usage['prompt_tokens']:,} + {usage['completion_tokens']:,} tokens"
        reply.service.log(f"background response {reply.id} ended, {tokens}")


def _error(refusal: Refusal) -> dict[str, Any]:
    return {"code": "server_error", "message": refusal.message}


@dataclass
class ResponseReply:
    """The response of one call to /v1/responses."""

    service: Service
    request: ResponseRequest
    call: EngineCall
    choice: Choice
    owner: Account
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        seal = self.service.seal if self.request.sealed else None
        self._output = ResponseOutput(self.request.tools.offered, summarized=self.request.summarized, seal=seal)
        self._number = 0

    def usage(self) -> dict[str, Any]:
        """Return the token counts of the prompt and the answer in the shape of the chat API, for the log."""
        return usage_of((len(self.request.plan.ids), [self.choice]))

    async def document(self) -> dict[str, Any]:
        """Wait for the answer, and return the response as one document."""
        while not self.choice.ended:
            self._take_updates(await self.call.updates())
        self._output.finish(self._item_status, self.choice.open_call)
        return self._complete()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response."""
        for stage in ("created", "in_progress"):
            yield self._encoded({"type": f"response.{stage}", "response": self.head("in_progress")})
        silence = Silence()
        while not self.choice.ended:
            updates = await self.call.updates()
            if not updates or silence.long:
                yield silence.ended_by(IDLE)
            for event in self._take_updates(updates):
                yield silence.ended_by(self._encoded(event))
        for event in self._output.finish(self._item_status, self.choice.open_call):
            yield self._encoded(event)
        document = self._complete()
        yield self._encoded({"type": f"response.{document['status']}", "response": document})

    def failed(self, refusal: Refusal) -> bytes:
        """Return the event that ends a stream after an error."""
        document = self.head("failed") | {"error": _error(refusal)}
        return self._encoded({"type": "response.failed", "response": document})

    def head(self, status: str) -> dict[str, Any]:
        """Return the response with the output items that are complete."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.service.names[0],
            "output": [*self._output.items],
            **EMPTY,
            **self.request.shown,
        }

    def _complete(self) -> dict[str, Any]:
        """Return the complete response, and store it if the client has not declined that."""
        cut = self.choice.finish == "length"
        document = self.head("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": self._usage(),
        }
        if self.request.stored and self.service.responses is not None:
            store = self.service.responses
            store.replace(document) if self.request.background else store.put(document, self.request.inputs, self.owner)
        return document

    @property
    def _item_status(self) -> str:
        return "incomplete" if self.choice.finish == "length" else "completed"

    def _take_updates(self, updates: list[Any]) -> list[Event]:
        events: list[Event] = []
        for deltas, _ in pushed(updates, {self.choice.request: self.choice}, self.call).values():
            for delta in deltas:
                events += self._output.take(delta)
        return events

    def _encoded(self, event: Event) -> bytes:
        """Return an event with the next sequence number."""
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + to_bytes(numbered) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        read, sampled = len(self.request.plan.ids), self.choice.sampled
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self.choice.cached, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning_tokens},
            "total_tokens": read + sampled,
        }
