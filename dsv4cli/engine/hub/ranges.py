"""Ranges of bytes of files on the hub."""

from typing import Any

from huggingface_hub import get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined] # public too

from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.files import LIBRARY, RemoteFile
from dsv4cli.engine.hub.retry import BadConnection


def fetch_range(context: DownloadContext, file: RemoteFile, begin: int, end: int) -> bytes:
    """Fetch the bytes [begin, end) of a file on the hub."""

    def request() -> bytes:
        headers = build_hf_headers(**LIBRARY) | {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        options: dict[str, Any] = {"headers": headers, "timeout": context.timeout, "follow_redirects": True}
        with get_session().stream("GET", context.url(file), **options) as response:
            hf_raise_for_status(response)
            skip = 0 if response.headers.get("Content-Range", "").startswith(f"bytes {begin}-") else begin
            got = bytearray()
            for piece in response.iter_bytes():
                got += piece
                if len(got) >= skip + end - begin:
                    return bytes(got[skip : skip + end - begin])
        raise BadConnection(f"{file.name} ended after {len(got)} bytes", response.url)

    return context.listing.retrier(context.policy, context.stop).call(request) if end > begin else b""
