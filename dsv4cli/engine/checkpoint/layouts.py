"""Identification of a checkpoint in any layout; no numpy."""

from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.files import is_gguf
from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.identify import FolderIdentity, recognise
from dsv4cli.engine.checkpoint.packed import is_packed, recognise_packed


def recognise_stored(path: Path) -> FolderIdentity:
    """Identify a folder in any layout that `dsv4 convert` reads, or a GGUF file.

    Raises as `recognise`, `recognise_gguf` and `recognise_packed`.
    """
    if is_gguf(path):
        return recognise_gguf(path)
    return recognise_packed(path) if is_packed(path) else recognise(path)
