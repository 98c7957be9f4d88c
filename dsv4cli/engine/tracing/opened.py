"""Opens a folder as a recording, whether dsv4 or ATOM wrote it."""

from pathlib import Path

from dsv4cli.engine.tracing.atom import GLOB, AtomFolder
from dsv4cli.engine.tracing.manifest import FILE, TraceManifest
from dsv4cli.engine.tracing.recording import RecordedFolder, Recording


def is_recording(folder: Path) -> bool:
    """Return whether a folder is a recording, not a model."""
    return holds_tokens(folder) or any(folder.glob(GLOB))


def holds_tokens(folder: Path) -> bool:
    """Return whether a recording contains its tokens. ATOM's dumps do not."""
    return (folder / FILE).is_file()


def open_recording(folder: Path, like: TraceManifest | None = None) -> Recording:
    """Open the recording in a folder.

    Args:
        like: manifest with the tokens of ATOM's dump, which does not contain them.

    Raises:
        UsageError: the folder has no complete recording.
    """
    if like is None or holds_tokens(folder) or not any(folder.glob(GLOB)):
        return RecordedFolder(folder)
    return AtomFolder(folder, like)
