"""A training conversation, and whether it is held out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

Message = dict[str, Any]
Split = Literal["train", "heldout"]
SYSTEM = "You are a helpful assistant."
KNOWN = "I know this."
"""The reasoning where nothing is to be worked out."""


@dataclass
class Item:
    """A complete conversation. A scorer asks for its last message, which is the assistant's.

    Attributes:
        key: names the last question; determines the split.
        filler: where the user's text has filler: "back", before its last empty line (the question follows it); "front",
            after its first empty line (the question precedes it).
        distance: for retrieval, tokens between a needle and what follows the text.
    """

    task: str
    key: str
    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    thinking: bool = False
    effort: Literal["max"] | None = None
    filler: Literal["", "back", "front"] = ""
    distance: int | None = None


Task = Callable[[random.Random, Split], Item]


def is_heldout(task: str, key: str, percent: int = 8) -> bool:
    """Return whether an item is excluded from training: by a hash of its name, the same in every run."""
    return crc32(f"{task}/{key}".encode()) % 100 < percent


def fits(split: Split, task: str, key: str, percent: int = 8) -> bool:
    """Return whether an item of this name belongs to the split."""
    return is_heldout(task, key, percent) == (split == "heldout")


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "") -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def framed(rng: random.Random, messages: Sequence[Message], share: float = 0.1) -> list[Message]:
    """Return the conversation, sometimes with the usual system message in front."""
    if rng.random() < share:
        return [{"role": "system", "content": SYSTEM}, *messages]
    return list(messages)


def casual(rng: random.Random, question: str) -> str:
    """Return the question, in one of eight cases as a hurried user types it: lowercase first letter, no final mark."""
    if rng.random() < 0.875:
        return question
    small = question[0].lower() + question[1:] if rng.random() < 0.6 else question
    return small.rstrip("?.") if rng.random() < 0.6 else small
