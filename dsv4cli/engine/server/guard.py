"""Access checks: API keys, and the origin of a request. Does not import torch."""

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

# paths that need no key: the page prompts for one, and health monitors have none
OPEN_PATHS = ("/", MATH_PATH, "/health")
SHORTEST_KEY = 8


def read_keys(file: Path) -> tuple[bytes, ...]:
    """Read API keys from a file, one per line.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, has no keys, or has an invalid one.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", "use a readable file with one key per line"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8", "use a file with one key per line") from None
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for number, key in keys:
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            what = f"line {number} of {file} is not a key: it needs {SHORTEST_KEY} or more ASCII characters, no spaces"
            raise UsageError(what, "create one: openssl rand -hex 24")
    if not keys:
        raise UsageError(f"{file} contains no keys", f"create one: openssl rand -hex 24 > {file}")
    return tuple(key.encode() for _, key in keys)


def is_loopback(host: str) -> bool:
    """Return True if an address is reachable only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Guard:
    """The access rules of a server.

    Attributes:
        keys: a request needs one of these API keys; if empty, no key is needed.
        host: the address that the server listens on.
    """

    keys: Sequence[bytes]
    host: str

    def check(self, path: str, headers: Headers) -> None:
        """Check a request's origin and API key. Raises `Refusal` if it is not allowed."""
        self._check_origin(headers)
        if not self.keys or path in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")
        # every key is compared, so that the time reveals nothing about them
        if not sum(hmac.compare_digest(given, key) for key in self.keys):
            raise Refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key")

    def _check_origin(self, headers: Headers) -> None:
        """Reject requests that a page of another site makes through a user's browser.

        The page may use its own origin, or a name of its own that resolves to this machine (DNS rebinding).
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if is_loopback(self.host) and not is_loopback(_split(f"//{host}").hostname or ""):
            raise Refusal(403, "this server accepts requests from this machine only: use localhost in the URL")
        if origin is not None and _split(origin).netloc != host:
            raise Refusal(403, "cross-origin requests are not allowed")


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; all are empty if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
