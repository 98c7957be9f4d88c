"""Errors of HTTP requests, in the shapes of OpenAI and Anthropic. Does not import torch."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dsv4cli.errors import Dsv4Error, NotEnoughMemory, UsageError

# error types by status: OpenAI's, Anthropic's
TYPES: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}
# seconds after which a client may retry a request that was refused temporarily
RETRY_AFTER = 2


class Refusal(Exception):
    """A rejected request: status code, reason and error fields.

    Attributes:
        param: the field that the error is about.
        code: OpenAI's error code.
        allow: the methods that the path allows, for status 405.
        retry_after: seconds after which the client may retry, None if it is of no use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        allow: str = "",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.allow = status, message, param, code, allow
        self.retry_after = RETRY_AFTER if retry_after is None and status == 503 else retry_after

    def body(self, anthropic: bool) -> dict[str, Any]:
        """Return the error as a JSON document."""
        openai_type, anthropic_type = TYPES[self.status]
        if anthropic:
            return {"type": "error", "error": {"type": anthropic_type, "message": self.message}}
        return {"error": {"message": self.message, "type": openai_type, "param": self.param, "code": self.code}}

    def response(self, anthropic: bool) -> Response:
        """Return the error as a response. It closes the connection if the rest of the request is not to be read."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        headers |= {"allow": self.allow} if self.allow else {}
        headers |= {"www-authenticate": "Bearer"} if self.status == 401 else {}
        headers |= {"connection": "close"} if self.status in (408, 413, 415, 503) else {}
        return json_response(self.body(anthropic), self.status, headers)


class PromptTooLong(Refusal):
    """The refusal of a prompt that leaves no tokens for an answer, in the words by which agents recognize it.

    Clients of both APIs match the text: Claude Code and litellm, for example, then shorten the conversation.
    """

    def __init__(self, tokens: int, context: int, counted: bool = True) -> None:
        """Describe the prompt.

        Args:
            tokens: tokens of the prompt; if it was not `counted` to its end, a number that it exceeds.
            context: the context length, prompt and answer together.
        """
        more = "" if counted else "more than "
        super().__init__(
            400,
            f"This model's maximum context length is {context} tokens. However, your messages resulted in "
            f"{more}{tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
        )
        rest = "" if counted else " (at least; the rest was not counted)"
        self._anthropic = f"prompt is too long: {tokens + (not counted)} tokens > {context - 1} maximum{rest}"

    def body(self, anthropic: bool) -> dict[str, Any]:
        """Return the error as a JSON document."""
        body = super().body(anthropic)
        if anthropic:
            body["error"]["message"] = self._anthropic
        return body


def bad_field(name: str, reason: str) -> Refusal:
    """Return the refusal of a request with an invalid field."""
    return Refusal(400, f"{name}: {reason}", name)


def broken_off() -> Refusal:
    """Return the refusal of a request that is cut off by the server's shutdown."""
    return Refusal(503, "the server shut down before the answer was complete")


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal that reports an exception to the client."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, UsageError):
        return Refusal(400, error.message)
    if isinstance(error, NotEnoughMemory):
        return Refusal(503, "the server has no memory left for this request; try again later")
    if isinstance(error, Dsv4Error):
        return Refusal(500, error.message)
    return Refusal(500, "internal server error; see the server's log")


def json_response(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON document as a response."""
    return Response(to_bytes(value), status, headers, media_type="application/json")


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
