"""Questions that depend on earlier turns."""

import random

from tools.nano.item import KNOWN, Item, Message, Split, answer, fits, framed, user
from tools.nano.tasks import arithmetic, facts
from tools.nano.words import COLORS, NAMES

_NEXT = {
    "+": ("And plus {b}?", "Plus {b}?", "Now add {b}.", "And if you add {b}?"),
    "-": ("And minus {b}?", "Minus {b}?", "Now subtract {b}.", "And if you subtract {b}?"),
    "*": ("And times {b}?", "Times {b}?", "Now multiply by {b}.", "And if you multiply by {b}?"),
}
_NUMBERS = {2: "two", 3: "three"}


def multi_turn(rng: random.Random, split: Split) -> Item:
    """A sum and its follow-ups, a fact and the same kind of fact again, or a question about something said earlier."""
    draw = rng.choice((_chain, _chain, _same_again, _same_again, _remember))
    while True:
        keys, messages = draw(rng)
        # the questions in between are from the training split in both splits
        if fits(split, "multi turn", keys[-1]) and all(fits("train", "multi turn", key) for key in keys[:-1]):
            thinking = split == "train" and rng.random() < 0.12
            if thinking:
                messages[-1]["reasoning_content"] = _reasoning(messages[-1]["content"])
            return Item("multi turn", keys[-1], framed(rng, messages), thinking=thinking)


def _reasoning(reply: str) -> str:
    match reply.split():
        case [a, "+" | "-" | "*" as op, b, "=", _]:
            return arithmetic.steps_of(int(a), op, int(b))
    return KNOWN


def _chain(rng: random.Random) -> tuple[list[str], list[Message]]:
    """Two or three steps with results from 0 to 199. No step is a held-out sum."""
    while True:
        a, op, b = rng.randrange(100), rng.choice("+-"), rng.randrange(100)
        if arithmetic.allowed("train", a, op, b) and 0 <= arithmetic.apply(a, op, b) < 200:
            break
    text, _ = arithmetic.question(rng, a, op, b)
    messages, keys = [user(text), answer(arithmetic.equation(a, op, b))], [f"{a} {op} {b}"]
    value = arithmetic.apply(a, op, b)
    for _ in range(rng.choice((1, 1, 2))):
        op, b = _step(rng, value)
        number = _NUMBERS.get(b, str(b)) if rng.random() < 0.6 else str(b)
        messages += [
            user(rng.choice(_NEXT[op]).format(b=number)),
            answer(arithmetic.equation(value, op, b)),
        ]
        value = arithmetic.apply(value, op, b)
        keys.append(f"{keys[-1]} {op} {b}")
    return keys[1:], messages


def _step(rng: random.Random, value: int) -> tuple[str, int]:
    while True:
        op = rng.choice("+-*")
        b = rng.choice((2, 2, 3)) if op == "*" else rng.randrange(1, 100)
        result = arithmetic.apply(value, op, b)
        if 0 <= result < 200 and (op == "*" or arithmetic.allowed("train", value, op, b)):
            return op, b


_AGAIN = ("And of {x}?", "And {x}?", "What about {x}?", "And for {x}?")
_FOLLOWED = ["capital", "symbol", "opposite", "color", "sound", "legs", "young"]


def _same_again(rng: random.Random) -> tuple[list[str], list[Message]]:
    family = rng.choice(_FOLLOWED)
    question, fact, _ = facts.pick(rng, "train", [family])
    keys, messages = [], [user(question), answer(fact.full)]
    for other in rng.sample(facts.FAMILIES[family], rng.choice((1, 1, 2))):
        messages += [user(rng.choice(_AGAIN).format(x=facts.spoken(other))), answer(other.full)]
        keys.append(f"{family}/{messages[-2]['content']}")
    return keys, messages


_SAID: tuple[tuple[str, str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        "My name is {v}.",
        "Nice to meet you, {v}.",
        ("What is my name?", "Who am I?", "What's my name?", "Do you remember my name?"),
        "Your name is {v}.",
        NAMES,
    ),
    (
        "My favorite color is {v}.",
        "{v} is a nice color.",
        ("What is my favorite color?", "Which color do I like?", "What's my favorite color?"),
        "Your favorite color is {v}.",
        COLORS,
    ),
    (
        "I am {v} years old.",
        "Okay, you are {v} years old.",
        ("How old am I?", "What is my age?", "Do you remember my age?"),
        "You are {v} years old.",
        tuple(str(age) for age in range(5, 100)),
    ),
    (
        "My friend is called {v}.",
        "Say hello to {v}.",
        ("What is my friend called?", "What is the name of my friend?", "Who is my friend?"),
        "Your friend is called {v}.",
        NAMES,
    ),
)


def _remember(rng: random.Random) -> tuple[list[str], list[Message]]:
    """The user states something, asks up to two other questions, then asks about it."""
    said = rng.sample(_SAID, rng.choice((1, 1, 2)))
    messages: list[Message] = []
    asked = []
    for statement, reply, questions, recalled, values in said:
        value = rng.choice(values)
        text = reply.format(v=value)
        messages += [user(statement.format(v=value)), answer(text[0].upper() + text[1:])]
        asked.append((rng.choice(questions), recalled.format(v=value)))
    for _ in range(rng.choice((0, 1, 2))):
        question, fact, _ = facts.pick(rng, "train")
        messages += [user(question), answer(fact.full)]
    question, recalled = rng.choice(asked)
    return [f"{question}/{recalled}/{len(messages)}"], [*messages, user(question), answer(recalled)]
