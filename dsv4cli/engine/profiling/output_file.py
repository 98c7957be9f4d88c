"""A file that is written when everything is measured: whether it can be, asked before; no torch."""

from pathlib import Path

from dsv4cli.errors import UsageError


def check_writable(option: str, path: Path) -> None:
    """Raises UsageError for a file that cannot be written; what is there stays as it is."""
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no folder {path.parent}", "make it, or name another")
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder", "name a file in it")
    there = path.exists()
    if there and not path.is_file():
        return  # whoever reads a pipe would take this for its end
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}", "name another file") from None
