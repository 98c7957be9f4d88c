"""Shell completion of model names: imports neither PyTorch nor huggingface_hub, and prints nothing."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

# a preset small enough to load anywhere
SMALLEST_RANDOM = "random:tiny"
# names that no shell changes; others are not offered, because completion scripts insert them unquoted
PLAIN = re.compile(r"[\w./~@+,:=-]+")
# the folder that huggingface_hub makes of org/name
IN_CACHE = re.compile(r"models--([^/]+?)--([^/]+)")


def complete_model(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """Return the models that start with `incomplete`: known names, cached repositories, folders and GGUF files."""
    from dsv4cli.engine.checkpoint.names import ALIASES, IN_PACKAGE

    return _matching(incomplete, [*IN_PACKAGE, *ALIASES, SMALLEST_RANDOM, *_cached(ctx), *_paths(incomplete)])


def complete_repository(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """Return the repositories that start with `incomplete`: aliases and repositories in the Hugging Face cache."""
    from dsv4cli.engine.checkpoint.names import ALIASES

    return _matching(incomplete, [*ALIASES, *_cached(ctx)])


def _matching(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete) and PLAIN.fullmatch(name)]


def _cached(context: typer.Context) -> Iterator[str]:
    """Yield the repositories that the Hugging Face cache holds."""
    for name in _listing(context.obj.hub_cache):
        if found := IN_CACHE.fullmatch(name):
            yield f"{found[1]}/{found[2]}"


def _paths(incomplete: str) -> list[str]:
    """Return the folders and GGUF files that complete `incomplete`.

    If the only match is a folder without a model, its content is included, so that the shell adds no space after it.
    """
    found = _entries(incomplete)
    return found + _entries(found[0]) if len(found) == 1 and found[0].endswith("/") else found


def _entries(incomplete: str) -> list[str]:
    parent, slash, start = incomplete.rpartition("/")
    folder = Path(os.path.expanduser(parent + slash) or ".")
    found = []
    for name in _listing(folder):
        if name.startswith(start) and (start or not name.startswith(".")):
            path = folder / name
            if path.is_dir():
                found.append(f"{parent}{slash}{name}" + ("" if (path / "config.json").is_file() else "/"))
            elif name.endswith(".gguf"):
                found.append(f"{parent}{slash}{name}")
    return found


def _listing(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
