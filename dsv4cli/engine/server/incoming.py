"""The body of a request, read within its bounds and in time."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.inputs import BYTE_ORDER_MARK, parse_json
from dsv4cli.errors import UsageError

# bytes: a million tokens of text are 4 to 6 MB
MOST_BODY = 32 << 20
# bytes of a body beside its prompts: schemas, other fields, escapes of JSON
BESIDE_PROMPTS = 1 << 20
# how long a body may take to come
READ_SECONDS = 60
# a body of this many bytes or more is read and encoded in a thread, while other answers go on: encoding takes up to
# 3 us a byte
LARGE_BODY = 8 << 10
# of those with this many bytes or more, as many at once as `Service.reading` allows
LONG_BODY = 256 << 10
# Python's lock is held while JSON is read: values take up to 0.1 us each, objects and lists 0.5 us and 230 bytes.
# A prompt may be a million token ids.
MOST_VALUES, MOST_CONTAINERS = (1 << 20) + (1 << 16), 1 << 18
# what stands between the texts of a JSON document, or a text
JSON_SPAN = re.compile(rb'[^"]+|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
T = TypeVar("T")


def service_of(http: Request) -> Service:
    """What the routes share."""
    service: Service = http.state.service
    return service


async def read_body(http: Request, read: Callable[[dict[str, Any], Service], T], prompts: int = 1) -> T:
    """Return what `read` makes of the JSON object in a body.

    Args:
        prompts: The most prompts that it may have.

    Raises:
        Refusal: It is none, too large or too slow.
    """
    if http.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise Refusal(415, "the body is compressed: send it as it is")
    service = service_of(http)
    try:
        async with asyncio.timeout(READ_SECONDS):
            content = await _read(http, service, prompts)
    except TimeoutError:
        raise Refusal(408, f"the body did not come in {READ_SECONDS} s") from None
    size, given = len(content), [content]
    del content  # its memory is given back before the prompt is encoded

    def work() -> T:
        return read(_object(given.pop()), service)

    if size < LARGE_BODY:
        return work()
    if size < LONG_BODY:
        return await asyncio.to_thread(work)
    async with service.reading:
        return await asyncio.to_thread(work)


def _object(content: bytearray) -> dict[str, Any]:
    """Return the JSON object in a body. Raises `Refusal`."""
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
    """Raise `Refusal` for a document of so many values that reading it would stop everything else."""
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
    """Return a body that `prompts` prompts of this context may have."""
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
            content.clear()  # the rest is read nevertheless: a client that sends does not see a refusal
    if size > most:
        reason = f"the body has {size:,} bytes, more than a prompt of {service.context:,} tokens has: leave out"
        raise Refusal(400, f"{reason} earlier messages", code="context_length_exceeded")
    return content
