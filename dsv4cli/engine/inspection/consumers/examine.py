"""From an inspection to a verdict; no header is read again."""

from collections.abc import Collection
from pathlib import Path

from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.source import ALIASES, FolderSource
from dsv4cli.engine.inspection.consumers.checkpoint import InspectedCheckpoint, listed, look_at
from dsv4cli.engine.inspection.consumers.judge import Consumer, ConsumerVerdict, refused, verdict
from dsv4cli.engine.inspection.report import Inspection
from dsv4cli.engine.inspection.sources import RemoteSource
from dsv4cli.errors import UsageError


def judge(
    result: Inspection, consumer: Consumer, *, folder: Path | None = None, files: Collection[str] | None = None
) -> ConsumerVerdict:
    """Whether a consumer would load an inspected folder or repository, even one that nobody can name.

    folder, files: where the configuration of a repository lies on this machine, and all that the repository has.
    Raises UsageError for what no other program could load: a single file, random weights.
    """
    if not isinstance(result.source, FolderSource | RemoteSource):
        raise UsageError(f"{result.source.name} is not a whole checkpoint", "name a folder or a repository")
    checkpoint = subject_of(result, folder, files)
    if checkpoint is None:
        assert result.problem is not None
        return refused(result.source.name, consumer, result.problem)
    return verdict(checkpoint, consumer, result.problem)


def subject_of(result: Inspection, folder: Path | None, files: Collection[str] | None) -> InspectedCheckpoint | None:
    """What the rules look at, None for what is not recognised; arguments as for `judge`."""
    identity, source = result.identity, result.source
    if not isinstance(identity, FolderIdentity) or result.coverage is None:
        return None
    if isinstance(source, RemoteSource):
        name, _, _ = ALIASES.get(source.repository, source.repository).partition("@")
    else:
        assert isinstance(source, FolderSource)
        name, folder = str(source.folder), source.folder
    assert folder is not None
    return look_at(identity, result.coverage, name, folder, listed(folder) if files is None else files)
