"""Tokenizers on this machine that could be the server's. No torch."""

from collections.abc import Iterator
from pathlib import Path

from dsv4cli.engine.checkpoint.names import ALIASES, IN_PACKAGE
from dsv4cli.engine.checkpoint.source import RandomSource, resolve_model
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.errors import Dsv4Error

FILE = "tokenizer.json"


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model, a folder, or a file `tokenizer.json`.

    Raises:
        Dsv4Error: there is no such model, or its tokenizer is not DeepSeek-V4's.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return Tokenizer.from_file(path)
    if (path / FILE).is_file():
        return Tokenizer.from_file(path / FILE)
    source = resolve_model(name)
    return Tokenizer.byte_level() if isinstance(source, RandomSource) else Tokenizer.from_file(source.folder / FILE)


def known_tokenizers(model: str) -> Iterator[tuple[str, Tokenizer]]:
    """Yield the tokenizers on this machine with their names, each vocabulary once.

    Args:
        model: the server's name for its model, which is tried first.
    """
    texts = set[str]()
    for name in (model, IN_PACKAGE[0], *ALIASES, *ALIASES.values()):
        try:
            tokenizer = open_tokenizer(name)
        except (Dsv4Error, OSError):
            continue
        text = tokenizer.text()
        if text not in texts:
            texts.add(text)
            yield name, tokenizer
