"""Checks that an output file can be written before a long measurement begins. No torch."""

from pathlib import Path

from dsv4cli.errors import UsageError


def check_writable(option: str, path: Path) -> None:
    """Raise UsageError if a file cannot be written. An existing file is left unchanged."""
    if not path.parent.is_dir():
        raise UsageError(f"{option}: the folder {path.parent} does not exist", "create it, or use another")
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder", "use a file in it")
    there = path.exists()
    if there and not path.is_file():
        return  # a pipe's reader would see the close as end of file
    try:
        path.open("ab").close()
        if not there:
            path.resolve().unlink()  # a dangling link stays a link
    except OSError as error:
        raise UsageError(f"cannot write {option} {path}: {error.strerror}", "use another file") from None
