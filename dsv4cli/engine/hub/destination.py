"""Where the files of a repository lie on this machine: in the Hugging Face cache, or in a folder of the user's.

The layout is huggingface_hub's (guide "Understand caching"): `blobs/<hash>`, `snapshots/<commit>/<name>` as a link to
it, `refs/<revision>` with the commit. An unfinished file is `<hash>.dsv4.incomplete`, which `hf cache prune` removes.
A folder of the user's has a record of each file that a download has put there: `.cache/huggingface/download/<name>
.metadata`, as huggingface_hub writes it.
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
    """Where the files of one listing go. `folder`: where they appear under their names."""

    @property
    def folder(self) -> Path: ...

    def find(self, file: RemoteFile) -> Path | None:
        """What may be the content of a file, if anything is there."""

    def guard(self, file: RemoteFile) -> None:
        """Raises UsageError where what is there is not a download's, and would be lost if it were replaced."""

    def copy_of(self, file: RemoteFile) -> Path | None:
        """The same file elsewhere on this machine."""

    def part(self, file: RemoteFile) -> Path:
        """Where the bytes of a file gather until they are complete."""

    def lock(self, file: RemoteFile) -> Path:
        """What a process holds while it writes the part."""

    def hub_lock(self, file: RemoteFile) -> Path:
        """What huggingface_hub holds while it writes the file."""

    def put(self, file: RemoteFile) -> None:
        """Moves a complete part to its final place."""

    def show(self, file: RemoteFile) -> Path:
        """Lets content that is there appear under its name."""

    def fetch(self, file: RemoteFile, **options: Any) -> Path:
        """The file by huggingface_hub's own means, which holds its lock meanwhile."""

    def leftovers(self, file: RemoteFile) -> set[Path]:
        """Unfinished files of huggingface_hub, which nobody continues."""

    def close(self) -> None:
        """Records that all that was wanted is there."""


@dataclass(frozen=True)
class CacheDestination:
    """The Hugging Face cache, wherever HF_HOME and HF_HUB_CACHE put it."""

    listing: Listing

    @property
    def root(self) -> Path:
        """The folder of the repository in the cache."""
        cache = Path(constants.HF_HUB_CACHE).expanduser()
        return cache / repo_folder_name(repo_id=self.listing.repository, repo_type="model")

    @property
    def folder(self) -> Path:
        return self.root / "snapshots" / self.listing.commit

    def find(self, file: RemoteFile) -> Path | None:
        candidates = (self.folder / file.name, self._blob(file))
        return next((path for path in candidates if path.is_file()), None)

    def guard(self, file: RemoteFile) -> None:
        """Nothing: the cache has its files from the hub."""

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
    """A folder of the user's, which holds the files under their names."""

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
            "name another --local-dir, or keep yours: "
            f"mv {shell_word(path)} {shell_word(path.with_name(path.name + '.old'))}",
        )

    def copy_of(self, file: RemoteFile) -> Path | None:
        path = try_to_load_from_cache(self.listing.repository, file.name, revision=self.listing.commit)
        return Path(path) if isinstance(path, str) else None

    def part(self, file: RemoteFile) -> Path:
        # where huggingface_hub keeps its own unfinished files of such a folder
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
        """Nothing: every file has its record."""

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
    """Bytes free on the file system that the place is on, or will be."""
    path = destination.folder.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _beside(path: Path) -> Path:
    """A name for what is written before it gets this path, of this thread alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
