"""Destinations of a download: the Hugging Face cache or a folder of the user.

The layout is huggingface_hub's (guide "Understand caching"): `blobs/<hash>`, `snapshots/<commit>/<name>` as a link to
it, `refs/<revision>` with the commit. An unfinished file is `<hash>.dsv4.incomplete`, which `hf cache prune` removes.
A user's folder has a record of each downloaded file, `.cache/huggingface/download/<name>.metadata`, in the format of
huggingface_hub.
"""

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.file_download import are_symlinks_supported, repo_folder_name

from dsv4cli.engine.hub.files import LIBRARY, Listing, RemoteFile
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word

PART = ".dsv4.incomplete"


class Destination(Protocol):
    """The destination of the files of one listing. `folder`: where they appear under their names."""

    @property
    def folder(self) -> Path: ...

    def find(self, file: RemoteFile) -> Path | None:
        """Return the path that may hold a file's content, None if nothing exists."""

    def guard(self, file: RemoteFile) -> None:
        """Raise UsageError if the existing file was not downloaded, so that replacing it would lose the user's data."""

    def copy_of(self, file: RemoteFile) -> Path | None:
        """Return another copy of the file on this machine, None if there is none."""

    def part(self, file: RemoteFile) -> Path:
        """Return the path of the unfinished file."""

    def lock(self, file: RemoteFile) -> Path:
        """Return the lock file that a process holds while it writes the unfinished file."""

    def hub_lock(self, file: RemoteFile) -> Path:
        """Return the lock file that huggingface_hub holds while it writes the file."""

    def put(self, file: RemoteFile) -> None:
        """Move a complete file to its final path."""

    def show(self, file: RemoteFile) -> Path:
        """Make existing content appear under the file's name and return that path."""

    def fetch(self, file: RemoteFile, **options: Any) -> Path:
        """Download the file with huggingface_hub, which holds its own lock meanwhile."""

    def leftovers(self, file: RemoteFile) -> set[Path]:
        """Return the unfinished files of huggingface_hub, which it does not resume."""

    def close(self) -> None:
        """Record that the download is complete."""


@dataclass(frozen=True)
class CacheDestination:
    """The Hugging Face cache, at the path set by HF_HOME and HF_HUB_CACHE."""

    listing: Listing

    @property
    def root(self) -> Path:
        """The repository's folder in the cache."""
        cache = Path(constants.HF_HUB_CACHE).expanduser()
        return cache / repo_folder_name(repo_id=self.listing.repository, repo_type="model")

    @property
    def folder(self) -> Path:
        return self.root / "snapshots" / self.listing.commit

    def find(self, file: RemoteFile) -> Path | None:
        candidates = (self.folder / file.name, self._blob(file))
        return next((path for path in candidates if path.is_file()), None)

    def guard(self, file: RemoteFile) -> None:
        """Do nothing: every file in the cache was downloaded."""

    def copy_of(self, file: RemoteFile) -> Path | None:
        return None

    def part(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / (file.etag + PART)

    def lock(self, file: RemoteFile) -> Path:
        return self.hub_lock(file).with_suffix(".dsv4.lock")

    def hub_lock(self, file: RemoteFile) -> Path:
        return self.root.parent / ".locks" / self.root.name / f"{file.etag}.lock"

    def put(self, file: RemoteFile) -> None:
        os.replace(self.part(file), self._blob(file))
        self.show(file)

    def show(self, file: RemoteFile) -> Path:
        pointer, blob = self.folder / file.name, self._blob(file)
        if pointer.exists() and (not blob.exists() or pointer.samefile(blob)):
            return pointer
        pointer.parent.mkdir(parents=True, exist_ok=True)
        fresh = _beside(pointer)
        if are_symlinks_supported(self.root.parent):
            fresh.symlink_to(os.path.relpath(blob, pointer.parent))
            os.replace(fresh, pointer)
        else:
            # as huggingface_hub does without symbolic links
            os.replace(blob, pointer)
        return pointer

    def fetch(self, file: RemoteFile, **options: Any) -> Path:
        path = hf_hub_download(self.listing.repository, file.name, revision=self.listing.commit, **LIBRARY, **options)
        return Path(path)

    def leftovers(self, file: RemoteFile) -> set[Path]:
        return _unfinished(self.part(file))

    def close(self) -> None:
        revision = self.listing.revision or constants.DEFAULT_REVISION
        if revision != self.listing.commit:
            reference = self.root / "refs" / revision
            with suppress(OSError):
                if reference.read_bytes().decode(errors="replace") == self.listing.commit:
                    return  # in a cache that cannot be written, too
            reference.parent.mkdir(parents=True, exist_ok=True)
            fresh = _beside(reference)
            fresh.write_text(self.listing.commit, encoding="utf-8")
            os.replace(fresh, reference)

    def _blob(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / file.etag


@dataclass(frozen=True)
class FolderDestination:
    """A folder of the user, which holds the files under their names."""

    listing: Listing
    folder: Path

    def find(self, file: RemoteFile) -> Path | None:
        path = self.folder / file.name
        return path if path.is_file() else None

    def guard(self, file: RemoteFile) -> None:
        path = self.folder / file.name
        if path.is_dir():
            problem = f"{path} is a folder, and a file of {self.listing.repository} has its name"
        elif path.exists() and not self._record(file).exists():
            problem = f"{path} is not the file of {self.listing.repository}, and no download has put it there"
        else:
            return
        raise UsageError(
            problem,
            "use another --local-dir, or keep yours: "
            f"mv {shell_word(path)} {shell_word(path.with_name(path.name + '.old'))}",
        )

    def copy_of(self, file: RemoteFile) -> Path | None:
        path = try_to_load_from_cache(self.listing.repository, file.name, revision=self.listing.commit)
        return Path(path) if isinstance(path, str) else None

    def part(self, file: RemoteFile) -> Path:
        # where huggingface_hub stores its unfinished files for a local folder
        return self.folder / ".cache" / "huggingface" / "download" / (file.etag + PART)

    def lock(self, file: RemoteFile) -> Path:
        return self.part(file).with_suffix(".lock")

    def hub_lock(self, file: RemoteFile) -> Path:
        return self.part(file).parent / f"{file.name}.lock"

    def put(self, file: RemoteFile) -> None:
        target = self.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        # first: a kill between the two must not leave a file that looks like the user's
        self._write_record(file)
        os.replace(self.part(file), target)

    def show(self, file: RemoteFile) -> Path:
        if not self._record(file).exists():
            with suppress(OSError):  # a folder that cannot be written is not overwritten either
                self._write_record(file)
        return self.folder / file.name

    def fetch(self, file: RemoteFile, **options: Any) -> Path:
        destination: dict[str, Any] = {"revision": self.listing.commit, "local_dir": self.folder}
        return Path(hf_hub_download(self.listing.repository, file.name, **destination, **LIBRARY, **options))

    def leftovers(self, file: RemoteFile) -> set[Path]:
        return _unfinished(self.part(file))

    def close(self) -> None:
        """Do nothing: every file has its own record."""

    def _record(self, file: RemoteFile) -> Path:
        return self.folder / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"

    def _write_record(self, file: RemoteFile) -> None:
        record = self._record(file)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"{self.listing.commit}\n{file.etag}\n{time.time()}\n", encoding="utf-8")


def _unfinished(part: Path) -> set[Path]:
    # huggingface_hub: [<name>.]<hash>.<eight hex digits>.incomplete
    etag = part.name.removesuffix(PART)
    return set(part.parent.rglob(f"*{etag}.????????.incomplete"))


def free_bytes(destination: Destination) -> int:
    """Return the free bytes of the destination's file system, which may not have the folder yet."""
    path = destination.folder.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _beside(path: Path) -> Path:
    """Return a temporary path in the same folder, unique to this thread, to be renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
