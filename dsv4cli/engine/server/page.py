"""The page at `/`, and what it may do; no torch."""

import base64
import hashlib
import re
from pathlib import Path


def page() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: its own style and script, this server, and nothing else."""
    body = Path(__file__).with_name("page.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "style-src": _hash_of(body, "style"),
        "script-src": _hash_of(body, "script"),
        "connect-src": "'self'",
        "img-src": "data:",  # its icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return body, "; ".join(f"{name} {sources}" for name, sources in policy.items())


def _hash_of(body: bytes, tag: str) -> str:
    """The one element of this tag, as a policy names it."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
