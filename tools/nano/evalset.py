"""Writes the 200 items of `dsv4 eval nano`, a part of nano's held-out questions: `python -m tools.nano.evalset`."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from dsv4cli.engine.evaluation.forms import NANO_FILE
from tools.nano.heldout import load
from tools.nano.score import kind

# questions with generated answers, by task in about the proportions of the tables in nano's model card
ASKED = {
    "sums": 20, "tables": 6, "products": 16, "long sums": 9, "facts": 20, "spelling": 7, "sorting": 7, "counting": 6,
    "units": 7, "greetings": 5, "chinese": 5, "system": 7, "multi turn": 12, "tools": 15,
    "retrieval 1 to 200": 5, "retrieval 200 to 1000": 4, "retrieval 1000 to 2000": 3, "retrieval 2000 to 4000": 2,
    "retrieval front": 4,
}  # fmt: skip
# others are multiple choice or scored continuations; nano is unsure about words that it never spelled
CHOICES = 20
CONTINUED = {"spelling": 10, "counting": 5, "facts": 5}
CAPITAL = re.compile(r"The capital of (.+) is (.+)\.")

Item = dict[str, Any]


def main() -> None:
    """Write the set."""
    found = groups()
    lines = [*_asked(found), *_choices(found["facts"]), *_continued(found)]
    NANO_FILE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def groups() -> dict[str, list[Item]]:
    """Group the held-out items by task. All that put the question first are one group."""
    found: dict[str, list[Item]] = {}
    for item in load():
        found.setdefault("retrieval front" if item["task"] == "retrieval front" else kind(item), []).append(item)
    return found


def _asked(found: dict[str, list[Item]]) -> Iterator[Item]:
    for task, count in ASKED.items():
        for number, item in enumerate(found[task][:count], 1):
            line = {"id": f"{task} {number}", "task": task, "messages": item["messages"]}
            line |= {"tools": item["tools"]} if item["tools"] else {}
            line |= {"think": True} if item["thinking"] else {}
            yield line | {"score": "exact", "answer": item["calls"] or item["expected"]}


def _choices(facts: list[Item]) -> Iterator[Item]:
    rng = random.Random("choices")
    known = {item["expected"]: item for item in facts if CAPITAL.fullmatch(item["expected"])}
    capitals = [found[2] for expected in known if (found := CAPITAL.fullmatch(expected))]
    for number, (expected, item) in enumerate([*known.items()][-CHOICES:], 1):
        names = CAPITAL.fullmatch(expected)
        assert names is not None
        others = rng.sample([city for city in capitals if city != names[2]], 3)
        choices = [f"The capital of {names[1]} is {city}." for city in sorted([names[2], *others])]
        line = {"id": f"choice {number}", "task": "choice", "messages": item["messages"]}
        yield line | {"score": "choice", "choices": choices, "answer": expected}


def _continued(found: dict[str, list[Item]]) -> Iterator[Item]:
    for task, count in CONTINUED.items():
        for number, item in enumerate(found[task][-count:], 1):
            line = {"id": f"continuation {task} {number}", "task": "continuation", "messages": item["messages"]}
            yield line | {"score": "continuation", "answer": item["expected"]}


if __name__ == "__main__":
    main()
