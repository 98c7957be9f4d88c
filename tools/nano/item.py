"""What is one training conversation, and is it held out?"""

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
    """A finished conversation: its last message is the assistant's, and is what a scorer asks for.

    `key` names what is asked last; it decides the split.
    `filler`: the user's text before its last empty line is filler ("back": the question follows it), or that behind
    the first. `distance`: tokens between a needle and what follows the text, for retrieval.
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
    """Whether an item is kept out of training: a hash of its name, the same in every run."""
    return crc32(f"{task}/{key}".encode()) % 100 < percent


def fits(split: Split, task: str, key: str, percent: int = 8) -> bool:
    """Whether an item of this name belongs to the split."""
    return is_heldout(task, key, percent) == (split == "heldout")


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str = "") -> Message:
    """An assistant's message."""
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def framed(rng: random.Random, messages: Sequence[Message], share: float = 0.1) -> list[Message]:
    """The conversation, sometimes after the usual system message."""
    if rng.random() < share:
        return [{"role": "system", "content": SYSTEM}, *messages]
    return list(messages)


def casual(rng: random.Random, question: str) -> str:
    """The question as a hurried user types it, one time in eight: first letter small, no mark at the end."""
    if rng.random() < 0.875:
        return question
    small = question[0].lower() + question[1:] if rng.random() < 0.6 else question
    return small.rstrip("?.") if rng.random() < 0.6 else small
