"""Tool use: a few tools are offered, one or two are called, and the answer uses the result."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.nano import tables
from tools.nano.item import Item, Message, Split, answer, casual, fits, user
from tools.nano.tasks import arithmetic, facts
from tools.nano.words import COLORS, EVENTS, NAMES, THINGS

CITIES: tuple[str, ...] = tuple(capital for _, capital, _ in tables.COUNTRIES if capital.isalpha())
_SKY = ("sunny", "cloudy", "rainy", "windy", "foggy")
_MONEY = ("dollars", "euros", "pounds", "yen")


def _tool(name: str, about: str, **parameters: str | list[str]) -> Message:
    """Return an OpenAI tool. A parameter is its type, or the list of its values."""
    properties = {
        key: {"type": "string", "enum": kind} if isinstance(kind, list) else {"type": kind}
        for key, kind in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


@dataclass(frozen=True)
class Use:
    """One call: the user's request, the arguments, the tool's result, and the sentence made from the result."""

    ask: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    reply: str


def _weather(rng: random.Random) -> Use:
    city, sky = rng.choice(CITIES), rng.choice(_SKY)
    unit = "fahrenheit" if rng.random() < 0.25 else "celsius"
    ask = rng.choice(("What is the weather in {c}", "How is the weather in {c}", "Tell me the weather in {c}"))
    ask = ask.format(c=city) + (" in fahrenheit" if unit == "fahrenheit" else "")
    ask += "." if ask.startswith("Tell") else "?"
    degrees = rng.randrange(-9, 40) if unit == "celsius" else rng.randrange(20, 99)
    result = {"temperature": degrees, "unit": unit, "sky": sky}
    return Use(ask, {"city": city, "unit": unit}, result, f"It is {degrees} degrees {unit} and {sky} in {city}.")


def _time(rng: random.Random) -> Use:
    city, time = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    ask = rng.choice(("What time is it in {c}?", "What is the time in {c}?", "Tell me the time in {c}."))
    return Use(ask.format(c=city), {"city": city}, {"time": time}, f"It is {time} in {city}.")


def _event(rng: random.Random) -> Use:
    title, day = rng.choice(EVENTS), rng.choice(tables.DAYS)
    if rng.random() < 0.5:
        title = f"{title} with {rng.choice(NAMES)}"
    ask = rng.choice(("Add {t} on {d}.", "Put {t} on {d} in my calendar.", "Plan {t} for {d}.")).format(t=title, d=day)
    if rng.random() < 0.25:
        return Use(ask, {"title": title, "day": day}, {"status": "busy"}, f"I cannot add {title}: {day} is busy.")
    return Use(ask, {"title": title, "day": day}, {"status": "ok"}, f"I added {title} on {day}.")


def _convert(rng: random.Random) -> Use:
    (source, target), amount, got = rng.sample(_MONEY, 2), rng.randrange(1, 100), rng.randrange(1, 200)
    ask = rng.choice(
        ("Convert {n} {s} to {t}.", "How many {t} are {n} {s}?", "{n} {s} in {t}?", "Change {n} {s} to {t}.")
    )
    arguments = {"amount": amount, "from": source, "to": target}
    reply = f"{amount} {source} are {got} {target}."
    return Use(ask.format(n=amount, s=source, t=target), arguments, {"amount": got, "currency": target}, reply)


def _search(rng: random.Random) -> Use:
    color, thing = rng.choice(COLORS), rng.choice(THINGS)
    query, found = f"{color} {thing}", f"{rng.choice(NAMES)} has a {color} {thing}."
    ask = rng.choice(("Search for a {q}.", "Search the web for {q}.", "Look up {q}.", "Find a {q}.")).format(q=query)
    return Use(ask, {"query": query}, {"text": found}, f"I found this: {found}")


def _message(rng: random.Random) -> Use:
    name, text = rng.choice(NAMES), rng.choice(("I am late", "see you soon", "happy birthday", "call me", "thank you"))
    ask = rng.choice(("Tell {n}: {t}.", "Send {n} the message: {t}.", "Write to {n}: {t}.")).format(n=name, t=text)
    return Use(ask, {"to": name, "text": text}, {"status": "sent"}, f"I sent the message to {name}.")


def _timer(rng: random.Random) -> Use:
    minutes = rng.randrange(2, 91)
    ask = rng.choice(("Set a timer for {m} minutes.", "Start a timer of {m} minutes.", "Wake me in {m} minutes."))
    reply = f"The timer is set to {minutes} minutes."
    return Use(ask.format(m=minutes), {"minutes": minutes}, {"status": "ok"}, reply)


def _price(rng: random.Random) -> Use:
    item, price, currency = rng.choice(THINGS), rng.randrange(1, 100), rng.choice(_MONEY[:3])
    ask = rng.choice(("What is the price of the {i}?", "How much is the {i}?", "What does the {i} cost?"))
    reply = f"The {item} costs {price} {currency}."
    return Use(ask.format(i=item), {"item": item}, {"price": price, "currency": currency}, reply)


TOOLS: tuple[tuple[Message, Callable[[random.Random], Use]], ...] = (
    (_tool("get_weather", "Get the weather of a city.", city="string", unit=["celsius", "fahrenheit"]), _weather),
    (_tool("get_time", "Get the time in a city.", city="string"), _time),
    (_tool("add_event", "Add an event to the calendar.", title="string", day="string"), _event),
    (_tool("convert_currency", "Convert money.", **{"amount": "number", "from": "string", "to": "string"}), _convert),
    (_tool("search", "Search the web.", query="string"), _search),
    (_tool("send_message", "Send a message to a person.", to="string", text="string"), _message),
    (_tool("set_timer", "Set a timer.", minutes="integer"), _timer),
    (_tool("get_price", "Get the price of an item.", item="string"), _price),
)
_DOUBLE = ("get_weather", "get_time", "get_price")


def tool_use(rng: random.Random, split: Split) -> Item:
    """One to three tools and one to three questions.

    Questions are held out, and judged at the call or at the answer.
    """
    offered = rng.sample(TOOLS, rng.randrange(1, 4))
    thinking = rng.random() < 0.3
    messages: list[Message] = [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.15 else []
    key = ""
    for turn in range(1 if split == "heldout" else rng.choice((1, 2, 3))):
        draw = _direct if rng.random() < 0.15 else _double if rng.random() < 0.15 else _single
        while True:
            key, added = draw(rng, offered, thinking, 10 * turn)
            if fits(split, "tools", key):
                break
        messages += added
    if split == "heldout" and rng.random() < 0.5 and messages[-2]["role"] == "tool":
        messages = messages[: next(i for i, message in enumerate(messages) if message.get("tool_calls")) + 1]
    return Item("tools", key, messages, [tool for tool, _ in offered], thinking)


_SYSTEMS = ("You are a helpful assistant.", "Use the tools when they help.")
_Offered = list[tuple[Message, Callable[[random.Random], Use]]]
_Turn = tuple[str, list[Message]]


def _single(rng: random.Random, offered: _Offered, thinking: bool, first_id: int) -> _Turn:
    tool, draw = rng.choice(offered)
    use = draw(rng)
    return use.ask, _called([(tool["function"]["name"], use)], casual(rng, use.ask), thinking, first_id)


def _double(rng: random.Random, offered: _Offered, thinking: bool, first_id: int) -> _Turn:
    """Two simultaneous calls, of one tool or of two."""
    uses = [(tool["function"]["name"], draw) for tool, draw in offered]
    name, draw = rng.choice(uses)
    other, draw_other = rng.choice(uses) if rng.random() < 0.5 or name not in _DOUBLE else (name, draw)
    one, two = draw(rng), draw_other(rng)
    ask = f"{one.ask} {two.ask}"
    return ask, _called([(name, one), (other, two)], ask, thinking, first_id)


def _called(calls: list[tuple[str, Use]], ask: str, thinking: bool, first_id: int) -> list[Message]:
    names = " and ".join(dict.fromkeys(name for name, _ in calls))
    made = [
        {
            "id": f"call_{first_id + i}",
            "type": "function",
            "function": {"name": name, "arguments": _json(use.arguments)},
        }
        for i, (name, use) in enumerate(calls)
    ]
    call = {**answer("", f"I need {names}." if thinking else ""), "tool_calls": made}
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": _json(use.result)}
        for one, (_, use) in zip(made, calls, strict=True)
    ]
    reply = " ".join(use.reply for _, use in calls)
    return [user(ask), call, *results, answer(reply, "I have the result." if thinking else "")]


def _direct(rng: random.Random, offered: _Offered, thinking: bool, first_id: int) -> _Turn:
    """A question that needs no tool."""
    thought = "I need no tool." if thinking else ""
    if rng.random() < 0.4:
        while True:
            a, op, b = rng.randrange(100), rng.choice("+-"), rng.randrange(100)
            if arithmetic.allowed("train", a, op, b):
                ask, _ = arithmetic.question(rng, a, op, b)
                return ask, [user(ask), answer(arithmetic.equation(a, op, b), thought)]
    ask, fact, _ = facts.pick(rng, "train")
    return ask, [user(ask), answer(fact.full, thought)]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
