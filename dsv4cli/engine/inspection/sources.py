"""What `dsv4 inspect` accepts: any runnable model, one file, or a hub repository by its headers; no torch."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.engine.checkpoint.gguf.files import GgufModel, is_gguf
from dsv4cli.engine.checkpoint.gguf.model import identify_model
from dsv4cli.engine.checkpoint.gguf.variants import ChoiceNeeded, Variant, choose_one
from dsv4cli.engine.checkpoint.headers import Checkpoint, scan_file, whole
from dsv4cli.engine.checkpoint.identify import FolderIdentity, identify, recognise
from dsv4cli.engine.checkpoint.layouts import runnable
from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.source import (
    KNOWN,
    REPOSITORY,
    FolderSource,
    RandomSource,
    names_missing_file,
    resolve_model,
    resolve_repository,
)
from dsv4cli.errors import CheckpointError, ModelNotFound, UnsupportedCheckpoint, UsageError
from dsv4cli.harmless import shell_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsv4cli.engine.hub.files import Listing
    from dsv4cli.engine.hub.headers import RemoteHeaders
    from dsv4cli.engine.hub.retry import RetryPolicy

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

    name: the repository as the user typed it, with the GGUF variant if one was chosen. say: called when a request is
    retried.
    """

    name: str
    say: "Callable[[str], None]" = field(default=_silent, compare=False)

    @property
    def repository(self) -> str:
        """org/name[@revision][:VARIANT]."""
        name = self.name.removeprefix(SCHEME)
        return ALIASES.get(name, name)

    @cached_property
    def listing(self) -> "Listing":
        """The files of the repository. Raises UsageError for an invalid repository, and HubError."""
        from dsv4cli.engine.hub.files import list_files
        from dsv4cli.engine.hub.repository import repository_of

        name = repository_of(self.repository, None)
        return list_files(name.repository, name.revision, self.policy)

    @property
    def policy(self) -> "RetryPolicy":
        """How often requests are repeated."""
        from dsv4cli.engine.hub import retry

        return retry.RetryPolicy(report=retry.Notices(self.say))

    @cached_property
    def variants(self) -> "list[Variant]":
        """The GGUF models that the name allows: the chosen one, or all; none for any other repository.

        Raises as `choose_variant`, and HubError.
        """
        from dsv4cli.engine.hub.repository import gguf_models, repository_of

        return gguf_models(self.listing, repository_of(self.repository, None))

    @property
    def is_choice(self) -> bool:
        """Whether the repository holds several GGUF models, and none is chosen. Raises as `variants`."""
        return len(self.variants) > 1

    @cached_property
    def identity(self) -> FolderIdentity:
        """The identity of the repository's model; its paths are names on the hub.

        Raises as `identify_runnable`, and HubError.
        """
        return self._identified(
            lambda remote: identify(remote.folder, lambda folder: whole(remote.checkpoint)),
            lambda model: runnable(identify_model(model)),
        )

    @cached_property
    def recognised(self) -> FolderIdentity:
        """The identity in any layout that `dsv4 convert` reads. Raises as `recognise`, and HubError."""
        return self._identified(
            lambda remote: recognise(remote.folder, lambda folder: remote.checkpoint), identify_model
        )

    @cached_property
    def headers(self) -> "RemoteHeaders":
        """The fetched headers, with the listing and a temporary folder of the small files.

        Raises CheckpointError for damaged headers, UsageError if a GGUF model must be chosen, and HubError.
        """
        from dsv4cli.engine.hub.headers import remote_headers

        if self.is_choice:
            remedy = choose_one(self.variants, self.repository)
            raise UsageError(f"{self.repository} has {len(self.variants)} GGUF models", remedy)
        return remote_headers(self.listing, next(iter(self.variants), None), self.policy)

    def _identified(
        self,
        find: "Callable[[RemoteHeaders], FolderIdentity]",
        find_gguf: "Callable[[GgufModel], FolderIdentity]",
    ) -> FolderIdentity:
        remote = self.headers
        if remote.gguf is not None:
            return find_gguf(remote.gguf)
        try:
            return find(remote)
        except (CheckpointError, UnsupportedCheckpoint) as error:
            # the folder is temporary: its name would tell the user nothing
            remedy = error.remedy.replace(shell_word(remote.folder), shell_word(self.name))
            message, remedy = (text.replace(str(remote.folder), self.name) for text in (error.message, remedy))
            raise type(error)(message, remedy) from None


Inspectable = FolderSource | FileSource | RemoteSource | RandomSource


def resolve_inspectable(text: str, say: "Callable[[str], None]" = _silent) -> Inspectable:
    """Return the source that `text` names: as `resolve_model`, or a safetensors file, or `hf://` with a repository.

    A repository that is not in the cache is read over the network later, unless huggingface_hub is offline. So are the
    GGUF models of a repository if none is chosen, and the cache has several or `text` begins with `hf://`. say: called
    when a request is retried. Raises as `resolve_model`.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix == ".safetensors" and os.path.isfile(path):
        return FileSource(text, path)
    name = text.removeprefix(SCHEME)
    match = REPOSITORY.fullmatch(ALIASES.get(name, name))
    if name != text and match is None:
        raise UsageError(f"{name!r} is not a repository on the hub", "known names: " + KNOWN)
    try:
        found = resolve_model(text) if name == text else resolve_repository(name)
    except (ModelNotFound, ChoiceNeeded):
        if match is None or names_missing_file(text) or _is_offline():
            raise
        return RemoteSource(text, say)
    lists = name != text and match is not None and not match["variant"] and not _is_offline()
    return RemoteSource(text, say) if lists and isinstance(found, FolderSource) and is_gguf(found.folder) else found


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE
