"""What every request passes before its route, and its response after it: root path, CORS, request id; no torch."""

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Scope, Send

# methods of the routes
METHODS = ("GET", "HEAD", "POST", "DELETE")
# headers that scripts of other origins may read
EXPOSED = ("x-request-id", "request-id", "retry-after")
# addresses of reverse proxies on this machine, whose X-Forwarded-For is believed: loopback, also as IPv6 sockets report
# it, and Unix sockets
UNIX_CLIENT = "unix"
PROXIES = ("127.0.0.0/8", "::1", "::ffff:127.0.0.0/104", UNIX_CLIENT)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app with CORS for these origins: preflight requests are answered, and responses can be read."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=[*origins], allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED
    )


def without_root(path: str, root: str) -> str:
    """Return the path below a root path. Proxies may remove the root path or not; so a path without it stays."""
    below = path.removeprefix(root)
    return below if root and path.startswith(root) and below[:1] in ("", "/") else path


def noting(scope: Scope, send: Send) -> Send:
    """Return `send` with the request id in the response, for clients of both APIs; it notes the status code."""
    state = scope["state"]

    async def noting_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            state["status"] = message["status"]
            headers = MutableHeaders(scope=message)
            for name in ("x-request-id", "request-id"):
                headers[name] = state["request_id"]
        await send(message)

    return noting_send
