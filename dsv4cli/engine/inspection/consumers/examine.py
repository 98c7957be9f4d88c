"""From an inspection to a verdict, without reading headers again."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dsv4cli.engine.checkpoint.foreign import CONVERT
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.names import folder_text
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.inspection.consumers.checkpoint import InspectedCheckpoint, listed, look_at
from dsv4cli.engine.inspection.consumers.judge import CONSUMERS, Consumer, ConsumerVerdict, refused, verdict
from dsv4cli.engine.inspection.report import Inspection
from dsv4cli.engine.inspection.sources import RemoteSource
from dsv4cli.errors import UnsupportedCheckpoint, UsageError
from dsv4cli.harmless import shell_word

# consumers that have rules for GGUF and for packed layouts; most programs do not read these. dsv4's own loader decides
GGUF_READERS: tuple[Consumer, ...] = ("llama.cpp", "ds4", "dsv4")
PACKED_READERS: tuple[Consumer, ...] = (*GGUF_READERS, "official")


def judge(
    result: Inspection, consumer: Consumer, *, folder: Path | None = None, files: Collection[str] | None = None
) -> ConsumerVerdict:
    """Return whether a consumer would load an inspected folder or repository, even an unidentified one.

    folder: the local folder with a repository's configuration. files: all files of the repository. Raises UsageError
    for
    what no other program could load: a single file, random weights.
    """
    if not isinstance(result.source, FolderSource | RemoteSource):
        raise UsageError(f"{result.source.name} is not a whole checkpoint", "use a folder or a repository")
    checkpoint = subject_of(result, folder, files)
    if checkpoint is None or consumer not in _known(checkpoint.identity):
        name = result.source.name
        remedy = CONVERT.format(folder=shell_word(name))
        problem = result.problem or UnsupportedCheckpoint(f"{name} is a compressed-tensors export", remedy)
        return refused(name, consumer, problem)
    found = verdict(checkpoint, consumer, result.problem)
    if isinstance(result.source, RemoteSource) and isinstance(checkpoint.identity, GgufIdentity) and found.command:
        return replace(found, command=_remote_command(consumer, result.source, found.command))
    return found


def _remote_command(consumer: Consumer, source: RemoteSource, command: str) -> str:
    """Return the command that starts a consumer with a GGUF model on the hub."""
    if consumer == "llama.cpp":
        return f"llama-server -hf {shell_word(source.repository)}"
    if consumer == "ds4":
        file = shell_word(f"DIR/{source.variants[0].files[0]}")
        return f"dsv4 download {shell_word(source.repository)} --local-dir DIR && ds4 -m {file}"
    return command


def _known(identity: FolderIdentity) -> tuple[Consumer, ...]:
    """Return the consumers whose behavior with a layout is known."""
    if isinstance(identity, GgufIdentity):
        return GGUF_READERS
    return PACKED_READERS if identity.layout == "compressed-tensors" else CONSUMERS


def subject_of(result: Inspection, folder: Path | None, files: Collection[str] | None) -> InspectedCheckpoint | None:
    """Return the input of the rules, None for an unidentified model; arguments as in `judge`."""
    identity, source = result.identity, result.source
    if not isinstance(identity, FolderIdentity) or result.coverage is None:
        return None
    if isinstance(source, RemoteSource):
        from dsv4cli.engine.hub.repository import repository_of

        named = repository_of(source.repository, None)
        # other programs take org/name:NAME too
        name, revision = str(replace(named, revision=None)), named.revision or ""
    else:
        assert isinstance(source, FolderSource)
        name, revision, folder = folder_text(source.folder), "", source.folder
        if isinstance(identity, GgufIdentity):
            # of several files the first is named, and the others are found by its name
            name = str(identity.checkpoint.files[0])
    assert folder is not None
    return look_at(identity, result.coverage, name, revision, folder, listed(folder) if files is None else files)
