"""A conversation as OpenAI-shaped messages: checked, given tools, and encoded to the text the model was trained on.

The format is the official encoder's. Its two releases differ only in what the efforts write at the front.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import prompt_text as texts
from dsv4cli.engine.text import tokens, turns
from dsv4cli.engine.text.turns import text_of
from dsv4cli.errors import UsageError

Message = dict[str, Any]
Tool = dict[str, Any]
_EFFORT_TEXTS: dict[Release, dict[str, str]] = {
    "v4": {"high": "", "max": texts.EFFORT_ABSOLUTE},
    "0731": {"low": "", "high": texts.EFFORT_ABSOLUTE, "max": texts.EFFORT_BEYOND},
}
EFFORTS: dict[Release, tuple[str, ...]] = {release: tuple(levels) for release, levels in _EFFORT_TEXTS.items()}
"""The reasoning efforts of each release, least first; the first writes nothing."""

_ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


def think_options(release: Release, level: str) -> tuple[bool, str | None]:
    """`thinking` and `effort` of `encode_messages` for a level as a user names it: "off" or one of `EFFORTS`."""
    if level == "off":
        return False, None
    _check_effort(level, release, ("off", *EFFORTS[release]))
    return True, level


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with the request's tools in its first system message, an empty one in front if it has none."""
    if not tools:
        return list(messages)
    at = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    if at is None:
        return [{"role": "system", "content": "", "tools": list(tools)}, *messages]
    system = {**messages[at], "tools": [*(messages[at].get("tools") or ()), *tools]}
    return [*messages[:at], system, *messages[at + 1 :]]


def without_tools(messages: Sequence[Message]) -> tuple[list[Message], list[Tool]]:
    """The conversation and the tools that its system messages name, apart; a system message that says nothing else
    goes."""
    tools = [tool for message in messages if message["role"] == "system" for tool in message.get("tools") or ()]
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
    return [one for one in plain if one["role"] != "system" or one.get("content")], tools


def answerable(messages: Sequence[Message]) -> list[Message]:
    """Return a checked conversation as one behind which the format begins an answer.

    The texts of the system before all other messages become one message, and so do its tools. What the system says
    later belongs to the user's turn, for no answer begins behind a system message; so does its last text where nobody
    else speaks. A conversation that ends with an answer continues that answer, unless it is empty.
    """
    placed = _placed(messages)
    if not placed or placed[-1]["role"] != "assistant":
        return placed
    *before, last = placed
    begun = text_of(last.get("content")) or last.get("reasoning_content") or last.get("tool_calls")
    asked = bool(before) and before[-1]["role"] in ("user", "developer", "tool")
    return before if asked and not begun else [*before, {**last, "wo_eos": True}]


def _placed(messages: Sequence[Message]) -> list[Message]:
    spoken = [i for i, message in enumerate(messages) if message["role"] != "system"]
    first = min(spoken, default=len(messages) - 1)
    late = [message for message in messages[first:] if message["role"] == "system"]
    if first < 2 and not late:
        return list(messages)
    texts = [text_of(message.get("content")) for message in messages[:first]]
    system: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    for name, value in _instructions([*messages[:first], *late]).items():
        system[name] = value
    rest = [
        {"role": "user", "content": text_of(one.get("content"))} if one["role"] == "system" else one
        for one in messages[first:]
    ]
    return [*([system] if first or len(system) > 2 else []), *rest]


def _instructions(system: Sequence[Message]) -> dict[str, Any]:
    """What system messages have besides their texts: all tools, and the last response format."""
    tools = [tool for message in system for tool in message.get("tools") or ()]
    formats = [message["response_format"] for message in system if message.get("response_format")]
    return ({"tools": tools} if tools else {}) | ({"response_format": formats[-1]} if formats else {})


def encode_messages(
    messages: Sequence[Message],
    *,
    release: Release,
    thinking: bool,
    effort: str | None = None,
    drop_thinking: bool = True,
    context: Sequence[Message] | None = None,
) -> list[str]:
    """The prompt of `messages`, which are as `check_messages` returns them and are left as they are, in parts: what the
    messages say is `Given`, what the format adds is not.

    It begins with BOS and ends where the model goes on: after `<think>` or `</think>`, unless the last message is
    the assistant's. `context` is what the model has read already: it counts, but is not written again, nor is BOS.
    `drop_thinking` leaves out the reasoning (and the developer messages) from before the last question; a
    conversation with tools keeps them. UsageError for a role, task or effort that the format does not have.
    """
    if effort is not None:
        _check_effort(effort, release, EFFORTS[release])
    sequence = turns.fold(context or (), written=False) + turns.fold(messages, written=True)
    turns.order_results(sequence)
    keep = not drop_thinking or any(turn.message.get("tools") for turn in sequence)
    if thinking and not keep:
        sequence = turns.without_developers(sequence)
    parts = turns.render(sequence, thinking=thinking, keep=keep)
    if context:
        return parts
    prefix = _EFFORT_TEXTS[release][effort] if thinking and effort and sequence else ""
    return [tokens.BOS + prefix, *parts]


def check_messages(value: object) -> list[Message]:
    """The conversation in a JSON value; UsageError naming the message, the field and what belongs there.

    Fields that the format has no place for (`name`, `refusal`, ...) are let through.
    """
    if not value:
        raise _wrong("messages", "a list of messages", value)
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(_items(value, "messages"))]


def check_tools(value: object, where: str = "tools") -> list[Tool]:
    """The OpenAI-shaped tools in a JSON value; UsageError naming the tool, the field and what belongs there."""
    tools = _items(value, where)
    for i, tool in enumerate(tools):
        _check_function(tool, f"{where}[{i}]", {"name": _text})
    return tools


def _check_effort(effort: str, release: Release, allowed: Sequence[str]) -> None:
    if effort not in allowed:
        raise UsageError(f'release {release} has no thinking level "{effort}"', f"use one of {', '.join(allowed)}")


_Check = Callable[[object, str], object]


def _check_message(value: object, where: str) -> Message:
    message = _mapping(value, where)
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for name, check in _FIELDS.items():
        if message.get(name) is not None:
            check(message[name], f"{where}.{name}")
    _check_content(message, where)
    if role == "tool":
        _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    return message


def _check_content(message: Message, where: str) -> None:
    """Content may be absent where something else is said: calls, tools, a response format."""
    content, role = message.get("content"), message["role"]
    instead = {"assistant": ("tool_calls",), "system": ("tools", "response_format")}.get(role, ())
    if content is None and any(message.get(name) for name in instead):
        return
    where += ".content"
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{where}[{i}]", any_type=role == "tool")
    elif not isinstance(content, str):
        raise _wrong(where, "a string or a list of text parts", content)
    if role == "developer" and not content:
        raise _wrong(where, "a text that is not empty", content)


def _check_part(value: object, where: str, *, any_type: bool) -> None:
    """A part of a content list. The model reads text; only a tool's result may have other parts, and is noted so."""
    part = _mapping(value, where)
    kind = _text(part.get("type"), f"{where}.type")
    if kind == "text":
        _text(part.get("text"), f"{where}.text")
    elif not any_type:
        raise _wrong(f"{where}.type", '"text", which is all that DeepSeek-V4 reads', kind)


def _check_calls(value: object, where: str) -> None:
    for i, call in enumerate(_items(value, where)):
        _check_function(call, f"{where}[{i}]", {"name": _text, "arguments": _arguments})
        if call.get("id") is not None:
            _text(call["id"], f"{where}[{i}].id")


def _check_function(value: object, where: str, fields: Mapping[str, _Check]) -> None:
    item = _mapping(value, where)
    if item.get("type", "function") != "function":
        raise _wrong(f"{where}.type", '"function"', item["type"])
    function = _mapping(item.get("function"), f"{where}.function")
    for name, check in fields.items():
        check(function.get(name), f"{where}.function.{name}")


def _check_task(value: object, where: str) -> None:
    if not isinstance(value, str) or value not in tokens.TASKS:
        raise _wrong(where, f"one of {', '.join(tokens.TASKS)}", value)


def _items(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    return value


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a string", value)
    return value


def _arguments(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(where, "the arguments' JSON text in a string", value)


def _flag(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)


_FIELDS: Mapping[str, _Check] = {
    "reasoning_content": _text,
    "tool_calls": _check_calls,
    "tools": check_tools,
    "response_format": _mapping,
    "task": _check_task,
    "wo_eos": _flag,
}


def _wrong(where: str, expected: str, value: object) -> UsageError:
    got = "nothing" if value is None else repr(value)
    if len(got) > 60:
        got = got[:60] + "..."
    return UsageError(f"{where}: expected {expected}, got {got}", "write messages as for the OpenAI chat API")
