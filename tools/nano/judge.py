"""Judges replies strictly: the expected text, or the expected calls with equal arguments."""

import json
from collections.abc import Mapping
from typing import Any


def is_right(item: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    """Return whether a reply is what the held-out item expects.

    Whitespace around the content and the reasoning are ignored.

    Args:
        item: as `heldout.load` returns it.
        reply: has `content` and `tool_calls`, as `Answer.record()` and `Reply.as_message()` return them.
    """
    called = calls_of(reply.get("tool_calls") or [])
    content: str = reply.get("content") or ""
    return called is not None and (called, content.strip()) == (item["calls"], item["expected"])


def calls_of(tool_calls: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return name and arguments of OpenAI-style calls; None if arguments are not JSON."""
    try:
        return [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            for call in tool_calls
        ]
    except ValueError:
        return None
