"""Options of `serve` that say who can reach it, and from where: addresses, proxies, browsers, keys."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.errors import UsageError

if TYPE_CHECKING:
    import socket

    from dsv4cli.engine.server.guard import Guard

HOST_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")

ApiKeyFileOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of API keys; clients must send one of them. One key per line, optionally with a name and limits per "
        "minute: KEY name=alice requests=60 tokens=100000. On SIGHUP, the server reads the file again.",
        rich_help_panel="Access",
    ),
]
ShareCacheOpt = Annotated[
    bool,
    typer.Option(
        "--share-cache",
        help="Share cached prefixes between API keys. By default, each key has its own, so that response times do not "
        "reveal what other clients have sent.",
    ),
]
AllowHostOpt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Host name to accept in the Host header, for example that of a reverse proxy; may be repeated. *.NAME "
        "accepts its subdomains, * any name.",
    ),
]
AllowOriginOpt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Origin of web pages that may use the server from a browser, such as https://app.example.com; may be "
        "repeated. * allows all pages.",
    ),
]
RootPathOpt = Annotated[
    str,
    typer.Option(metavar="PATH", help="Path prefix of the server behind a reverse proxy, for example /llm."),
]
UdsOpt = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Unix socket to listen on, instead of --host and --port.")
]


@dataclass(frozen=True)
class AccessOptions:
    """The options of the panel Access, as given."""

    api_key_file: ApiKeyFileOpt = None
    share_cache: ShareCacheOpt = False
    allow_host: AllowHostOpt = None
    allow_origin: AllowOriginOpt = None
    root_path: RootPathOpt = ""


@dataclass(frozen=True)
class Address:
    """Where to listen: a host and a port, or a Unix socket."""

    host: str
    port: int
    uds: Path | None = None

    @contextmanager
    def bound(self) -> "Iterator[socket.socket]":
        """Yield a socket that is bound to the address. Raises UsageError if it cannot be."""
        if self.uds is None:
            from dsv4cli.engine.server.http import bound_socket

            with bound_socket(self.host, self.port) as made:
                yield made
        else:
            from dsv4cli.engine.server.unix_socket import bound_unix_socket

            with bound_unix_socket(self.uds) as made:
                yield made


def address_of(context: Any, host: str, port: int, uds: Path | None) -> Address:
    """Return where to listen. Raises UsageError for options that contradict each other, or that do not exist."""
    _check_variables(context)
    for name in ("host", "port"):
        if uds is not None and context.get_parameter_source(name).name != "DEFAULT":
            raise UsageError(f"--uds cannot be used with --{name}", f"remove --uds or --{name}")
    return Address(host, port, uds)


def guard_of(address: Address, access: AccessOptions) -> "Guard":
    """Return the access rules. Raises UsageError if an option is invalid, or if the keys cannot be read."""
    from dsv4cli.engine.server.accounts import Accounts
    from dsv4cli.engine.server.api_keys import read_keys
    from dsv4cli.engine.server.guard import Guard

    check_root_path(access.root_path)
    hosts, origins = [host.lower() for host in access.allow_host or ()], access.allow_origin or ()
    for host in hosts:
        if not HOST_NAME.fullmatch(host):
            raise UsageError(f"--allow-host cannot be {host!r}", "write the name alone, without https:// and a port")
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            remedy = "write it as browsers do: https://app.example.com, without a path"
            raise UsageError(f"--allow-origin cannot be {origin!r}", remedy)
    keys = () if access.api_key_file is None else read_keys(access.api_key_file)
    own = address.host if address.uds is None else None
    return Guard(Accounts(keys, share_cache=access.share_cache), own, tuple(hosts), tuple(origins))


def check_root_path(path: str) -> None:
    """Raise UsageError if a root path is neither empty nor valid."""
    if path and not ROOT_PATH.fullmatch(path):
        raise UsageError(f"--root-path cannot be {path!r}", "write it as /llm, without a slash at the end")


def _check_variables(context: Any) -> None:
    """Raise UsageError if the environment sets an option that does not exist: it might have been meant to protect."""
    known = {param.envvar for param in context.command.params}
    unknown = sorted({*context.obj.serve_variables} - known)
    if unknown:
        raise UsageError(
            f"the environment variable {unknown[0]} matches no option of dsv4 serve", "see dsv4 serve --help"
        )
