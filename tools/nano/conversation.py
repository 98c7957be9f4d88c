"""Renders an item as text in the official prompt format, split by loss weight."""

import re

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import encode_messages, with_tools
from tools.nano.item import Item, Message

LEARNED, PREDICTABLE, FILLER = 1.0, 0.1, 0.02

# what the assistant writes: after the start of its turn, including the end token
_ANSWERS = re.compile(
    f"(?<={tokens.ASSISTANT}{tokens.THINK_END})(?:.*?){tokens.EOS}"
    f"|(?<={tokens.ASSISTANT}{tokens.THINK_START})(?:.*?){tokens.EOS}",
    re.DOTALL,
)


def rendered(item: Item) -> str:
    """Return the whole conversation, from BOS to the last EOS."""
    return _encoded(item, item.messages)


def prompt(item: Item) -> str:
    """Return the prompt of the last answer, as `dsv4 run` renders the messages before it."""
    return _encoded(item, item.messages[:-1])


def _encoded(item: Item, messages: list[Message]) -> str:
    messages = with_tools(messages, item.tools)
    return "".join(encode_messages(messages, release="v4", thinking=item.thinking, effort=item.effort))


def weighted(item: Item) -> list[tuple[str, float]]:
    """Return the conversation in order, in parts with the loss weight of predicting them."""
    text = rendered(item)
    parts: list[tuple[str, float]] = []
    at = 0
    for match in _ANSWERS.finditer(text):
        parts += _asked(text[at : match.start()], item.filler)
        parts.append((match[0], LEARNED))
        at = match.end()
    assert at == len(text), "the last turn is the assistant's"
    return parts


def _asked(text: str, filler: str) -> list[tuple[str, float]]:
    if not filler or "\n\n" not in text:
        return [(text, PREDICTABLE)]
    first, second = text.rsplit("\n\n", 1) if filler == "back" else text.split("\n\n", 1)
    # the empty line belongs to what follows it: a cut inside it would change the tokens
    if filler == "back":
        return [(first, FILLER), (f"\n\n{second}", PREDICTABLE)]
    return [(first, PREDICTABLE), (f"\n\n{second}", FILLER)]
