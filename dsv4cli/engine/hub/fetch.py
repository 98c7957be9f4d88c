"""Download of one file, verified byte for byte against the hub's listing."""

import os
import time
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import get_session
from huggingface_hub.utils import (  # type: ignore[attr-defined] # public, but not marked so
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
)

from dsv4cli.engine.hub import xet
from dsv4cli.engine.hub.cached import ONLINE
from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.files import LIBRARY, READ_SIZE, Digest, RemoteFile
from dsv4cli.engine.hub.retry import HTTP_ERROR, BadConnection, DownloadStopped, is_local
from dsv4cli.errors import HubError

# maximum number of times that a corrupt download is repeated
REPAIRS = 2

# there: was here and is right. fetched: came. repaired: was here, or came, with wrong bytes and came again.
# broken: came with wrong bytes every time
Outcome = Literal["there", "fetched", "repaired", "broken"]


def settle(context: DownloadContext, file: RemoteFile) -> Outcome:
    """Verify an existing file against the size and hash of the listing, or download it.

    Raises:
        HubError: the hub does not serve the file, or is offline and the file is damaged.
        OSError: the disk cannot be written.
        UsageError: another file, which was not downloaded, has the name.
        DownloadStopped: the download was canceled.
    """
    found = context.destination.find(file)
    if found is not None and context.is_intact(found, file):
        context.destination.show(file)
        return "there"
    is_wrong = found is not None
    if is_wrong:
        context.destination.guard(file)
        if context.listing.cached:
            raise HubError(f"{found} is damaged: its hash differs, and huggingface_hub is offline", ONLINE)
    for _ in range(1 + REPAIRS):
        if _bring(context, file, is_wrong):
            return "repaired" if is_wrong else "fetched"
        is_wrong = True
    return "broken"


def _bring(context: DownloadContext, file: RemoteFile, damaged: bool) -> bool:
    """Download the file once and return whether its bytes are right. damaged: the existing file is damaged."""
    part, lock = context.destination.part(file), context.destination.lock(file)
    for path in (part, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not _is_begun(part):
            xet.adopt(context.destination, file)
        found = context.destination.find(file)
        if found is not None and not damaged and context.is_intact(found, file):
            context.destination.show(file)  # another process was faster
            return True
        if not _is_begun(part) and xet.fetch(context, file, damaged):
            found = context.destination.find(file)
            return found is not None and context.is_intact(found, file)
        with _Part(part, context, file) as content:
            _gather(context, file, content, None if damaged else context.destination.copy_of(file))
            is_right = content.is_right()
        if is_right:
            context.destination.put(file)
        else:
            part.unlink()
    return is_right


def _is_begun(part: Path) -> bool:
    return part.is_file() and part.stat().st_size > 0


class _Part:
    """An unfinished file with a running hash; bytes from an earlier run are hashed first."""

    def __init__(self, path: Path, context: DownloadContext, file: RemoteFile) -> None:
        self.file = file
        self.context = context
        self.size = 0
        self.digest: Digest = file.digest()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)

    def __enter__(self) -> "_Part":
        while self.size <= self.file.size and (piece := os.read(self._handle, READ_SIZE)):
            self._count(piece)
        if self.size > self.file.size:
            self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def _count(self, piece: bytes) -> None:
        if self.context.stop.is_set():
            raise DownloadStopped
        self.digest.update(piece)
        self.size += len(piece)
        self.context.meter.at(self.file.name, min(self.size, self.file.size))

    def append(self, piece: bytes) -> None:
        """Append bytes, up to the size in the listing."""
        piece = piece[: self.file.size - self.size]
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        self._count(piece)

    def restart(self) -> None:
        """Discard all bytes."""
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.truncate(self._handle, 0)
        self.size = 0
        self.digest = self.file.digest()
        self.context.meter.at(self.file.name, 0)

    def is_right(self) -> bool:
        """Return whether the content is complete and has the listed hash; if so, it has been synced to the disk."""
        if self.size != self.file.size or self.digest.hexdigest() != self.file.etag:
            return False
        os.fsync(self._handle)
        return True


def _gather(context: DownloadContext, file: RemoteFile, part: _Part, copy: Path | None) -> None:
    """Fill the unfinished file from a local copy, or with as many requests as needed."""
    if copy is not None and part.size == 0 and copy.stat().st_size == file.size:
        with copy.open("rb", buffering=0) as stream:
            while piece := stream.read(READ_SIZE):
                part.append(piece)
        return
    retrier, furthest = context.listing.retrier(context.policy, context.stop), part.size
    while part.size < file.size:
        try:
            _request(context, file, part)
        except (HTTP_ERROR, OSError, BadConnection) as error:
            if is_local(error):
                raise
            # a server that ignores ranges and always cuts must not keep us for ever
            if part.size > furthest:
                furthest = part.size
                retrier.advanced()
            retrier.failed(error)


def _request(context: DownloadContext, file: RemoteFile, part: _Part) -> None:
    """Request the missing bytes and append them until the file is complete or the connection ends."""
    # compressed content would have other offsets
    headers = build_hf_headers(**LIBRARY) | {"Accept-Encoding": "identity"}
    if part.size:
        headers["Range"] = f"bytes={part.size}-"
    options: dict[str, Any] = {"headers": headers, "timeout": context.timeout, "follow_redirects": True}
    with get_session().stream("GET", context.url(file), **options) as response:
        begin_at = f"bytes {part.size}-"
        if response.status_code == 416:
            part.restart()
            raise BadConnection(f"the hub refuses to continue {file.name}", response.url)
        hf_raise_for_status(response)
        if part.size and not response.headers.get("Content-Range", "").startswith(begin_at):
            part.restart()
        window, mark = time.monotonic(), part.size
        for piece in response.iter_bytes():
            part.append(piece)
            if part.size == file.size:
                return
            if time.monotonic() - window > context.policy.stall:
                if part.size - mark < context.policy.slowest * context.policy.stall:
                    raise BadConnection(f"fewer than {context.policy.slowest} bytes a second", response.url)
                window, mark = time.monotonic(), part.size
    raise BadConnection(f"{file.name} ended after {part.size} of {file.size} bytes", response.url)
