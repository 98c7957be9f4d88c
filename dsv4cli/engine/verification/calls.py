"""One HTTP request of a check, and the server's response to it. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from dsv4cli.engine.chat.api_client import BUSY

CHAT, COMPLETIONS, MODELS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DATA, DONE = "data:", "[DONE]"
# why a call has no response; "not sent" after several calls without an answer
Failure = Literal["", "no answer", "closed", "not sent"]


@dataclass(frozen=True)
class ApiCall:
    """A request to send.

    Attributes:
        key: a name that is unique in a run, such as `encoding.tools/3`; the journal stores the response under it.
        body: a JSON document, or raw bytes to send malformed JSON; None for GET.
        most: read at most this many bytes of the response, then close the connection; None reads all of it.
        tokens_in: an estimate of the prompt's length in tokens, for the announced cost.
        seconds: the time after which the lack of a response is an error of the server; None if it never is.
    """

    key: str
    path: str
    body: Mapping[str, Any] | bytes | None
    method: str = "POST"
    most: int | None = None
    tokens_in: int = 0
    seconds: float | None = None

    @property
    def content(self) -> bytes | None:
        """The bytes of the body."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body, ensure_ascii=False).encode(errors="surrogatepass")

    @property
    def tokens_out(self) -> int:
        """The maximum number of tokens of the answer."""
        if not isinstance(self.body, Mapping):
            return 0
        limit = self.body.get("max_tokens", self.body.get("max_completion_tokens", self.body.get("max_output_tokens")))
        return limit if isinstance(limit, int) and limit > 0 else 0

    @property
    def streams(self) -> bool:
        """Whether the response is a stream of events."""
        return isinstance(self.body, Mapping) and self.body.get("stream") is True


@dataclass(frozen=True)
class ServerReply:
    """The response to a call.

    Attributes:
        status: the HTTP status; 0 if there is no response.
        text: the body. Bytes that are not UTF-8 are replaced by U+FFFD.
        complete: False if the connection was closed before the end.
        failure: why there is no response.
        seconds: time until the response was complete.
    """

    status: int
    text: str = ""
    complete: bool = True
    failure: Failure = ""
    seconds: float = 0.0

    @cached_property
    def document(self) -> dict[str, Any] | None:
        """The JSON object of the body; None if it is not one."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @cached_property
    def events(self) -> list[Any]:
        """The data of the stream's events, parsed: `[DONE]` stays text, and data that is not JSON becomes None."""
        return [_parsed(line[len(DATA) :].strip()) for line in self.text.splitlines() if line.startswith(DATA)]

    @property
    def late(self) -> bool:
        """Whether the server did not answer in time, or had no capacity. Another attempt may succeed."""
        return self.failure in ("no answer", "not sent") or self.status in BUSY

    def record(self) -> dict[str, Any]:
        """Return the response as a JSON document."""
        return {
            "status": self.status,
            "text": self.text,
            "complete": self.complete,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
        }

    @property
    def summary(self) -> str:
        """The response in a few words, for evidence."""
        if self.failure == "no answer":
            return f"no response within {self.seconds:.0f} s; use --timeout if the server is only slow"
        if self.failure == "not sent":
            return "not sent, because several requests in a row had no answer"
        if self.failure:
            return "the connection was closed without a response"
        text = self.text[:200]
        return text if self.status == 200 else f"status {self.status}: {text}" if text else f"status {self.status}"


def _parsed(data: str) -> Any:
    if data == DONE:
        return DONE
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
