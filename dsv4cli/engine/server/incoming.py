"""The body of a request, read within its bounds and in time."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.inputs import BYTE_ORDER_MARK, parse_json
from dsv4cli.errors import UsageError

# bytes: a million tokens of text are 4 to 6 MB
MOST_BODY = 32 << 20
# how long a body may take to come
READ_SECONDS = 60
# one of more bytes is read and encoded in a thread, while other answers go on
LARGE_BODY = 64 << 10
T = TypeVar("T")


def service_of(http: Request) -> Service:
    """What the routes share."""
    service: Service = http.state.service
    return service


async def asked_of(http: Request, read: Callable[[dict[str, Any], Service], T]) -> T:
    """What `read` makes of the JSON object in a body. Raises `Refusal` for what is none, too large or too slow."""
    if http.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise Refusal(415, "the body is compressed: send it as it is")
    try:
        async with asyncio.timeout(READ_SECONDS):
            content = await _read(http)
    except TimeoutError:
        raise Refusal(408, f"the body did not come in {READ_SECONDS} s") from None
    service = service_of(http)
    if len(content) < LARGE_BODY:
        return read(_object(content), service)
    return await asyncio.to_thread(lambda: read(_object(content), service))


def _object(content: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `Refusal`."""
    try:
        value = parse_json(content.decode().removeprefix(BYTE_ORDER_MARK), "")
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 at byte {error.start:,}") from None
    except UsageError as error:
        raise Refusal(400, f"the body is {error.message}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    return value


async def _read(http: Request) -> bytes:
    said = http.headers.get("content-length", "0")
    content = bytearray()
    too_large = Refusal(413, f"the body has more than {MOST_BODY:,} bytes")
    if said.isdigit() and int(said) > MOST_BODY:
        raise too_large
    async for part in http.stream():
        content += part
        if len(content) > MOST_BODY:
            raise too_large
    return bytes(content)
