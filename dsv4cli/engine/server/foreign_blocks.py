"""Blocks of Anthropic's messages that other servers wrote or that carry documents, as text. Does not import torch."""

from typing import Any

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.text.prompt_text import to_json

# fields of results that are for programs, not for the model
SILENT = ("type", "id", "tool_use_id", "encrypted_content", "encrypted_index", "cache_control", "caller")


def document_text(block: Fields) -> str | None:
    """Return the text of a `document` or `search_result` block; None for other blocks and documents without text.

    Its title, its source and its context come first, each on a line.
    """
    kind, source = block.value("type"), block.value("source")
    if kind == "search_result":
        content, heads = block.value("content"), ["title", "source"]
    elif kind == "document" and isinstance(source, dict):
        content, heads = (
            source.get("data") if source.get("type") == "text" else source.get("content"),
            ["title", "context"],
        )
    else:
        return None
    text = _joined(content)
    if text is None:
        return None
    lines = [value for name in heads if isinstance(value := block.value(name), str) and value]
    return "\n".join([*lines, text])


def foreign_note(block: Fields) -> str | None:
    """Return a note about a call of a server's tool or its result, which stays in a history; None for other blocks."""
    kind = block.value("type")
    if not isinstance(kind, str) or kind == "tool_use" or not kind.endswith(("_tool_use", "_tool_result")):
        return None
    if kind.endswith("_tool_use"):
        return f"[{kind} {block.value('name')}: {to_json(block.value('input') or {})}]"
    content = block.value("content")
    results = content if isinstance(content, list) else [content]
    return f"[{kind}: {'; '.join(filter(None, map(_result, results)))}]"


def _result(given: Any) -> str:
    """Return what a tool of a server found: a text, or the fields that a model can read."""
    if not isinstance(given, dict):
        return "" if given is None else str(given)
    if isinstance(given.get("text"), str):
        return str(given["text"])
    return ", ".join(f"{name}: {_shown(value)}" for name, value in given.items() if name not in SILENT and value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _joined(content: Any) -> str | None:
    """Return a text, or the joined texts of a list of text blocks; None if there is anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [one["text"] for one in content if isinstance(one, dict) and isinstance(one.get("text"), str)]
    return "\n\n".join(texts) if len(texts) == len(content) else None
