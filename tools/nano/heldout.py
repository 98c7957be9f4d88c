"""The held-out questions that score nano: `python -m tools.nano.heldout` writes them, and `load` reads them in full."""

import json
import random
from pathlib import Path
from typing import Any

from tools.nano.item import Item
from tools.nano.judge import calls_of
from tools.nano.mixture import TASKS
from tools.nano.tasks import retrieval
from tools.nano.tasks.tools import TOOLS

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "nano" / "heldout.json"
COUNTS: dict[str, int] = {
    "sums": 200,
    "tables": 60,
    "products": 200,
    "long_sums": 100,
    "facts": 200,
    "spelling": 80,
    "sorting": 80,
    "counting": 60,
    "units": 80,
    "greetings": 60,
    "chinese": 60,
    "system": 80,
    "multi_turn": 120,
    "tool_use": 160,
}
BANDS: tuple[tuple[int, int], ...] = ((1, 200), (200, 1000), (1000, 2000), (2000, 4000))
"""Tokens between a needle and its question, from and below."""
IN_BAND = 50
FRONT = 60
_DENSITIES = (1.0, 0.5, 0.3, 0.15, 0.05)
_SCHEMAS = {tool["function"]["name"]: tool for tool, _ in TOOLS}


def main() -> None:
    """Write tests/data/nano/heldout.json."""
    rows = [_stored(item) for name, count in COUNTS.items() for item in _different(name, count)]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in [*rows, *_needles()])
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def load(path: Path = FILE) -> list[dict[str, Any]]:
    """Load the items.

    Each has task, messages (to send), tools, thinking, expected (content) and calls (name and arguments). Retrieval
    items have distance too: the tokens between needle and question.
    """
    return [_loaded(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def _different(name: str, count: int) -> list[Item]:
    """Return held-out items of a task, without duplicates."""
    rng = random.Random(f"heldout {name}")
    items: dict[str, Item] = {}
    while len(items) < count:
        item = TASKS[name](rng, "heldout")
        items.setdefault(json.dumps(item.messages[:-1], ensure_ascii=False), item)
    return list(items.values())


def _stored(item: Item) -> dict[str, Any]:
    last = item.messages[-1]
    return {
        "task": item.task,
        "messages": item.messages[:-1],
        "tools": [tool["function"]["name"] for tool in item.tools],
        "thinking": item.thinking,
        "expected": last["content"],
        "calls": calls_of(last.get("tool_calls", [])),
    }


def _needles() -> list[dict[str, Any]]:
    """Return long items as the arguments that generate them again."""
    rng = random.Random("heldout retrieval")
    rows: list[dict[str, Any]] = []
    for low, high in BANDS:
        for nth in range(IN_BAND):
            made = {"seed": f"{low} {nth}", "wanted": rng.randrange(low + 6, high - 16)}
            rows.append({"task": "retrieval", "made": {**made, "density": rng.choice(_DENSITIES)}})
    for nth in range(FRONT):
        low, high = BANDS[nth % len(BANDS)]
        made = {"seed": f"front {nth}", "wanted": rng.randrange(max(low, 20), high)}
        rows.append({"task": "retrieval front", "made": {**made, "density": rng.choice(_DENSITIES)}})
    return rows


def _loaded(row: dict[str, Any]) -> dict[str, Any]:
    if "made" in row:
        made = row["made"]
        make = retrieval.needle_at if row["task"] == "retrieval" else retrieval.front_at
        item = make(random.Random(made["seed"]), "heldout", made["wanted"], made["density"])
        return {**_stored(item), "distance": item.distance}
    return {**row, "tools": [_SCHEMAS[name] for name in row["tools"]]}


if __name__ == "__main__":
    main()
