"""What OpenAI's two kinds of completions have in common on the wire; no torch."""

from collections.abc import Collection
from typing import Any, Protocol

from dsv4cli.engine.server.refusals import Refusal, to_bytes

DONE = b"data: [DONE]\n\n"
# a comment, which clients skip
IDLE = b": waiting\n\n"


class Counted(Protocol):
    """An answer whose tokens are counted."""

    @property
    def drawn(self) -> int:
        """How many tokens it has, the end token included."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of them are thinking."""

    @property
    def cached(self) -> int:
        """How many tokens of its prompt a cache held."""


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + to_bytes(value) + b"\n\n"


def event_of_refusal(refusal: Refusal) -> bytes:
    """An error in the middle of a stream."""
    return event(refusal.body(anthropic=False)) + DONE


def usage_of(*prompts: tuple[int, Collection[Counted]]) -> dict[str, Any]:
    """How many tokens went in, and came out in all answers together. prompts: the tokens of each, and its answers."""
    counted = [answer for _, answers in prompts for answer in answers]
    read, drawn = sum(tokens for tokens, _ in prompts), sum(one.drawn for one in counted)
    cached = sum(max((one.cached for one in answers), default=0) for _, answers in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in counted)},
    }
