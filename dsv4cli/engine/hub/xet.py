"""Download of files in the hub's xet storage: huggingface_hub under supervision, with resume.

Since version 1 huggingface_hub restarts every file and never resumes the file of a killed download (issue 4196); its
downloads have hung at 99 % (xet-core issues 850 and 883). Here, a plain download resumes from an abandoned file, and
replaces a download that stalls.
"""

import os
import shutil
import time
from concurrent.futures import TimeoutError as NotYet
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined] # public, but not marked so

from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.destination import Destination
from dsv4cli.engine.hub.files import LIBRARY, RemoteFile
from dsv4cli.engine.hub.retry import HTTP_ERROR, DownloadStopped
from dsv4cli.engine.system.threads import begin

# seconds between two looks at a download that huggingface_hub does
LOOK = 0.2
# seconds to wait for a lock that is free unless its process lives
LOCK_WAIT = 0.2
# bytes before a hole that may be part of a page which was written in part
PAGE = 1 << 16


def fetch(context: DownloadContext, file: RemoteFile, damaged: bool) -> bool:
    """Download a file from xet storage with huggingface_hub; return False if this is impossible, fails or stalls.

    damaged: the existing file is damaged. Raises HubError if the hub refuses the file, DownloadStopped if canceled.
    """
    destination = context.destination
    if not file.sha256 or context.listing.cached or constants.HF_HUB_DISABLE_XET or not find_spec("hf_xet"):
        return False
    retrier, timeout = context.listing.retrier(context.policy, context.stop), constants.HF_HUB_ETAG_TIMEOUT
    seen = retrier.call(lambda: get_hf_file_metadata(context.url(file), timeout=timeout, **LIBRARY))
    if seen.xet_file_data is None:
        return False
    bar = _bar(context, file)
    before = destination.leftovers(file)
    arrival = begin(lambda: destination.fetch(file, force_download=damaged, tqdm_class=bar))
    while True:
        try:
            arrival.result(timeout=LOOK)
            return True
        except NotYet:
            if context.stop.is_set():
                raise DownloadStopped from None
            if time.monotonic() - bar.moved > context.policy.stall:
                # its thread may still write: take a copy
                for path in destination.leftovers(file) - before:
                    _keep(path, destination.part(file), shutil.copyfile)
                    path.unlink(missing_ok=True)
                return False
        except (HTTP_ERROR, OSError, RuntimeError, ValueError):  # errors of hf_xet and huggingface_hub
            return False


def adopt(destination: Destination, file: RemoteFile) -> None:
    """Turn the largest unfinished file of a terminated huggingface_hub into the part to resume; remove the others."""
    leftovers = sorted(destination.leftovers(file), key=written)
    if leftovers:
        lock = destination.hub_lock(file)
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with WeakFileLock(lock, timeout=LOCK_WAIT):
                if written(leftovers[-1]):
                    _keep(leftovers.pop(), destination.part(file), os.replace)
                for path in leftovers:
                    path.unlink(missing_ok=True)
        except TimeoutError:  # it is still running
            return


def _keep(path: Path, part: Path, move: Any) -> None:
    size = written(path)
    move(path, part)
    os.truncate(part, size)


def written(path: Path) -> int:
    """Return the bytes of an unfinished file before its first hole; hf_xet may write at several offsets."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        if not hasattr(os, "SEEK_HOLE") or end == 0:
            return end
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    return end if hole == end else max(0, hole - PAGE)


def _bar(context: DownloadContext, file: RemoteFile) -> Any:
    """Return a substitute for huggingface_hub's tqdm class: it updates the meter and the time of the last progress."""

    class Bar:
        moved = time.monotonic()
        position = 0

        def __init__(self, *_: object, **__: object) -> None:
            self.total = file.size

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, size: float | None = 1) -> None:
            Bar.position += int(size or 0)
            context.meter.at(file.name, max(0, min(Bar.position, file.size)))
            self.update_transfer()

        def update_transfer(self, size: float | None = 1) -> None:
            Bar.moved = time.monotonic()

        def ignore(self, *_: object, **__: object) -> None:
            pass

        set_postfix_str = set_transfer_postfix_str = set_description = refresh = close = ignore

    return Bar
