"""The server's log: one line per request, as text or as JSON. What clients send cannot forge a line; no torch."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from starlette.types import Scope

from dsv4cli.engine.server.front import UNIX_CLIENT
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.harmless import brief_line

# characters of a request id; a longer or an unusual one is replaced
REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
# characters of a path, a method and a reason in the log
LONGEST_PATH, LONGEST_METHOD, LONGEST_REASON = 200, 16, 300
# a field's name that is logged as it is; others are quoted
FIELD = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)


class LogLine(str):
    """A log line as text, with its content as fields for JSON."""

    fields: Mapping[str, Any]

    def __new__(cls, text: str, fields: Mapping[str, Any]) -> "LogLine":
        """Create a line with its fields."""
        line = super().__new__(cls, text)
        line.fields = fields
        return line


def log_text(line: str, *, as_json: bool, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> str:
    """Return a line of the log with the time: text, or a JSON object on one line of ASCII."""
    time = now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if not as_json:
        return f"{time} {line}"
    fields = line.fields if isinstance(line, LogLine) else {"message": line}
    return json.dumps({"time": time, **fields}).replace("\x7f", "\\u007f")


def request_id_of(given: str | None) -> str:
    """Return the request id that a client sent, or a new one if it is missing, too long or has unusual characters."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else uuid4().hex


def request_line(scope: Scope, status: int, seconds: float) -> LogLine:
    """Return the log line of an HTTP request that has ended. It contains nothing from the request's body."""
    fields = _fields_of(scope, status) | _counts_of(scope["state"])
    fields |= {"seconds": round(seconds, 6), "key": scope["state"]["account"].name or None}
    fields["request_id"] = scope["state"]["request_id"]
    return LogLine(_text_of(fields), {name: value for name, value in fields.items() if value is not None})


def _fields_of(scope: Scope, status: int) -> dict[str, Any]:
    refusal: Refusal | None = scope["state"].get("refusal")
    return {
        "client": _client(scope),
        "method": _printable(scope["method"])[:LONGEST_METHOD],
        "path": quote(scope["path"][:LONGEST_PATH], safe="/:@!$&'()*+;=~", errors="replace"),
        "status": status or "gone",
        "error": None if refusal is None else _reason(refusal),
    }


def _counts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token counts and times of a model call; none if no call was made."""
    if "usage" not in state:
        return {}
    usage, call = state["usage"](), state["call"]
    drafted = sum(request.drafted for request in call.requests)
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "drafted_tokens": drafted,
        "accepted_tokens": sum(request.accepted for request in call.requests),
        "first_token_seconds": None if call.first_token is None else round(call.first_token, 6),
        "finished": not call.broken_off,
    }


def _text_of(fields: Mapping[str, Any]) -> str:
    line = f"{fields['client']} {fields['method']} {fields['path']} {fields['status']}"
    if "prompt_tokens" in fields:
        line += f", {fields['prompt_tokens']:,} + {fields['completion_tokens']:,} tokens"
        line += f", {fields['cached_tokens']:,} cached" if fields["cached_tokens"] else ""
        if fields["drafted_tokens"]:
            line += f", {fields['accepted_tokens']:,} of {fields['drafted_tokens']:,} drafts accepted"
        first = fields["first_token_seconds"]
        line += "" if first is None else f", first token after {first:.2f} s"
        line += "" if fields["finished"] else ", not finished"
    line += f", {fields['error']}" if fields["error"] is not None else ""
    line += f", {fields['seconds']:.2f} s"
    line += f", key {fields['key']}" if fields["key"] else ""
    return f"{line}, id {fields['request_id']}"


def _client(scope: Scope) -> str:
    """Return the client's address. A proxy may send any text as one."""
    client = scope.get("client")
    host = client[0] if client else ""
    try:
        return host if host == UNIX_CLIENT else str(ip_address(host))
    except ValueError:
        return "-"


def _reason(refusal: Refusal) -> str:
    """Return the name of the refused field, or the reason of the refusal if it is not about a field.

    The message about a field is not logged: it may contain the field's value.
    """
    if refusal.param is None:
        return brief_line(refusal.message, line=LONGEST_REASON)
    return (
        refusal.param if FIELD.fullmatch(refusal.param) else json.dumps(brief_line(refusal.param, line=LONGEST_REASON))
    )


def _printable(text: str) -> str:
    return quote(text, safe="")
