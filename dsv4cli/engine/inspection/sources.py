"""What `dsv4 inspect` accepts: any runnable model, one file, or a hub repository by its headers; no torch."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.engine.checkpoint.headers import Checkpoint, scan_file, whole
from dsv4cli.engine.checkpoint.identify import FolderIdentity, identify, recognise
from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.source import (
    KNOWN,
    REPOSITORY,
    FolderSource,
    RandomSource,
    resolve_model,
    resolve_repository,
)
from dsv4cli.errors import CheckpointError, ModelNotFound, UnsupportedCheckpoint, UsageError
from dsv4cli.harmless import shell_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsv4cli.engine.hub.headers import RemoteHeaders

SCHEME = "hf://"


def _silent(text: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class FileSource:
    """One safetensors file; `name` is the path as the user typed it."""

    name: str
    file: Path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The headers of the file; its folder needs no configuration. Raises CheckpointError for a damaged file."""
        return scan_file(self.file)

    @cached_property
    def identity(self) -> FolderIdentity:
        """The model that the file belongs to, by the config.json in its folder. Raises as `recognise`."""
        return recognise(self.file.parent, lambda folder: self.checkpoint)


@dataclass(frozen=True)
class RemoteSource:
    """A hub repository whose headers and configuration are fetched at first use.

    name: the repository as the user typed it. say: called when a request is retried.
    """

    name: str
    say: "Callable[[str], None]" = field(default=_silent, compare=False)

    @property
    def repository(self) -> str:
        """org/name[@revision]."""
        name = self.name.removeprefix(SCHEME)
        return ALIASES.get(name, name)

    @cached_property
    def identity(self) -> FolderIdentity:
        """The identity of the repository's model; its paths are names on the hub.

        Raises as `identify`, and HubError.
        """
        return self._identified(lambda remote: identify(remote.folder, lambda folder: whole(remote.checkpoint)))

    @cached_property
    def recognised(self) -> FolderIdentity:
        """The identity in any layout that `dsv4 convert` reads. Raises as `recognise`, and HubError."""
        return self._identified(lambda remote: recognise(remote.folder, lambda folder: remote.checkpoint))

    @cached_property
    def headers(self) -> "RemoteHeaders":
        """The fetched headers, with the listing and a temporary folder of the small files.

        Raises CheckpointError for damaged headers, and HubError.
        """
        from dsv4cli.engine.hub import retry
        from dsv4cli.engine.hub.headers import remote_headers

        return remote_headers(self.repository, retry.RetryPolicy(report=retry.Notices(self.say)))

    def _identified(self, find: "Callable[[RemoteHeaders], FolderIdentity]") -> FolderIdentity:
        remote = self.headers
        try:
            return find(remote)
        except (CheckpointError, UnsupportedCheckpoint) as error:
            # the folder is temporary: its name would tell the user nothing
            remedy = error.remedy.replace(shell_word(remote.folder), shell_word(self.name))
            message, remedy = (text.replace(str(remote.folder), self.name) for text in (error.message, remedy))
            raise type(error)(message, remedy) from None


Inspectable = FolderSource | FileSource | RemoteSource | RandomSource


def resolve_inspectable(text: str, say: "Callable[[str], None]" = _silent) -> Inspectable:
    """Return the source that `text` names: as `resolve_model`, or a safetensors file, or `hf://org/name[@revision]`.

    A repository that is not in the cache is read over the network later, unless huggingface_hub is offline. say: called
    when a request is retried. Raises as `resolve_model`.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix == ".safetensors" and os.path.isfile(path):
        return FileSource(text, path)
    name = text.removeprefix(SCHEME)
    is_repository = REPOSITORY.fullmatch(ALIASES.get(name, name)) is not None
    if name != text and not is_repository:
        raise UsageError(f"{name!r} is not a repository on the hub", "known names: " + KNOWN)
    try:
        return resolve_model(text) if name == text else resolve_repository(name)
    except ModelNotFound:
        if not is_repository or _is_offline():
            raise
        return RemoteSource(text, say)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE
