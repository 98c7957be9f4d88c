"""Reading of request bodies, with limits on size, time and complexity."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from dsv4cli.engine.server.accounts import Account
from dsv4cli.engine.server.refusals import PromptTooLong, Refusal
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.inputs import BYTE_ORDER_MARK, parse_json
from dsv4cli.errors import UsageError

# bytes: a million tokens of text are 4 to 6 MB
MOST_BODY = 32 << 20
# bytes of a body in addition to its prompts: schemas, other fields, JSON escapes
BESIDE_PROMPTS = 1 << 20
# how long a body may take to arrive
READ_SECONDS = 60
# bytes; larger bodies are parsed and encoded in a thread, to not block other answers: encoding takes up to 3 us
# per byte
LARGE_BODY = 8 << 10
# bytes; `Service.reading` limits how many larger bodies are processed at once
LONG_BODY = 256 << 10
# Parsing JSON holds Python's GIL: up to 0.1 us per value, 0.5 us and 230 bytes per object or list. The limits allow a
# prompt of a million token ids.
MOST_VALUES, MOST_CONTAINERS = (1 << 20) + (1 << 16), 1 << 18
# a string of a JSON document, or what is between two strings
JSON_SPAN = re.compile(rb'[^"]+|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
T = TypeVar("T")


def service_of(http: Request) -> Service:
    """Return the state that all routes share."""
    service: Service = http.state.service
    return service


def account_of(http: Request) -> Account:
    """Return the account of the request's API key."""
    account: Account = http.state.account
    return account


async def read_body(
    http: Request, read: Callable[[dict[str, Any], Service], T], prompts: int = 1, references: Sequence[bytes] = ()
) -> T:
    """Return the result of `read` for the JSON object in a request's body.

    Args:
        prompts: maximum number of prompts that the body may contain.
        references: texts in a body that may refer to stored conversations. It is processed like a long body then.

    Raises:
        Refusal: the body is not a JSON object, is too large, or does not arrive in time.
    """
    if http.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise Refusal(415, "compressed bodies are not supported: send it uncompressed")
    service = service_of(http)
    try:
        async with asyncio.timeout(READ_SECONDS):
            content = await _read(http, service, prompts)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {READ_SECONDS} s") from None
    refers = any(one in content for one in references)
    size, given = max(len(content), LONG_BODY if refers else 0), [content]
    del content  # so that its memory can be freed before the prompt is encoded

    def work() -> T:
        return read(_object(given.pop()), service)

    if size < LARGE_BODY:
        return work()
    if size < LONG_BODY:
        return await asyncio.to_thread(work)
    async with service.reading:
        return await asyncio.to_thread(work)


def _object(content: bytearray) -> dict[str, Any]:
    """Parse the JSON object in a body. Raises `Refusal` if it is not one."""
    _check_values(content)
    try:
        text = content.decode().removeprefix(BYTE_ORDER_MARK)
        del content
        value = parse_json(text, "")
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 at byte {error.start:,}") from None
    except UsageError as error:
        raise Refusal(400, f"the body is {error.message}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    return value


def _check_values(content: bytearray) -> None:
    """Raise `Refusal` if a document has so many values (MOST_VALUES) that parsing would block other requests."""
    if content.count(b",") <= MOST_VALUES and content.count(b"[") + content.count(b"{") <= MOST_CONTAINERS:
        return
    values = containers = 0
    for span in JSON_SPAN.finditer(content):
        if content[span.start()] != ord('"'):
            values += content.count(b",", *span.span())
            containers += content.count(b"[", *span.span()) + content.count(b"{", *span.span())
        if values > MOST_VALUES or containers > MOST_CONTAINERS:
            raise Refusal(
                413, f"the body has more than {MOST_VALUES:,} values, or {MOST_CONTAINERS:,} objects and lists"
            )


async def _read(http: Request, service: Service, prompts: int) -> bytearray:
    """Return the body, if it is no larger than `prompts` prompts of the longest context can be.

    Raises:
        Refusal: it is larger.
    """
    said = http.headers.get("content-length", "0")
    content, size = bytearray(), 0
    too_large = Refusal(413, f"the body has more than {MOST_BODY:,} bytes")
    if said.isdigit() and int(said) > MOST_BODY:
        raise too_large
    most = BESIDE_PROMPTS + prompts * service.most_prompt_bytes
    async for part in http.stream():
        size += len(part)
        if size > MOST_BODY:
            raise too_large
        if size <= most:
            content += part
        else:
            content.clear()  # keep reading: a client that is still sending does not see the refusal
    if size > most:
        # a prompt of `context` tokens has fewer bytes
        raise PromptTooLong(service.context, service.context, counted=False)
    return content
