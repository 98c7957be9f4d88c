"""Questions about small closed facts: capitals, colors, sounds, symbols, opposites, the order of days and so on."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.nano import tables
from tools.nano.item import Item, Split, answer, casual, fits, framed, user


@dataclass(frozen=True)
class Fact:
    """A fact in words: `questions` ask for it, `full` answers in a sentence, `short` in a word."""

    family: str
    subject: str
    questions: tuple[str, ...]
    full: str
    short: str


def _capitals() -> Iterator[Fact]:
    for country, capital, continent in tables.COUNTRIES:
        x = tables.with_article(country)
        start = x[0].upper() + x[1:]
        yield Fact(
            "capital",
            country,
            (
                f"What is the capital of {x}?",
                f"Which city is the capital of {x}?",
                f"Name the capital of {x}.",
                f"Tell me the capital of {x}.",
                f"What's the capital of {x}?",
                f"{start}: what is the capital?",
            ),
            f"The capital of {x} is {capital}.",
            capital,
        )
        yield Fact(
            "country",
            capital,
            (
                f"{capital} is the capital of which country?",
                f"Which country has the capital {capital}?",
                f"What country is {capital} the capital of?",
                f"Of which country is {capital} the capital?",
            ),
            f"{capital} is the capital of {x}.",
            country,
        )
        yield Fact(
            "continent",
            country,
            (
                f"On which continent is {x}?",
                f"What continent is {x} in?",
                f"Where is {x}?",
                f"Which continent does {x} belong to?",
            ),
            f"{start} is in {continent}.",
            continent,
        )


def _things() -> Iterator[Fact]:
    for thing, color in tables.COLORS_OF:
        start = thing[0].upper() + thing[1:]
        questions: tuple[str, ...] = (
            f"What color is {thing}?",
            f"What is the color of {thing}?",
            f"Tell me the color of {thing}.",
            f"Which color does {thing} have?",
        )
        yield Fact("color", thing, questions, f"{start} is {color}.", color)
    for word, opposite in tables.OPPOSITES:
        for x, y in ((word, opposite), (opposite, word)):
            questions = (f"What is the opposite of {x}?", f"Name the opposite of {x}.", f"Tell me the opposite of {x}.")
            questions += (f"What's the opposite of {x}?", f"{x[0].upper()}{x[1:]}: what is the opposite?")
            yield Fact("opposite", x, questions, f"The opposite of {x} is {y}.", y)
    for name, symbol in tables.SYMBOLS:
        questions = (
            f"What is the chemical symbol of {name}?",
            f"What is the symbol for {name}?",
            f"Tell me the chemical symbol of {name}.",
            f"Which symbol does {name} have?",
        )
        yield Fact("symbol", name, questions, f"The symbol of {name} is {symbol}.", symbol)
        questions = (
            f"Which element has the symbol {symbol}?",
            f"What element is {symbol}?",
            f"{symbol} is the symbol of which element?",
            f"Name the element with the symbol {symbol}.",
        )
        yield Fact("element", symbol, questions, f"{symbol} is the symbol of {name}.", name)


def _animals() -> Iterator[Fact]:
    for animal, sound in tables.SOUNDS:
        x = _a(animal)
        questions: tuple[str, ...] = (
            f"What sound does {x} make?",
            f"What does {x} say?",
            f"Which sound does {x} make?",
        )
        questions += (f"Tell me the sound of {x}.",)
        yield Fact("sound", animal, questions, f"{x.capitalize()} says {sound}.", sound)
    for animal, legs in tables.LEGS:
        x = _a(animal)
        questions = (
            f"How many legs does {x} have?",
            f"How many legs has {x}?",
            f"Tell me how many legs {x} has.",
            f"What is the number of legs of {x}?",
        )
        yield Fact("legs", animal, questions, f"{x.capitalize()} has {legs} legs.", legs)
    for animal, young in tables.YOUNG:
        x = _a(animal)
        questions = (f"What is a young {animal} called?", f"What do you call a young {animal}?")
        questions += (f"What is the young of {x}?", f"Name the young of {x}.")
        yield Fact("young", animal, questions, f"A young {animal} is {_a(young)}.", young)


def _order() -> Iterator[Fact]:
    for kind, names in (("day", tables.DAYS), ("month", tables.MONTHS)):
        for i, name in enumerate(names):
            after, before = names[(i + 1) % len(names)], names[i - 1]
            for side, other in (("after", after), ("before", before)):
                questions: tuple[str, ...] = (
                    f"What {kind} comes {side} {name}?",
                    f"Which {kind} is {side} {name}?",
                    f"Name the {kind} {side} {name}.",
                    f"What is the {kind} {side} {name}?",
                )
                yield Fact(side, name, questions, f"The {kind} {side} {name} is {other}.", other)


def _trivia() -> Iterator[Fact]:
    for what, it in tables.TRIVIA:
        questions: tuple[str, ...] = (
            f"What is the {what}?",
            f"What's the {what}?",
            f"Name the {what}.",
            f"Tell me the {what}.",
        )
        yield Fact("trivia", what, questions, f"The {what} is {it}.", it)
    for parts, whole, number in tables.HOW_MANY:
        verb = "has" if parts in _HAD else "are in"
        ask = f"does {whole} have" if verb == "has" else f"are in {whole}"
        questions = (f"How many {parts} {ask}?", f"Tell me how many {parts} {whole} has.")
        questions += (f"What is the number of {parts} in {whole}?", f"{whole.capitalize()}: how many {parts}?")
        yield Fact("how many", f"{parts} {whole}", questions, f"{whole.capitalize()} has {number} {parts}.", number)


_HAD = ("sides", "wheels", "strings", "fingers", "letters", "colors", "planets", "players")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


FAMILIES: dict[str, list[Fact]] = {}
for _fact in (*_capitals(), *_things(), *_animals(), *_order(), *_trivia()):
    FAMILIES.setdefault(_fact.family, []).append(_fact)
_WEIGHTS = [max(len(facts), 24) for facts in FAMILIES.values()]
_NAMES = list(FAMILIES)


def spoken(fact: Fact) -> str:
    """Return the subject of a fact as it is written in a question: with its article."""
    if fact.family in ("sound", "legs", "young"):
        return _a(fact.subject)
    return tables.with_article(fact.subject)


def pick(rng: random.Random, split: Split, families: list[str] | None = None) -> tuple[str, Fact, str]:
    """Return a question, its fact and the key of the pair, from the split."""
    while True:
        family = rng.choice(families) if families else rng.choices(_NAMES, _WEIGHTS)[0]
        fact = rng.choice(FAMILIES[family])
        nth = rng.randrange(len(fact.questions))
        key = f"{family}/{fact.subject}/{nth}"
        if fits(split, "facts", key):
            return fact.questions[nth], fact, key


def facts(rng: random.Random, split: Split) -> Item:
    """A question about a fact. Pairs of a fact and a form of its question are held out."""
    question, fact, key = pick(rng, split)
    return Item("facts", key, framed(rng, [user(casual(rng, question)), answer(fact.full)]))
