"""The chat template in a model's folder, which a conversion keeps. No torch."""

from collections.abc import Mapping
from pathlib import Path

from dsv4cli.engine.config.read import read_json
from dsv4cli.engine.system.regular_files import is_there, read_bytes
from dsv4cli.errors import CheckpointError

SETTINGS, CHAT = "tokenizer_config.json", "chat_template.jinja"


def own_template(folder: Path) -> str | None:
    """Return the chat template of a folder: its chat_template.jinja, or the one in its tokenizer_config.json.

    As in transformers, the file has precedence, and of several templates the one named default counts.

    Raises:
        CheckpointError: a file cannot be read.
    """
    text = read_file(folder / CHAT)
    if text is not None:
        return text
    found = read_json(folder / SETTINGS).get("chat_template") if is_there(folder / SETTINGS) else None
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, Mapping) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def read_file(path: Path) -> str | None:
    """Return the text of a file, None if there is none. Raises CheckpointError if it is not readable UTF-8."""
    try:
        return read_bytes(path).decode() if is_there(path) else None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", f"fetch {path.name} again") from None
