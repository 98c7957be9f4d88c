"""The response format that both of OpenAI's completion APIs share. Does not import torch."""

from collections.abc import Collection
from typing import Any, Protocol

from dsv4cli.engine.server.refusals import Refusal, to_bytes

DONE = b"data: [DONE]\n\n"
# an SSE comment, which clients ignore
IDLE = b": waiting\n\n"


class Counted(Protocol):
    """An answer with token counts."""

    @property
    def sampled(self) -> int:
        """Number of tokens generated, including the end token."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of generated tokens that belong to the thinking."""

    @property
    def cached(self) -> int:
        """Number of prompt tokens found in the prefix cache."""


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + to_bytes(value) + b"\n\n"


def event_of_refusal(refusal: Refusal) -> bytes:
    """Return an error as an event, followed by the end of the stream."""
    return event(refusal.body(anthropic=False)) + DONE


def usage_of(*prompts: tuple[int, Collection[Counted]]) -> dict[str, Any]:
    """Return the token counts of prompts and all their answers, in OpenAI's shape.

    Args:
        prompts: (number of tokens, answers) of each prompt.
    """
    counted = [answer for _, answers in prompts for answer in answers]
    read, sampled = sum(tokens for tokens, _ in prompts), sum(one.sampled for one in counted)
    cached = sum(max((one.cached for one in answers), default=0) for _, answers in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in counted)},
    }
