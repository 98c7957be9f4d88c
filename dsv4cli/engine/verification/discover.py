"""Finds out what a server offers: its model, its APIs, its vocabulary and the release of its prompts. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4cli.engine.config.presets import ASSUMED_RELEASE, RELEASES, Release
from dsv4cli.engine.text.prompt import EFFORTS
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.verification.calls import MESSAGES, MODELS, RESPONSES, TOKENIZE, ApiCall, ServerReply
from dsv4cli.engine.verification.chat_answer import ChatAnswer, UnreadableReply, read_chat
from dsv4cli.engine.verification.check import Problem
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.vocabularies import known_tokenizers, open_tokenizer
from dsv4cli.errors import ServerError, UsageError

Send = Callable[[ApiCall], ServerReply]
# two vocabularies hardly ever encode this to the same number of tokens
PROBE = (
    "Please answer briefly: what is 17 + 25, and what is the capital of France? 你好，世界! Ærø, naïveté, "
    "antidisestablishmentarianism, x² + y² = z², def f(n): return n - 1"
)
# a template that differs in its special tokens changes the count by at most this many tokens
TEMPLATE_TOKENS = 3
# statuses of a path that does not exist; 0 is no response
ABSENT = (0, 404, 405, 501)
# attributes of `CheckedServer` that are unknown if one of these requests has no answer in time
PROBES: Mapping[str, Sequence[str]] = {
    "limit": ("target/models",),
    "logprobs": ("target/logprobs",),
    "echo": ("target/echo",),
    "completions": ("target/completions",),
    "tokenizer": ("target/tokenize", "target/echo", "target/completions"),
    "messages": ("target/messages",),
    "responses": ("target/responses",),
    "release": ("target/off", "target/effort"),
}
SLOW_REMEDY = "run again with a longer --timeout"
KEY_REMEDY = "write the key to a file, and pass it with --api-key-file"


@dataclass(frozen=True)
class ServerHints:
    """What the user says about the server: model, release and tokenizer; None for what must be discovered."""

    model: str | None = None
    release: Release | None = None
    tokenizer: str | None = None


def discover(url: str, send: Send, given: ServerHints) -> CheckedServer:
    """Return what the server offers.

    Raises:
        ServerError: it cannot be reached, or does not have OpenAI's chat API.
        UsageError: it does not have the model, or the tokenizer does not exist.
    """
    probes = _Probes(send)
    server = _discovered(url, probes, given)
    return replace(server, unknown=probes.unknown(server))


class _Probes:
    """Sends the requests that find out what the server offers, and collects those without an answer in time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._late: dict[str, Problem] = {}

    def __call__(self, call: ApiCall) -> ServerReply:
        reply = self._send(call)
        if reply.late:
            what = "the server did not answer a request that finds out what it offers"
            self._late[call.key] = Problem(what, [f"{call.key}: {reply.summary}"], call, wrong=False, late=True)
        return reply

    def unknown(self, server: CheckedServer) -> Mapping[str, Problem]:
        """Return the attributes of the server that could not be found out, with the reason."""
        missing = {offer: [self._late[key] for key in keys if key in self._late] for offer, keys in PROBES.items()}
        # without its requests, the release is a guess; everything else that was found in another way is known
        return {
            offer: late[0]
            for offer, late in missing.items()
            if late and (offer == "release" or not getattr(server, offer))
        }


def _discovered(url: str, send: Send, given: ServerHints) -> CheckedServer:
    name, limit = _model(url, send(ApiCall("target/models", MODELS, None, "GET")), given.model)
    tokenizer = None if given.tokenizer is None else open_tokenizer(given.tokenizer)
    server = CheckedServer(url, name, limit, given.release or ASSUMED_RELEASE)
    scored = _read(send(replace(server, logprobs=True).chat("target/logprobs", PROBE, most=4, logprobs=True)))
    answer = scored or _first(url, send(server.chat("target/chat", PROBE, most=4)))
    server, raw = _with_apis(server, send)
    server = replace(server, logprobs=scored is not None and bool(scored.tokens))
    if tokenizer is None:
        where, tokenizer = _matching(server, answer, raw)
    else:
        where = given.tokenizer or ""
    server = replace(server, tokenizer=tokenizer, vocabulary=where)
    if given.release is not None:
        return replace(server, release_found="given")
    return _with_release(server, send)


def _model(url: str, reply: ServerReply, wanted: str | None) -> tuple[str, int | None]:
    """Return the name of the model, and its context length if the server announces it."""
    listed = (reply.document or {}).get("data") if reply.status == 200 else None
    models = [one for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)] if listed else []
    if reply.status in (401, 403):
        raise ServerError(f"{url}: the API key is missing or wrong", KEY_REMEDY)
    if not models and wanted is None:
        remedy = SLOW_REMEDY if reply.late else "correct the URL"
        raise ServerError(f"{url} lists no models: {reply.summary}", f"{remedy}, or name the model with --model")
    if wanted is not None and models and wanted not in [one["id"] for one in models]:
        names = ", ".join(one["id"] for one in models)
        raise UsageError(f"{url} has no model {wanted!r}", f"use one of {names}")
    found = next((one for one in models if one["id"] == wanted), models[0] if models else {"id": wanted})
    meta = found.get("meta")
    announced = found.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None  # llama.cpp: meta
    limit = next((one for one in announced if type(one) is int and one > 0), None)
    return str(found["id"]), limit


def _read(reply: ServerReply) -> ChatAnswer | None:
    try:
        return read_chat(reply, streamed=False)
    except UnreadableReply:
        return None


def _first(url: str, reply: ServerReply) -> ChatAnswer:
    """Return the first answer. Raises ServerError: without it, nothing can be verified."""
    if reply.status in (401, 403):
        raise ServerError(f"{url}: the API key is missing or wrong", KEY_REMEDY)
    try:
        return read_chat(reply, streamed=False)
    except UnreadableReply as error:
        remedy = SLOW_REMEDY if reply.late else "use the URL of a server with OpenAI's chat API"
        raise ServerError(f"{url} cannot answer a chat request: {error}", remedy) from None


def _with_apis(server: CheckedServer, send: Send) -> tuple[CheckedServer, int | None]:
    """Return the server with its other APIs, and the number of tokens of the probe's text if the server reports it."""
    scored = send(server.raw("target/echo", PROBE, 1, echo=True, logprobs=1))
    raw = scored if scored.status == 200 else send(server.raw("target/completions", PROBE, 1))
    body = {"model": server.model, "prompt": PROBE, "add_special_tokens": False}
    counted = send(ApiCall("target/tokenize", TOKENIZE, body))
    usage = (raw.document or {}).get("usage") if raw.status == 200 else None
    count = (counted.document or {}).get("count") if counted.status == 200 else None
    found = replace(
        server,
        echo=scored.status == 200 and _scores(scored),
        completions=raw.status == 200,
        tokenize=type(count) is int,
        messages=send(ApiCall("target/messages", MESSAGES, {})).status not in ABSENT,
        responses=send(ApiCall("target/responses", RESPONSES, {})).status not in ABSENT,
    )
    count = usage.get("prompt_tokens") if count is None and isinstance(usage, dict) else count
    return found, count if type(count) is int else None


def _scores(reply: ServerReply) -> bool:
    try:
        listed = (reply.document or {})["choices"][0]["logprobs"]["token_logprobs"]
    except (TypeError, LookupError):
        return False
    return isinstance(listed, list) and len(listed) > 8 and all(type(one) is float for one in listed[1:9])


def _matching(server: CheckedServer, answer: ChatAnswer, raw: int | None) -> tuple[str, Tokenizer | None]:
    """Return the name and tokenizer of the vocabulary with the token counts of the server; None if there is none."""
    known = list(known_tokenizers(server.model))
    for name, tokenizer in known:
        if raw is not None and len(tokenizer.encode(PROBE)) in (raw, raw - 1):  # - 1: a BOS token was added
            return name, tokenizer
    count = answer.count("prompt_tokens")
    for name, tokenizer in known:
        whole = len(tokenizer.encode(server.prompt([{"role": "user", "content": PROBE}], (), "off")))
        if count is not None and abs(whole - count) <= TEMPLATE_TOKENS:
            return name, tokenizer
    return "", None


def _with_release(server: CheckedServer, send: Send) -> CheckedServer:
    """Return the server with its release: by the length of its effort instructions, otherwise by the model's name."""
    fits = list(_fitting(server, send)) if server.tokenizer is not None else []
    if len(fits) == 1:
        return replace(server, release=fits[0], release_found="found by the length of its prompts")
    by_name: Release = "0731" if "0731" in server.model else ASSUMED_RELEASE
    found = "taken from the model's name" if by_name != ASSUMED_RELEASE else "assumed"
    return replace(server, release=by_name, release_found=found)


def _fitting(server: CheckedServer, send: Send) -> Iterator[Release]:
    base = _read(send(server.chat("target/off", PROBE, most=1)))
    reply = _read(send(server.chat("target/effort", PROBE, level="max", most=1)))
    if reply is None or base is None:
        return
    question = [{"role": "user", "content": PROBE}]
    more = (reply.count("prompt_tokens") or 0) - (base.count("prompt_tokens") or 0)
    for release in RELEASES:
        one = replace(server, release=release)
        assert "max" in EFFORTS[release]
        if one.estimate(question, (), "max") - one.estimate(question, (), "off") == more:
            yield release
