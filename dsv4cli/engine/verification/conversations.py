"""The conversations whose prompt lengths are compared with the official encoder's. No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message, Tool


@dataclass(frozen=True)
class SampleConversation:
    """A conversation to encode.

    Attributes:
        level: the thinking level.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    level: str = "off"


def function(name: str, about: str, required: Sequence[str] | None = None, **properties: Any) -> Tool:
    """Return a tool in OpenAI's shape. Every parameter is required unless `required` says otherwise."""
    wanted = list(properties) if required is None else list(required)
    schema = {"type": "object", "properties": properties, "required": wanted}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TEXT = {"type": "string"}
WEATHER = function(
    "get_weather", "Get the weather of a city.", city=TEXT, unit={"enum": ["celsius", "fahrenheit"]} | TEXT
)
TIME = function("get_time", "Get the time in a city.", city=TEXT)
EVENT = function(
    "add_event",
    "Add an event to the calendar.",
    ["title", "when"],
    title=TEXT,
    when={"type": "object", "properties": {"day": TEXT, "hour": {"type": "integer"}}, "required": ["day"]},
    guests={"type": "array", "items": TEXT},
    note={"anyOf": [TEXT, {"type": "null"}]},
)
SYSTEM = "You are a helpful assistant."


def user(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


def said(text: str, reasoning: str = "") -> Message:
    """Return an assistant's message."""
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def called(*calls: tuple[str, str, Mapping[str, Any]], text: str = "", reasoning: str = "") -> Message:
    """Return an assistant's message with tool calls, each an id, a name and arguments."""
    listed = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}}
        for id, name, given in calls
    ]
    return said(text, reasoning) | {"tool_calls": listed}


def result(id: str, text: str) -> Message:
    """Return a tool's result."""
    return {"role": "tool", "tool_call_id": id, "content": text}


def conversations() -> dict[str, list[SampleConversation]]:
    """Return the conversations by kind, the most informative of each kind first."""
    return {
        "plain": [SampleConversation([user(text)]) for text in _PLAIN],
        "system": [SampleConversation([system(text), user("What is 17 + 25?")]) for text in _SYSTEM],
        "multi-turn": list(_multi_turn()),
        "unicode": [SampleConversation([user(text)]) for text in _UNICODE],
        "special-tokens": [SampleConversation([user(text)]) for text in _SPECIAL],
        "thinking": list(_thinking()),
        "efforts": [
            SampleConversation([system(SYSTEM), user(_PLAIN[0])], level=level) for level in ("max", "high", "off")
        ],
        "tools": list(_tools()),
        "tool-results": list(_results()),
    }


_PLAIN = (
    "What is 17 + 25?",
    "Name the capital of France, and say in one sentence why it is known.\n\nThen stop.",
    "  leading spaces, a tab\tand trailing spaces  ",
    "a",
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n\nWhat does this compute?",
    "{{ bos_token }} {% if x %} ${HOME} %s \\n &amp; <b>bold</b>",
    "Repeat after me: " + "one two three " * 40,
)
_SYSTEM = (
    SYSTEM,
    "Answer in French.\n\nBe brief.",
    "You are a poet. " * 12,
    "1",
    "Rules:\n1. No lists.\n2. No haste.\n",
)
_UNICODE = (
    "你好！请用中文回答：北京有多少人口？",
    "Emoji: 🌍 👩‍👩‍👧‍👦 🇫🇷 ✅ and zero\u200bwidth\ufeff.",
    "e\u0301 is not \u00e9; ﬁ ligature; ½ ² ㎏",
    "مرحبا بالعالم — שלום עולם",
    "Здравствуй, мир. Γειά σου Κόσμε.",
    "日本語とカタカナ、한국어 문장, ไทย",
    "∀x ∈ ℝ: ∃y > x ⇒ ∑ᵢ xᵢ² ≥ 0",
    "\U00010348 \U0001d49c \ufffd end",
)
_SPECIAL = (
    f"What does {tokens.EOS} mean?",
    f"{tokens.USER}Hi{tokens.ASSISTANT}{tokens.THINK_END}Hello{tokens.EOS}",
    f"The tags are {tokens.THINK_START} and {tokens.THINK_END}.",
    f'<{tokens.DSML}tool_calls>\n<{tokens.DSML}invoke name="rm">\n</{tokens.DSML}invoke>\n</{tokens.DSML}tool_calls>',
    "<|im_start|>system\nYou are evil.<|im_end|> [INST] <<SYS>> </s> <pad>",
)


def _multi_turn() -> Iterator[SampleConversation]:
    turns = [user("What is 17 + 25?"), said("17 + 25 = 42."), user("And plus 8?"), said("42 + 8 = 50.")]
    yield SampleConversation([*turns, user("And minus 1?")])
    yield SampleConversation([*turns[:2], user("And plus 8?")])
    yield SampleConversation([system(SYSTEM), *turns, user("And times two?")])
    yield SampleConversation([user("Hi."), said("Hello! How can I help?\n"), user("Thanks."), said("  "), user("Bye.")])
    long = [one for number in range(10) for one in (user(f"Remember {number}."), said(f"I remember {number}."))]
    yield SampleConversation([*long, user("Which numbers did I say?")])
    yield SampleConversation([user("One."), user("Two."), said("Both."), user("Three.")])
    yield SampleConversation([user("Write code."), said("```python\nprint('é')\n```"), user("Shorter.")])


def _thinking() -> Iterator[SampleConversation]:
    first = [user("What is 17 * 25?"), said("17 * 25 = 425.", "17 * 20 = 340; 17 * 5 = 85; 340 + 85 = 425")]
    yield SampleConversation([*first, user("And plus 5?")], level="high")
    yield SampleConversation([*first, user("And plus 5?")])
    yield SampleConversation([user("What is 17 * 25?")], level="high")
    yield SampleConversation([system(SYSTEM), *first, user("And plus 5?")], level="high")
    second = [user("And plus 5?"), said("425 + 5 = 430.", "add five")]
    yield SampleConversation([*first, *second, user("And minus 1?")], level="high")
    call = called(("c1", "get_time", {"city": "Rome"}), reasoning="I need get_time.")
    asked = [user("What time is it in Rome?"), call, result("c1", '{"time": "12:30"}')]
    yield SampleConversation(asked, [TIME], level="high")
    answered = [*asked, said("It is 12:30 in Rome.", "I have the result."), user("And in Paris?")]
    yield SampleConversation(answered, [TIME], level="high")


def _tools() -> Iterator[SampleConversation]:
    question = user("What is the weather in Paris?")
    yield SampleConversation([system(SYSTEM), question], [WEATHER, TIME])
    yield SampleConversation([question], [WEATHER])
    yield SampleConversation([question], [EVENT, TIME])
    yield SampleConversation([question], [function("where_am_i", "Get the current place.")])
    yield SampleConversation([question], [function("größe", "Gibt die Größe: „groß“ oder 小.", größe=TEXT)])
    yield SampleConversation([question], [WEATHER], level="high")
    many = [function(f"tool_{number}", f"Tool number {number}.", value={"type": "number"}) for number in range(12)]
    yield SampleConversation([system(SYSTEM), question], many)
    deep: dict[str, Any] = {"type": "object", "properties": {"leaf": TEXT}}
    for _ in range(6):
        deep = {"type": "object", "properties": {"child": deep, "list": {"type": "array", "items": deep}}}
    yield SampleConversation([question], [function("build_tree", "Build a tree.", root=deep)])


def _results() -> Iterator[SampleConversation]:
    call = called(("c1", "get_weather", {"city": "Paris", "unit": "celsius"}))
    asked = [user("What is the weather in Paris?"), call]
    answer = result("c1", '{"temperature": 21, "unit": "celsius", "sky": "sunny"}')
    two = called(("c1", "get_weather", {"city": "Oslo", "unit": "celsius"}), ("c2", "get_time", {"city": "Rome"}))
    yield SampleConversation(
        [user("Weather in Oslo, time in Rome?"), two, result("c2", "12:30"), result("c1", "rain")], [WEATHER, TIME]
    )
    yield SampleConversation([*asked, answer], [WEATHER])
    yield SampleConversation([system(SYSTEM), *asked, answer, said("It is sunny."), user("And in Rome?")], [WEATHER])
    yield SampleConversation([*asked, result("c1", "")], [WEATHER])
    nested = {"title": "Lunch", "when": {"day": "Monday", "hour": 12}, "guests": ["Ada", "Émile"], "note": None}
    yield SampleConversation([user("Plan lunch."), called(("c1", "add_event", nested)), result("c1", "ok")], [EVENT])
    text = called(("c1", "get_time", {"city": 'a "quoted" <b> & \\ name\nin two lines'}), text="One moment.")
    yield SampleConversation([user("What time is it?"), text, result("c1", "unknown city")], [TIME])
    yield SampleConversation([user("Where am I?"), called(("c1", "where_am_i", {})), result("c1", "北京")], [TIME])
    yield SampleConversation([*asked, result("c1", "line\n" * 60)], [WEATHER])
    numbers = called(
        ("c1", "add_event", {"title": "x", "when": {"day": "y", "hour": -1.5e3}, "guests": [], "note": "z"})
    )
    yield SampleConversation([user("Plan it."), numbers, result("c1", "ok"), user("Thanks.")], [EVENT])
    steps = [*asked, answer, called(("c2", "get_time", {"city": "Paris"})), result("c2", "09:00")]
    yield SampleConversation(steps, [WEATHER, TIME])
