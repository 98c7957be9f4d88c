"""The server's routes, and what each request goes through: access checks, error responses and one log line."""

from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter, time
from traceback import format_exception
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from dsv4cli.engine.server.accounts import ANYONE
from dsv4cli.engine.server.chat_completions import chat_completions
from dsv4cli.engine.server.completions import completions
from dsv4cli.engine.server.connections import CONNECTION, BoundedProtocol, connection_of
from dsv4cli.engine.server.front import noting, with_cors, without_root
from dsv4cli.engine.server.guard import OPEN_PATHS, Guard
from dsv4cli.engine.server.incoming import service_of
from dsv4cli.engine.server.messages import count_tokens, messages
from dsv4cli.engine.server.page import MATH_PATH, math_library, page
from dsv4cli.engine.server.refusals import Refusal, broken_off, json_response, refusal_of
from dsv4cli.engine.server.request_log import request_id_of, request_line
from dsv4cli.engine.server.responses import count_input, create_response
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.server.stored_responses import cancel_response, response_inputs, stored_response
from dsv4cli.engine.server.streaming import ClientGone
from dsv4cli.engine.server.tokens_api import detokenize, tokenize, tokenizer_info
from dsv4cli.errors import Dsv4Error
from dsv4cli.version import __version__

STARTED = int(time())


async def health(http: HttpRequest) -> Response:
    """GET /health: 503 if the engine has failed or hangs."""
    engine = service_of(http).engine
    if engine.failure.done():
        raise Refusal(503, "the engine has failed")
    if engine.hangs is not None:
        raise Refusal(503, f"the engine hangs: {engine.hangs}")
    return json_response({"status": "ok"})


async def version(http: HttpRequest) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def models(http: HttpRequest) -> Response:
    """GET /v1/models: one document that is valid for OpenAI and Anthropic clients."""
    service = service_of(http)
    listed = [_model(name, service) for name in service.names]
    names = {"first_id": service.names[0], "last_id": service.names[-1]}
    return json_response({"object": "list", "data": listed, "has_more": False, **names})


async def model(http: HttpRequest) -> Response:
    """GET /v1/models/NAME."""
    service, name = service_of(http), http.path_params["name"]
    if name not in service.names:
        raise Refusal(
            404, f"this server has no such model; it serves {', '.join(service.names)}", "model", "model_not_found"
        )
    return json_response(_model(name, service))


def _model(name: str, service: Service) -> dict[str, object]:
    openai = {"id": name, "object": "model", "created": STARTED, "owned_by": "dsv4", "max_model_len": service.context}
    created = datetime.fromtimestamp(STARTED, UTC).isoformat().replace("+00:00", "Z")
    return openai | {"type": "model", "display_name": name, "created_at": created}


async def metrics(http: HttpRequest) -> Response:
    """GET /metrics."""
    service = service_of(http)
    return Response(service.metrics.text(*await service.engine.report()), media_type="text/plain; version=0.0.4")


async def start_page(http: HttpRequest) -> Response:
    """GET /: the built-in chat page. It needs no API key: the page itself prompts the user for one."""
    body, policy = page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(body, headers=headers, media_type="text/html")


async def math_script(http: HttpRequest) -> Response:
    """GET /math.js: the page's library for formulas. The page pins its digest, so browsers may cache it forever."""
    headers = {"x-content-type-options": "nosniff", "cache-control": "public, max-age=31536000, immutable"}
    return Response(math_library(), headers=headers, media_type="text/javascript")


ROUTES = (
    Route("/", start_page),
    Route(MATH_PATH, math_script),
    Route("/health", health),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input, methods=["POST"]),
    Route("/v1/responses/{id}", stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", response_inputs),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
)


@dataclass
class App:
    """The server as an ASGI application.

    Attributes:
        bug: called with the traceback of an unexpected error, which is a bug of the server.
        root_path: path below which a reverse proxy offers the server, without a slash at the end.
    """

    service: Service
    guard: Guard
    bug: Callable[[str], None]
    root_path: str = ""
    routes: Sequence[Route] = ROUTES

    def __post_init__(self) -> None:
        self._router = Router(self.routes, redirect_slashes=False)
        self._front = with_cors(self._answer, self.guard.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request, as ASGI requires."""
        assert scope["type"] == "http"
        start = perf_counter()
        scope["app"] = self  # makes the router raise HTTPException for unknown paths
        scope["path"] = without_root(scope["path"], self.root_path)
        state: dict[str, Any] = {"service": self.service, CONNECTION: connection_of(scope), "account": ANYONE}
        state |= {"request_id": request_id_of(Headers(scope=scope).get("x-request-id")), "status": 0}
        scope["state"] = state
        try:
            await self._front(scope, receive, noting(scope, send))
        except (ClientGone, ClientDisconnect):
            pass
        finally:
            path, refusal = self._path(scope), state.get("refusal")
            self.service.metrics.count_http(path, state["status"], state["usage"]() if "usage" in state else None)
            if refusal is not None:
                self.service.metrics.count_refusal(path, refusal.status)
            self.service.log(request_line(scope, state["status"], perf_counter() - start))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with its route's response, or with an error."""
        try:
            if not scope["path"]:  # the page's links are relative: its address must end with a slash
                await RedirectResponse(f"{self.root_path}/")(scope, receive, send)
                return
            self._admit(scope)
            await self._router(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            raise
        except (Exception, CancelledError) as error:  # noqa: BLE001 - reported to the client and to `bug`
            scope["state"]["refusal"] = refusal = self._refusal(error)
            if not scope["state"]["status"]:
                await refusal.response(_is_anthropic(scope))(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Check whether a request is allowed. Raises `Refusal` if it is not."""
        scope["state"]["account"] = account = self.guard.check(scope["path"], Headers(scope=scope))
        if scope["method"] == "POST":
            account.admit()
        connection: BoundedProtocol | None = scope["state"][CONNECTION]
        if connection is not None and scope["path"] not in OPEN_PATHS:
            connection.admitted = True
            if connection.late and connection.crowded:
                raise Refusal(503, "too many clients are connected: try again later")

    def _path(self, scope: Scope) -> str:
        """Return the path of the route that matches a request, or "other": a metric must have few label values."""
        return next((route.path for route in self.routes if route.matches(scope)[0] is not Match.NONE), "other")

    def _refusal(self, error: Exception | CancelledError) -> Refusal:
        if isinstance(error, CancelledError):
            return broken_off()
        if isinstance(error, HTTPException):
            return _misplaced(error)
        if isinstance(error, RecursionError):
            return Refusal(400, "the body is nested too deeply")
        if not isinstance(error, Refusal | Dsv4Error):
            self.bug("".join(format_exception(error)))
        return refusal_of(error)


def _misplaced(error: HTTPException) -> Refusal:
    """Return the refusal of an unknown path, or of a method that the path does not allow."""
    if error.status_code == 405:
        methods = sorted((error.headers or {})["Allow"].split(", "))
        return Refusal(405, f"this path allows only {' or '.join(methods)}", allow=", ".join(methods))
    paths = "/v1/chat/completions, /v1/completions, /v1/messages, /v1/responses and /v1/models"
    return Refusal(error.status_code, f"no such path; the API is at {paths}")


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/v1/messages")
