"""What to do about a file that is damaged or absent, as a command that can be pasted where one is known; no torch."""

from pathlib import Path

from dsv4cli.engine.checkpoint.names import folder_word
from dsv4cli.harmless import brief_line, shell_word


def download_again(folder: Path, name: str) -> str:
    """How to get a file of a checkpoint folder again: a command where it is a snapshot of the Hugging Face cache, which
    names its repository (models--org--name/snapshots/<commit>). name: '' for all of them."""
    parts = folder.absolute().parts[-3:]
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        repository = parts[0].removeprefix("models--").replace("--", "/")
        return f"repair it with `dsv4 download {shell_word(f'{repository}@{parts[2]}')}`"
    return f"download {brief_line(name) or 'the checkpoint'} again"


def look(folder: Path | str, *options: str) -> str:
    """The command that shows what is wrong with a folder, or with `options`, more of it."""
    return f"`dsv4 inspect {' '.join([folder_word(Path(folder)), *options])}`"
