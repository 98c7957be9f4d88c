"""GGUF models on the hub, read by their headers alone."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from dsv4cli.engine.checkpoint.gguf.files import GgufModel, joined
from dsv4cli.engine.checkpoint.gguf.header import read_header
from dsv4cli.engine.checkpoint.gguf.variants import Variant
from dsv4cli.engine.checkpoint.headers import LFS_POINTER
from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.destination import FolderDestination
from dsv4cli.engine.hub.files import Listing, RemoteFile
from dsv4cli.engine.hub.job import another, quiet
from dsv4cli.engine.hub.ranges import fetch_range
from dsv4cli.engine.hub.retry import RetryPolicy
from dsv4cli.engine.system.threads import Meter, do_all
from dsv4cli.errors import CheckpointError, Dsv4Error, UnsupportedCheckpoint

T = TypeVar("T")
# bytes of the first request, enough for a file without a vocabulary, and of the largest one
FIRST, LARGEST = 1 << 17, 1 << 24
# models whose headers are read at once: a vocabulary takes 30 MB of memory
WORKERS = 4


class RemoteStream:
    """Sequential reads of a file on the hub; each request fetches twice as many bytes as the one before it."""

    def __init__(self, context: DownloadContext, file: RemoteFile) -> None:
        self._context, self._file = context, file
        self._next = FIRST
        self._begin = self._at = 0
        self._bytes = b""

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes, fewer at the end of the file."""
        end = min(self._at + count, self._file.size)
        if end > self._begin + len(self._bytes):
            kept = self._bytes[self._at - self._begin :]
            position = self._at + len(kept)
            stop = min(max(end, position + self._next), self._file.size)
            self._begin, self._bytes = self._at, kept + fetch_range(self._context, self._file, position, stop)
            self._next = min(2 * self._next, LARGEST)
        found = self._bytes[self._at - self._begin : end - self._begin]
        self._at = end
        return found

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at


def read_models(
    listing: Listing, variants: Sequence[Variant], policy: RetryPolicy, use: Callable[[GgufModel], T]
) -> list[T | Dsv4Error]:
    """Fetch the headers of GGUF models and return what `use` makes of each, or its error.

    Errors of a model are CheckpointError and UnsupportedCheckpoint. Raises HubError if the hub does not serve a file.
    """
    stop = threading.Event()
    folder = Path(listing.repository)
    context = DownloadContext(
        listing, FolderDestination(listing, folder), policy, Meter(0, lambda done, total: None), stop
    )
    jobs = {variant.name: partial(_used, context, variant, use) for variant in variants}
    with quiet():
        found = do_all(jobs, WORKERS, stop)
    return [found[variant.name] for variant in variants]


def _used(context: DownloadContext, variant: Variant, use: Callable[[GgufModel], T]) -> T | Dsv4Error:
    try:
        return use(_read(context, variant))
    except CheckpointError as error:
        # the file is as the hub has it
        return CheckpointError(error.message, another(context.listing))
    except UnsupportedCheckpoint as error:
        return error


def _read(context: DownloadContext, variant: Variant) -> GgufModel:
    folder = Path(context.listing.repository)
    headers = {}
    for name in variant.files:
        file = context.listing.by_name.get(name)
        if file is None:
            raise CheckpointError(f"{folder / name} is missing")
        stream = RemoteStream(context, file)
        if file.size < 1000 and fetch_range(context, file, 0, file.size).startswith(LFS_POINTER):
            raise CheckpointError(f"{folder / name} is a git-lfs pointer, not the weights")
        headers[folder / name] = read_header(folder / name, stream, file.size)
    return joined(folder / variant.files[0], headers, {})
