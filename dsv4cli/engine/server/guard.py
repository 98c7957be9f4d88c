"""Who may ask: API keys, and where a request comes from; no torch."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from dsv4cli.engine.server.page import MATH_PATH
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.errors import UsageError

# what answers without a key: the page asks for it, and a monitor needs none
OPEN_PATHS = ("/", MATH_PATH, "/health")
SHORTEST_KEY = 8


def read_keys(file: Path) -> tuple[bytes, ...]:
    """The keys in a file, one a line. Raises UsageError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "give a readable file with a key a line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8", "give a file with a key a line") from None
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for number, key in keys:
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            what = f"line {number} of {file} is no key: it needs {SHORTEST_KEY} characters of ASCII or more, no spaces"
            raise UsageError(what, "make one: openssl rand -hex 24")
    if not keys:
        raise UsageError(f"{file} has no key", f"make one: openssl rand -hex 24 > {file}")
    return tuple(key.encode() for _, key in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Guard:
    """keys: of which one is needed; none where there are none. host: what the server listens on."""

    keys: Sequence[bytes]
    host: str

    def check(self, path: str, headers: Headers) -> None:
        """Raises `Refusal` for a request that is not to be carried out."""
        self._check_origin(headers)
        if not self.keys or path in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")
        # each is compared: how long that takes says nothing about them
        if not sum(hmac.compare_digest(given, key) for key in self.keys):
            raise Refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key")

    def _check_origin(self, headers: Headers) -> None:
        """A page of another site must not ask through somebody's browser, under its own name or under one that it has
        had resolved to this machine."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if is_loopback(self.host) and not is_loopback(_split(f"//{host}").hostname or ""):
            raise Refusal(403, "this server answers this machine only: ask it as localhost")
        if origin is not None and _split(origin).netloc != host:
            raise Refusal(403, "pages of other sites cannot ask this server")


def _split(url: str) -> SplitResult:
    """The parts of an address, none of one that is damaged."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
