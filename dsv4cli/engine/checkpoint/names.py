"""Model aliases, and how to write the path of a folder with the name of one; no torch."""

import os
from pathlib import Path

from dsv4cli.harmless import shell_word

ALIASES = {
    "flash": "deepseek-ai/DeepSeek-V4-Flash",
    "pro": "deepseek-ai/DeepSeek-V4-Pro",
    "flash-0731": "deepseek-ai/DeepSeek-V4-Flash-0731",
}
BUILT_IN = "nano"
# folders of the package; the second is the first with a DSpark drafter
IN_PACKAGE = (BUILT_IN, "nano-0731")
RANDOM = "random:"


def folder_text(folder: Path) -> str:
    """Return the text that names a folder as MODEL: `./nano` if `nano` would name another model."""
    text = str(folder)
    is_taken = text in ALIASES or text in IN_PACKAGE or text.startswith((RANDOM, "~"))
    return f"./{text}" if is_taken else text


def folder_word(folder: Path) -> str:
    """Return `folder_text` quoted for a shell command."""
    return shell_word(folder_text(folder))


def hidden_folder(name: str) -> str:
    """Return the text for a folder with the name of a known model, '' if there is none."""
    text = folder_text(Path(name))
    return text if (name in ALIASES or name in IN_PACKAGE) and os.path.isdir(name) else ""
