"""The built-in chat page at `/`, and its Content-Security-Policy. Does not import torch."""

import base64
import hashlib
import re
from pathlib import Path

# URL of Temml (MIT license), which converts LaTeX to MathML; the page loads it for the first formula
MATH_PATH = "/math.js"
_MATH_DIGEST = b"MATH_DIGEST"  # placeholder in the page's script for the library's digest


def page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy, which allows only its own style and scripts, and this server."""
    math = _digest(math_library())
    body = Path(__file__).with_name("page.html").read_bytes().replace(_MATH_DIGEST, math.encode())
    policy = {
        "default-src": "'none'",
        "style-src": _hash_of(body, "style"),
        "script-src": f"{_hash_of(body, 'script')} '{math}'",
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return body, "; ".join(f"{name} {sources}" for name, sources in policy.items())


def math_library() -> bytes:
    """Return the script that is served at `MATH_PATH`."""
    return Path(__file__).with_name("temml.min.js").read_bytes()


def _hash_of(body: bytes, tag: str) -> str:
    """Return the digest of the page's only `<tag>` element, in the syntax of a policy."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return f"'{_digest(content)}'"


def _digest(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
