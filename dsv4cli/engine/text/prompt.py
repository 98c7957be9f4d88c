"""OpenAI-shaped messages and tools: validation, and encoding to the prompt text that the model was trained on.

The format is that of the official encoder. Its two releases differ only in the effort instructions at the front.
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
"""The reasoning efforts of each release, lowest first. The lowest adds no text to the prompt."""
# efforts that clients request: for little effort (mapped to the lowest that the release has) and for the most
_LITTLE, _MOST = ("minimal", "low", "medium"), ("xhigh", "max")
EFFORT_WORDS = (*_LITTLE, "high", *_MOST)

_ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


def think_options(release: Release, level: str) -> tuple[bool, str | None]:
    """Return `thinking` and `effort` of `encode_messages` for a thinking level: "off" or one of `EFFORTS`.

    Raises:
        UsageError: the release does not have this level.
    """
    if level == "off":
        return False, None
    _check_effort(level, release, ("off", *EFFORTS[release]))
    return True, level


def level_of(word: str, release: Release) -> str:
    """Return the release's reasoning effort for one of `EFFORT_WORDS`."""
    return EFFORTS[release][0] if word in _LITTLE else "max" if word in _MOST else word


def effort_text(release: Release, effort: str) -> str:
    """Return the text with which a prompt of this reasoning effort begins."""
    return _EFFORT_TEXTS[release][effort]


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the conversation with the tools in its first system message, which is created if there is none."""
    if not tools:
        return list(messages)
    at = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    if at is None:
        return [{"role": "system", "content": "", "tools": list(tools)}, *messages]
    system = {**messages[at], "tools": [*(messages[at].get("tools") or ()), *tools]}
    return [*messages[:at], system, *messages[at + 1 :]]


def without_tools(messages: Sequence[Message]) -> tuple[list[Message], list[Tool]]:
    """Return the conversation without tools, and the tools of its system messages.

    A system message that contains only tools is removed.
    """
    tools = [tool for message in messages if message["role"] == "system" for tool in message.get("tools") or ()]
    plain = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
    return [one for one in plain if one["role"] != "system" or one.get("content")], tools


def answerable(messages: Sequence[Message]) -> list[Message]:
    """Return a validated conversation in a form that the model can answer.

    - System messages before all others are merged into one, and so are their tools.
    - Later system messages become user messages, because the format starts no answer after a system message. So does
      the last system message if there are no other messages.
    - If the last message is an answer, the model continues it, unless it is empty.
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
    """Return the merged fields of system messages besides their texts: all tools, and the last response format."""
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
    """Return the prompt of a conversation in parts. Text from the messages is `Given`; text of the format is not.

    The prompt begins with BOS, and ends with `<think>` or `</think>` unless the last message is the assistant's.

    Args:
        messages: as `check_messages` returns them; not modified.
        drop_thinking: leave out the reasoning, and with `thinking` the developer messages, before the last question. A
            conversation with tools keeps them.
        context: earlier messages that the model has already processed. They affect the encoding, but neither they nor
            BOS are written again.

    Raises:
        UsageError: the format does not have a role, task or effort.
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
    prefix = effort_text(release, effort) if thinking and effort and sequence else ""
    return [tokens.BOS + prefix, *parts]


def check_messages(value: object) -> list[Message]:
    """Validate the conversation in a JSON value, and return its messages.

    Fields that the format does not use (`name`, `refusal`, ...) are accepted.

    Raises:
        UsageError: a message is invalid; the error names the message, the field and the expected value.
    """
    if not value:
        raise _wrong("messages", "a list of messages", value)
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(_items(value, "messages"))]


def check_tools(value: object, where: str = "tools") -> list[Tool]:
    """Validate the OpenAI-shaped tools in a JSON value, and return them.

    Raises:
        UsageError: a tool is invalid; the error names the tool, the field and the expected value.
    """
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
    """Validate a message's content. It may be absent if the message has calls, tools or a response format instead."""
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
        raise _wrong(where, "a non-empty string", content)


def _check_part(value: object, where: str, *, any_type: bool) -> None:
    """Validate a part of a content list. It must be text, except in a tool's result, where others become a note."""
    part = _mapping(value, where)
    kind = _text(part.get("type"), f"{where}.type")
    if kind == "text":
        _text(part.get("text"), f"{where}.text")
    elif not any_type:
        raise _wrong(f"{where}.type", '"text", the only content that DeepSeek-V4 accepts', kind)


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
        raise _wrong(where, "a string with the arguments as JSON", value)


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
