"""Questions that nano has not seen, made once."""

from functools import cache
from typing import Any

from tools.nano.heldout import load
from tools.nano.score import kind


@cache
def questions() -> dict[str, list[dict[str, Any]]]:
    """Those of each task."""
    items: dict[str, list[dict[str, Any]]] = {}
    for item in load():
        items.setdefault(kind(item), []).append(item)
    return items


def chosen(counts: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """The first of each task that is named, so many."""
    return {name: questions()[name][:count] for name, count in counts.items()}
