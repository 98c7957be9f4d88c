"""Remedies for damaged or missing files, as commands to paste where possible; no torch."""

from pathlib import Path

from dsv4cli.engine.checkpoint.names import folder_word
from dsv4cli.harmless import brief_line, shell_word


def download_again(folder: Path, name: str) -> str:
    """Return how to download a file of a checkpoint folder again; name '' means all files.

    For a snapshot in the Hugging Face cache (models--org--name/snapshots/<commit>) this is a command.
    """
    parts = folder.absolute().parts[-3:]
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        repository = parts[0].removeprefix("models--").replace("--", "/")
        return f"repair it with `dsv4 download {shell_word(f'{repository}@{parts[2]}')}`"
    return f"download {brief_line(name) or 'the checkpoint'} again"


def look(folder: Path | str, *options: str) -> str:
    """Return the `dsv4 inspect` command, with `options`, that shows what is wrong with a folder."""
    return f"`dsv4 inspect {' '.join([folder_word(Path(folder)), *options])}`"
