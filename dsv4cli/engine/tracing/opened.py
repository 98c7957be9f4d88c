"""A folder as a recording, whoever has written it."""

from pathlib import Path

from dsv4cli.engine.tracing.atom import GLOB, AtomFolder
from dsv4cli.engine.tracing.manifest import FILE, TraceManifest
from dsv4cli.engine.tracing.recording import RecordedFolder, Recording


def is_recording(folder: Path) -> bool:
    """Whether a folder holds a recording, not a model."""
    return holds_tokens(folder) or any(folder.glob(GLOB))


def holds_tokens(folder: Path) -> bool:
    """Whether a recording says of which tokens it is, as ATOM's does not."""
    return (folder / FILE).is_file()


def open_recording(folder: Path, like: TraceManifest | None = None) -> Recording:
    """The recording in a folder. like: what it is of where the folder does not say, for it is ATOM's. Raises UsageError
    for a folder without a whole one."""
    if like is None or holds_tokens(folder) or not any(folder.glob(GLOB)):
        return RecordedFolder(folder)
    return AtomFolder(folder, like)
