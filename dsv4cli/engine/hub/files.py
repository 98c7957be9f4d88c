"""The files of a hub repository at one commit, with sizes and hashes, listed in one request."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError

from dsv4cli.engine.hub.retry import DownloadStopped, Retrier, RetryPolicy, explain
from dsv4cli.errors import HubError, UsageError
from dsv4cli.version import __version__

# library name for the hub's statistics
LIBRARY: dict[str, Any] = {"library_name": "dsv4", "library_version": __version__}
SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1 = re.compile(r"[0-9a-f]{40}")
READ_SIZE = 1 << 20


class Digest(Protocol):
    """The methods of a hashlib object that are used here."""

    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository.

    sha256: hash of the content, for a file in large-file storage. blob: git id, for a file that git stores itself.
    """

    name: str
    size: int
    blob: str
    sha256: str | None = None

    @property
    def etag(self) -> str:
        """The content hash that names the file on the hub and in its cache."""
        return self.sha256 or self.blob

    def digest(self) -> Digest:
        """Return a new hash object that equals `etag` after the whole content."""
        if self.sha256:
            return hashlib.sha256()
        # git hashes a header with the content (gitformat-pack, "blob" objects)
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True)
class Listing:
    """The files of `repository` at one commit, in alphabetical order.

    revision: as requested, None for main. cached: the files come from the cache, because the hub was not contacted.
    """

    repository: str
    revision: str | None
    commit: str
    files: tuple[RemoteFile, ...]
    cached: bool = False

    @property
    def by_name(self) -> dict[str, RemoteFile]:
        """The files by name."""
        return {file.name: file for file in self.files}

    def retrier(self, policy: RetryPolicy, stop: threading.Event) -> Retrier:
        """Return a retry counter for one request about this listing."""
        return Retrier(policy, stop, partial(explain, repository=self.repository, revision=self.revision))


def list_files(repository: str, revision: str | None, policy: RetryPolicy) -> Listing:
    """Request the commit of a revision (branch, tag or commit) and its files from the hub.

    Raises HubError if the hub cannot be reached, has no such repository, denies access or sends an invalid answer;
    UsageError for an invalid repository name.
    """
    api = HfApi(**LIBRARY)
    # report a missing connection before half a minute has passed
    policy = replace(policy, attempts=min(policy.attempts, 4))
    retrier = Retrier(policy, threading.Event(), partial(explain, repository=repository, revision=revision))
    timeout = min(float(constants.HF_HUB_ETAG_TIMEOUT), policy.stall)
    request = partial(api.model_info, repository, revision=revision, files_metadata=True, timeout=timeout)
    try:
        info: Any = retrier.call(request)
        files = [_file(entry) for entry in info.siblings]
    except HFValidationError:
        raise UsageError(f"{repository!r} is not the name of a repository", "write it as org/name") from None
    except (ValueError, KeyError, TypeError) as error:
        raise explain(error, repository, revision) from error
    if not SHA1.fullmatch(str(info.sha)):
        raise HubError(f"the hub names no commit of {repository}: {info.sha}", "check HF_ENDPOINT")
    return Listing(repository, revision, info.sha, tuple(sorted(files, key=lambda file: file.name)))


def _file(entry: Any) -> RemoteFile:
    """Return one entry of the hub's answer; refuse a name or a hash that could escape the folder."""
    name, size, blob, sha256 = entry.rfilename, entry.size, str(entry.blob_id), entry.lfs and str(entry.lfs.sha256)
    size = entry.lfs.size if entry.lfs else size
    parts = name.split("/")
    if "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise HubError(f"the repository holds a file with a dangerous name: {name!r}", "do not download it")
    if type(size) is not int or size < 0 or not SHA1.fullmatch(blob) or (sha256 and not SHA256.fullmatch(sha256)):
        raise ValueError(f"no size or hash for {name}")
    return RemoteFile(name, size, blob, sha256)


def is_intact(path: Path, file: RemoteFile, at: Callable[[int], None], stop: threading.Event) -> bool:
    """Return whether a local file has the size and hash of the hub's; `at` is called with the number of bytes read.

    Raises DownloadStopped if `stop` is set meanwhile.
    """
    if path.stat().st_size != file.size:
        return False
    digest, position = file.digest(), 0
    for piece in _pieces(path):
        if stop.is_set():
            raise DownloadStopped
        digest.update(piece)
        position += len(piece)
        at(position)
    return digest.hexdigest() == file.etag


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(READ_SIZE):
            yield piece
