"""Checks that invalid requests are refused: status 4xx with a message, never 5xx, never a hang. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsv4cli.engine.verification.calls import CHAT, ApiCall
from dsv4cli.engine.verification.check import Check, CheckStep, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.replies import readable, unreadable

# seconds within which a refusal must arrive: of a short request, and of one with the longest prompt
PATIENCE, LONG_PATIENCE = 30.0, 600.0
# a server that is slow for other reasons has this multiple of the time of its slowest response, if that is more
SLOWNESS = 2.0
REASON = "Clients retry on 5xx, wait on a hang, and trust an answer, so a wrong request must be refused."
MEANING = "A client's mistake looks like a failure of the server, which retries make worse, or stays unnoticed."
# a prompt longer than the limit that servers of this model announce at most, in characters of one token or more
LONGEST_LIMIT = 1 << 20
QUICK = ("limits.malformed", "limits.fields", "limits.too-long")
# invalid bodies that are not JSON objects
MALFORMED: Mapping[str, bytes] = {
    "cut": b'{"messages": [{"role": "user", "content": "hi"',
    "empty": b"",
    "list": b"[1, 2, 3]",
    "not-utf-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "deep": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "text": b"hello",
}
# fields with values that no server can obey
_HI = [{"role": "user", "content": "hi"}]
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "role": {"messages": [{"role": "wizard", "content": "hi"}]},
    "temperature": {"temperature": "hot"},
    "messages": {"messages": "hi"},
    "no-messages": {"messages": []},
    "content": {"messages": [{"role": "user", "content": 5}]},
    "max-tokens": {"max_tokens": -1},
    "tools": {"tools": "get_weather"},
    "negative": {"temperature": -1},
    "tool-choice": {"tools": [], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
    "top-p": {"top_p": 7},
    "logprobs": {"logprobs": True, "top_logprobs": 100000},
    "stop": {"stop": {"text": "."}},
}
# fields that servers may accept: they are ignored, or clipped to the range
LENIENT = frozenset({"negative", "top-p", "logprobs", "role", "tool-choice", "no-messages", "max-tokens"})


def limit_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks of invalid requests."""
    few = 2 if quick else None
    base = {"model": server.model, "messages": _HI, "max_tokens": 4, "temperature": 0}
    malformed = [_call(f"limits.malformed/{name}", body) for name, body in [*MALFORMED.items()][: 1 if quick else None]]
    fields = [_call(f"limits.fields/{name}", {**base, **body}) for name, body in [*FIELDS.items()][:few]]
    unknown = [
        ApiCall("limits.unknown/model", "/v1/models/no-such-model", None, "GET", seconds=PATIENCE),
        ApiCall("limits.unknown/path", "/v1/no-such-path", base, seconds=PATIENCE),
        _call("limits.unknown/chat", base | {"model": "no-such-model"}),
    ]
    found = [
        _refused("malformed", malformed),
        _refused("fields", fields, lenient=frozenset(f"limits.fields/{name}" for name in LENIENT)),
        _too_long(server, base),
        _refused("unknown", unknown, lenient=frozenset({"limits.unknown/chat"})),
        _alive(server),
    ]
    return [check for check in found if not quick or check.name in QUICK]


def _call(key: str, body: Mapping[str, Any] | bytes) -> ApiCall:
    return ApiCall(key, CHAT, body, seconds=PATIENCE)


def _refused(name: str, calls: Sequence[ApiCall], lenient: frozenset[str] = frozenset()) -> Check:
    def judge(replies: Replies) -> Iterator[Problem]:
        for call in calls:
            yield from judge_refusal(call, replies, lenient=call.key in lenient)

    return Check(f"limits.{name}", REASON, MEANING, [_patient(calls)], judge)


def _patient(calls: Sequence[ApiCall]) -> CheckStep:
    """Return a step that waits longer for refusals if the server has been slow before."""

    def plan(replies: Replies) -> list[ApiCall]:
        slowest = max((reply.seconds for reply in replies.values() if not reply.failure), default=0.0)
        return [replace(call, seconds=max(call.seconds or 0.0, SLOWNESS * slowest)) for call in calls]

    return CheckStep(plan)


def judge_refusal(call: ApiCall, replies: Replies, *, lenient: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with the refusal of an invalid request.

    Args:
        lenient: whether a server that accepts the request gets a remark instead of an error.
    """
    reply, name = replies[call.key], call.key.partition("/")[2]
    if reply.failure == "no answer":
        yield Problem(f"no response to an invalid request ({name}) within {reply.seconds:.0f} s", [], call)
    elif reply.late:
        yield Problem(f"an invalid request ({name}) is not checked", [reply.summary], call)
    elif reply.failure or not reply.complete:
        yield Problem(f"the connection is closed instead of a refusal ({name})", [reply.summary], call)
    elif reply.status >= 500:
        yield Problem(f"an invalid request ({name}) has status {reply.status}", [reply.text[:200]], call)
    elif reply.status < 400:
        yield Problem(f"an invalid request ({name}) is accepted", [reply.summary], call, wrong=not lenient)
    elif not reply.text.strip():
        yield Problem(f"the refusal of an invalid request ({name}) has no body", [f"status {reply.status}"], call)


def _too_long(server: CheckedServer, base: Mapping[str, Any]) -> Check:
    # "a " is at most two tokens in every vocabulary, and at least one
    text = "a " * ((server.limit or LONGEST_LIMIT) + 64)
    body = {**base, "messages": [{"role": "user", "content": text}]}
    call = ApiCall("limits.too-long/prompt", CHAT, body, seconds=LONG_PATIENCE)

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from judge_refusal(call, replies)

    return Check(
        "limits.too-long",
        "A prompt beyond the limit must be refused. Servers that cut it silently answer another question.",
        "Long conversations lose their beginning without an error.",
        [_patient([call])],
        judge,
    )


def _alive(server: CheckedServer) -> Check:
    call = server.chat("limits.alive/chat", "What is 17 + 25?", most=16)

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable([call], replies)
        for _, answer in readable([call], replies):
            if not (answer.content or answer.reasoning):
                yield Problem("after invalid requests, the server no longer answers", [repr(answer.content)], call)

    return Check(
        "limits.alive",
        "An invalid request may stop the engine behind the HTTP server.",
        "One client can end the service for all.",
        [fixed([call])],
        judge,
    )
