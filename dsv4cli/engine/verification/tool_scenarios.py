"""The hundred tool scenarios of the checks. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.verification.conversations import (
    EVENT,
    SYSTEM,
    TEXT,
    TIME,
    WEATHER,
    called,
    function,
    result,
    system,
    user,
)

Choice = Literal["auto", "none", "required", "named"]
NUMBER, WHOLE, FLAG = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
CONVERT = function("convert_currency", "Convert money.", None, **{"amount": NUMBER, "from": TEXT, "to": TEXT})
SEARCH = function("search", "Search the web.", query=TEXT)
MESSAGE = function("send_message", "Send a message to a person.", to=TEXT, text=TEXT)
TIMER = function("set_timer", "Set a timer.", minutes=WHOLE)
PRICE = function("get_price", "Get the price of an item.", item=TEXT)
WHERE = function("where_am_i", "Get the current place.")
ORDER = function(
    "place_order",
    "Order items.",
    items={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": TEXT, "count": WHOLE},
            "required": ["name", "count"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    address={
        "type": "object",
        "properties": {"street": TEXT, "city": TEXT},
        "required": ["street", "city"],
        "additionalProperties": False,
    },
)
UNION = function(
    "set_value",
    "Set a value.",
    key={"type": "string", "enum": ["volume", "name", "alarm"]},
    value={"anyOf": [WHOLE, TEXT, FLAG, {"type": "null"}]},
)
CITIES = ("Paris", "Rome", "Oslo", "Madrid", "Tokyo", "Cairo", "Lima", "Berlin")
THINGS = ("lamp", "chair", "bottle", "book", "clock", "basket", "ladder", "mirror")


@dataclass(frozen=True)
class ToolScenario:
    """A request with tools.

    Attributes:
        kind: what is special about it.
        choice: `tool_choice`; "named" requires the first tool.
    """

    kind: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    choice: Choice = "auto"
    stream: bool = False
    most: int = 64

    @property
    def fields(self) -> dict[str, Any]:
        """The additional fields of the request."""
        name = self.tools[0]["function"]["name"]
        choice = {"type": "function", "function": {"name": name}} if self.choice == "named" else self.choice
        return {"tool_choice": choice} | ({"stream": True} if self.stream else {})


def scenarios() -> list[ToolScenario]:
    """Return the scenarios. Every second one is streamed."""
    found = [*_single(), *_parallel(), *_nested(), *_unions(), *_empty(), *_long(), *_no_call(), *_results()]
    return [
        ToolScenario(one.kind, one.messages, one.tools, one.choice, bool(number % 2), one.most)
        for number, one in enumerate(found)
    ]


def quick_scenarios() -> list[ToolScenario]:
    """Return one scenario of each kind that matters most."""
    found = scenarios()
    kinds = ("parallel", "nested", "single", "union", "none")
    left, chosen = list(found), list[ToolScenario]()
    for kind in kinds:
        one = next(one for one in left if one.kind == kind)
        left.remove(one)
        chosen.append(one)
    return chosen


def _single() -> Iterator[ToolScenario]:
    for number, city in enumerate(CITIES):
        choice: Choice = ("auto", "auto", "required", "named")[number % 4]
        yield ToolScenario("single", [user(f"What is the weather in {city}?")], [WEATHER, TIME], choice)
        yield ToolScenario("single", [system(SYSTEM), user(f"What time is it in {city}?")], [TIME, SEARCH], choice)
        thing = THINGS[number]
        yield ToolScenario("single", [user(f"What is the price of the {thing}?")], [PRICE, TIMER], choice)


def _parallel() -> Iterator[ToolScenario]:
    for one, other in pairwise(CITIES):
        both = user(f"What is the weather in {one}? What time is it in {other}?")
        yield ToolScenario("parallel", [both], [WEATHER, TIME], most=112)
    for one, other in pairwise(THINGS[:6]):
        both = user(f"What is the price of the {one}? What is the price of the {other}?")
        yield ToolScenario("parallel", [both], [PRICE], most=112)


def _nested() -> Iterator[ToolScenario]:
    for city in CITIES[:6]:
        order = user(f"Order two lamps and a chair to Main Street 5 in {city}.")
        yield ToolScenario("nested", [order], [ORDER], "required", most=160)
        lunch = user(f"Plan lunch on Monday at 12 in {city} with Ada and Émile.")
        yield ToolScenario("nested", [lunch], [EVENT, TIME], "named", most=160)


def _unions() -> Iterator[ToolScenario]:
    for text in (
        "Set the volume to 7.",
        "Set the name to Ada.",
        "Switch the alarm off.",
        "Clear the name.",
        "音量を3に。",
    ):
        yield ToolScenario("union", [user(text)], [UNION], "named")
        yield ToolScenario("union", [user(text)], [UNION, TIMER], "required", most=96)


def _empty() -> Iterator[ToolScenario]:
    for text in ("Where am I?", "Which place is this?", "Locate me."):
        yield ToolScenario("empty", [user(text)], [WHERE], "required")
        yield ToolScenario("empty", [user(text)], [WHERE, TIME], "named")


def _long() -> Iterator[ToolScenario]:
    for number in range(4):
        text = " ".join(f"Line {line}: see you soon, call me, thank you." for line in range(4 + 2 * number))
        yield ToolScenario("long", [user(f"Tell Ada: {text}")], [MESSAGE], "named", most=192)
    quotes = 'She said: "It\'s <b>5 > 3</b> & done", then left.\nReally? {"a": [1, 2]} \\ end'
    for name in ("Ada", "Émile", "王芳"):
        yield ToolScenario("long", [user(f"Send {name} the message: {quotes}")], [MESSAGE, SEARCH], "named", most=128)


def _no_call() -> Iterator[ToolScenario]:
    for city in CITIES:
        yield ToolScenario("none", [user(f"What is the weather in {city}?")], [WEATHER, TIME], "none", most=32)
    for thing in THINGS[:4]:
        yield ToolScenario("none", [user(f"What is the price of the {thing}?")], [PRICE], "none", most=32)
    for sum_ in ("17 + 25", "40 + 8", "12 + 60", "71 - 9", "33 + 44", "90 - 45"):
        yield ToolScenario("no need", [user(f"What is {sum_}?")], [WEATHER, TIME], most=32)


def _results() -> Iterator[ToolScenario]:
    for city in CITIES:
        call = called(("c1", "get_time", {"city": city}))
        asked = [user(f"What time is it in {city}?"), call, result("c1", '{"time": "12:30"}')]
        yield ToolScenario("result", asked, [TIME], most=32)
    for text in ("Set a timer for 25 minutes.", "Convert 20 dollars to euros.", "Search for a red lamp."):
        yield ToolScenario("single", [user(text)], [TIMER, CONVERT, SEARCH], most=96)
