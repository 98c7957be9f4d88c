"""Identification of a checkpoint in any layout; no numpy."""

from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.files import is_gguf
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity, recognise_gguf
from dsv4cli.engine.checkpoint.identify import FolderIdentity, identify, recognise
from dsv4cli.engine.checkpoint.packed import is_packed, recognise_packed
from dsv4cli.engine.config.checks import check_blocks


def identify_runnable(path: Path) -> FolderIdentity:
    """Identify a folder or GGUF file that the engine can run.

    Raises as `identify`, and as `recognise_gguf`; UnsupportedCheckpoint for GGUF types that cannot be decoded.
    """
    if not is_gguf(path):
        return identify(path)
    return runnable(recognise_gguf(path))


def runnable(found: GgufIdentity) -> GgufIdentity:
    """Return a GGUF model that the engine can run.

    Raises UnsupportedCheckpoint for tensor types that cannot be decoded and for dimensions that no kernel supports.
    """
    found.check_readable()
    check_blocks(found.config, found.formats.linear, found.formats.experts, str(found.checkpoint.folder))
    return found


def recognise_stored(path: Path) -> FolderIdentity:
    """Identify a folder in any layout that `dsv4 convert` reads, or a GGUF file.

    Raises as `recognise`, `recognise_gguf` and `recognise_packed`.
    """
    if is_gguf(path):
        return recognise_gguf(path)
    return recognise_packed(path) if is_packed(path) else recognise(path)
