"""Access checks: API keys, and the origin of a request. Does not import torch."""

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from dsv4cli.engine.server.accounts import ANYONE, Account, Accounts
from dsv4cli.engine.server.page import MATH_PATH
from dsv4cli.engine.server.refusals import Refusal

# paths that need no key: the page prompts for one, and health monitors have none
OPEN_PATHS = ("/", MATH_PATH, "/health")


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
        accounts: the API keys that it accepts.
        host: the address that the server listens on; None for a Unix socket.
        hosts: names of the server that requests may use in the Host header, besides those of this machine. `*` allows
            any name, `*.NAME` those below a name. If there are none, a server on a loopback address accepts only
            loopback names, and others accept any name.
        origins: origins of pages that may use the server from a browser; `*` for all.
    """

    accounts: Accounts
    host: str | None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def check(self, path: str, headers: Headers) -> Account:
        """Check a request's origin and API key, and return its account. Raises `Refusal` if it is not allowed."""
        self._check_origin(headers)
        if not self.accounts.required or path in OPEN_PATHS:
            return ANYONE
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        account = self.accounts.find(given.encode("latin-1"))
        if account is None:
            raise Refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key")
        return account

    def _check_origin(self, headers: Headers) -> None:
        """Reject requests that a page of another site makes through a user's browser.

        The page may use its own origin, or a name of its own that resolves to this machine (DNS rebinding).
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._knows(_split(f"//{host}").hostname or ""):
            raise Refusal(
                403,
                "the Host header is not a name of this server: use localhost in the URL, or allow the host with "
                "--allow-host, for example behind a reverse proxy",
            )
        if origin is not None and _split(origin).netloc != host and not {origin, "*"} & {*self.origins}:
            raise Refusal(403, "cross-origin requests are not allowed: allow the page's origin with --allow-origin")

    def _knows(self, name: str) -> bool:
        """Return whether requests may use this name of the server."""
        own = self.host is not None and (is_loopback(self.host) or bool(self.hosts))
        if is_loopback(name) or not (own or self.hosts) or name == self.host:
            return True
        return any(host in ("*", name) or (host[:2] == "*." and name.endswith(host[1:])) for host in self.hosts)


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; all are empty if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
