"""A checkpoint in any layout, recognised; no numpy."""

from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.files import is_gguf
from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.identify import FolderIdentity, recognise
from dsv4cli.engine.checkpoint.packed import is_packed, recognise_packed


def recognise_stored(path: Path) -> FolderIdentity:
    """What a folder in any layout holds that `dsv4 convert` reads, or a GGUF file.

    Raises what `recognise`, `recognise_gguf` and `recognise_packed` raise.
    """
    if is_gguf(path):
        return recognise_gguf(path)
    return recognise_packed(path) if is_packed(path) else recognise(path)
