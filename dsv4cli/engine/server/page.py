"""The page at `/`, and what it may do; no torch."""

import base64
import hashlib
import re
from pathlib import Path

# where the page finds Temml (MIT), which turns LaTeX into MathML; it is loaded with the first formula
MATH_PATH = "/math.js"
_MATH_DIGEST = b"MATH_DIGEST"  # stands in the page's script for that of the library


def page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy: its own style and scripts, this server, and nothing else."""
    math = _digest(math_library())
    body = Path(__file__).with_name("page.html").read_bytes().replace(_MATH_DIGEST, math.encode())
    policy = {
        "default-src": "'none'",
        "style-src": _hash_of(body, "style"),
        "script-src": f"{_hash_of(body, 'script')} '{math}'",
        "connect-src": "'self'",
        "img-src": "data:",  # its icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return body, "; ".join(f"{name} {sources}" for name, sources in policy.items())


def math_library() -> bytes:
    """Return the script at `MATH_PATH`."""
    return Path(__file__).with_name("temml.min.js").read_bytes()


def _hash_of(body: bytes, tag: str) -> str:
    """Return the digest of the one element of a tag, as a policy names it."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return f"'{_digest(content)}'"


def _digest(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
