"""Generated conversations, to compare two writers of the prompt format: every role, field and odd text that it has."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import EFFORTS, Message, Tool, check_messages, check_tools, encode_messages, with_tools

WORDS = (
    "", " ", "\n", "word", "Hello there", "  two  spaces ", "line\nbreak\n", "\ttab", "\r\n", "naïve café",
    "你好，世界", "🏋️\u200d♀️", "\u00a0", "\u2028", "\ufeff", "\x00\x01\x1f\x7f", '"quoted"', "it's", "back\\slash",
    "\\n", "\\u003c", "{{ messages }}", "{% if %}", "{# no #}", "-%}", "<tool_result>", "</tool_result>",
    "<b>&amp;</b>", "%s {} {0}", "0", "null", "false", *tokens.SPECIAL, f'<{tokens.DSML}invoke name="f">', "## Tools",
    "Reasoning Effort: max",
)  # fmt: skip
NAMES = ("f", "get_weather", "a-b.c", "名前", "items", "keys", "get", "length", "x y", 'quo"te', "")
NUMBERS = (
    0, 1, -1, 7, 10**6, 2**53, -(2**53) - 1, 2**63 - 1, -(2**63), 0.0, -0.0, 1.0, -2.5, 0.1, 0.1 + 0.2, 48.8584, 1e-4,
    1e-5, 1.5e-7, 123456.0, 1234567.5, 1e6, 1e15, 1e16, 1e22, 1.5e300, 3.141592653589793, 99.99, -0.001,
)  # fmt: skip


@dataclass(frozen=True)
class Talk:
    """A conversation and the settings of its prompt. `tools` and `schema` are given apart from the messages."""

    release: Release
    messages: list[Message]
    tools: list[Tool]
    schema: dict[str, Any] | None
    thinking: bool
    effort: str | None
    drop_thinking: bool

    def official(self) -> str:
        """Return the prompt that the encoder writes."""
        messages = with_tools(check_messages(self.messages), check_tools(self.tools))
        if self.schema:
            messages = _with_schema(messages, self.schema)
        parts = encode_messages(
            messages,
            release=self.release,
            thinking=self.thinking,
            effort=self.effort,
            drop_thinking=self.drop_thinking,
        )
        return "".join(parts)

    def variables(self) -> dict[str, Any]:
        """Return the variables of a template for this prompt."""
        messages = [as_mappings(message) for message in self.messages]
        values: dict[str, Any] = {"messages": messages, "thinking": self.thinking, "drop_thinking": self.drop_thinking}
        values |= {"add_generation_prompt": True, "tools": self.tools or None}
        values |= {"reasoning_effort": self.effort} if self.effort else {}
        return values | ({"response_format": self.schema} if self.schema else {})


def _with_schema(messages: list[Message], schema: dict[str, Any]) -> list[Message]:
    at = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    if at is None:
        return [{"role": "system", "content": "", "response_format": schema}, *messages]
    first = messages[at]
    return [*messages[:at], {"response_format": schema, **first}, *messages[at + 1 :]]


def as_mappings(message: Message) -> Message:
    """Return a message whose calls have their arguments as objects, as templates expect them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def talks(seed: int) -> Iterator[Talk]:
    """Yield conversations without end, the same for the same seed."""
    generator = _Generator(seed)
    while True:
        yield generator.next()


class _Generator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> Talk:
        """Return the next conversation. Half of them are plausible dialogues, the others any order of roles."""
        release: Release = self._any("v4", "0731")
        thinking = self._maybe(0.7)
        messages = self._dialogue() if self._maybe(0.5) else self._any_order()
        return Talk(
            release,
            messages,
            self._tools() if self._maybe(0.3) else [],
            self._schema() if self._maybe(0.1) else None,
            thinking,
            self._any(*EFFORTS[release]) if self._maybe(0.6) else None,
            self._maybe(0.7),
        )

    def _maybe(self, share: float) -> bool:
        return self._random.random() < share

    def _any(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _several(self, make: Callable[[], Any], most: int) -> list[Any]:
        return [make() for _ in range(self._random.randint(0, most))]

    def _text(self) -> str:
        return self._any("", " ", "\n").join(self._any(*WORDS) for _ in range(self._random.randint(0, 6)))

    def _content(self, *, notes: bool = False) -> Any:
        if self._maybe(0.85):
            return self._text()
        parts = self._several(lambda: {"type": "text", "text": self._text()}, 3)
        return parts + ([{"type": "image_url", "image_url": {"url": "x"}}] if notes and self._maybe(0.5) else [])

    def _value(self, depth: int = 3) -> Any:
        kind = self._random.randrange(8 if depth else 5)
        if kind < 3:
            return self._text()
        if kind == 3:
            return self._any(*NUMBERS, round(self._random.uniform(-1000, 1000), self._random.randint(0, 6)))
        if kind == 4:
            return self._any(True, False, None)
        if kind == 5:
            return self._several(lambda: self._value(depth - 1), 3)
        return self._object(depth - 1)

    def _object(self, depth: int = 3) -> dict[str, Any]:
        return {
            self._any(*NAMES) if self._maybe(0.7) else self._text(): self._value(depth)
            for _ in range(self._random.randint(0, 4))
        }

    def _schema(self) -> dict[str, Any]:
        return {"type": "object", **self._object()}

    def _tools(self) -> list[Tool]:
        return [*self._several(self._tool, 2), self._tool()]

    def _tool(self) -> Tool:
        function = {"name": self._any(*NAMES), "description": self._text(), "parameters": self._schema()}
        return {"type": "function", "function": function | ({"strict": True} if self._maybe(0.2) else {})}

    def _call(self) -> dict[str, Any]:
        layout = self._any({}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False})
        function = {"name": self._any(*NAMES), "arguments": json.dumps(self._object(), **layout)}
        ids = {"id": self._any("a", "b", "c", "d", "")} if self._maybe(0.9) else {}
        return {"type": "function", "function": function} | ids

    def _message(self, role: str) -> Message:
        message: Message = {"role": role, "content": self._content(notes=role == "tool")}
        if role == "tool":
            return message | {"tool_call_id": self._any("a", "b", "c", "d", "z", "")}
        if role == "assistant":
            return self._assistant(message)
        if role == "developer" and not message["content"]:
            message["content"] = "Investigate."
        if role in ("system", "developer"):
            message |= {"tools": self._tools()} if self._maybe(0.15) else {}
            message |= {"response_format": self._schema()} if self._maybe(0.1) else {}
        return message | ({"task": self._any(*tokens.TASKS)} if self._maybe(0.08) else {})

    def _assistant(self, message: Message) -> Message:
        if self._maybe(0.6):
            message |= {"reasoning_content": self._text()}
        if self._maybe(0.4):
            message |= {"tool_calls": [self._call() for _ in range(self._random.randint(1, 4))]}
            message |= {"content": None} if self._maybe(0.4) else {}
        message |= {"wo_eos": True} if self._maybe(0.1) else {}
        return message | ({"task": self._any(*tokens.TASKS)} if self._maybe(0.05) else {})

    def _any_order(self) -> list[Message]:
        roles = ("system", "user", "user", "assistant", "assistant", "tool", "tool", "developer", "latest_reminder")
        return [self._message(self._any(*roles)) for _ in range(self._random.randint(1, 9))]

    def _dialogue(self) -> list[Message]:
        messages = [self._message("system")] if self._maybe(0.6) else []
        for _ in range(self._random.randint(1, 4)):
            messages.append(self._message("user"))
            for _ in range(self._random.randint(0, 2)):
                asking = self._message("assistant") | {"tool_calls": [self._call(), self._call()]}
                results = [
                    self._message("tool") | {"tool_call_id": call.get("id", "z")} for call in asking["tool_calls"]
                ]
                self._random.shuffle(results)
                messages += [asking, *results]
            messages.append(self._message("assistant"))
        return messages + ([self._message("user")] if self._maybe(0.7) else [])


def difference(ours: str, official: str) -> Mapping[str, str]:
    """Return the surroundings of the first difference between two texts."""
    at = next((i for i, pair in enumerate(zip(ours, official, strict=False)) if pair[0] != pair[1]), len(official))
    return {"ours": ours[max(0, at - 60) : at + 60], "official": official[max(0, at - 60) : at + 60]}
