"""Remedies for damaged or missing files, as commands to paste where possible; no torch."""

import re
from pathlib import Path

from dsv4cli.engine.checkpoint.names import folder_word
from dsv4cli.harmless import brief_line, shell_word

# as llama.cpp's gguf-split numbers files
SPLIT_NUMBER = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)


def download_again(folder: Path, name: str) -> str:
    """Return how to download a file of a checkpoint folder again; name '' means all files.

    For a snapshot in the Hugging Face cache (models--org--name/snapshots/<commit>) this is a command. A GGUF file is
    named by its path, without the number of a split file, because the snapshot may hold several models.
    """
    parts = folder.absolute().parts
    if "snapshots" in parts[1:-1]:
        at = parts.index("snapshots")
        if parts[at - 1].startswith("models--"):
            repository = parts[at - 1].removeprefix("models--").replace("--", "/")
            path = "/".join((*parts[at + 2 :], name))
            variant = f":{SPLIT_NUMBER.sub('', path.removesuffix('.gguf'))}" if name.endswith(".gguf") else ""
            return f"repair it with `dsv4 download {shell_word(f'{repository}@{parts[at + 1]}{variant}')}`"
    return f"download {brief_line(name) or 'the checkpoint'} again"


def look(folder: Path | str, *options: str) -> str:
    """Return the `dsv4 inspect` command, with `options`, that shows what is wrong with a folder."""
    return f"`dsv4 inspect {' '.join([folder_word(Path(folder)), *options])}`"
