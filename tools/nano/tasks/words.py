"""Words, lists and measures: spelling, sorting, counting, converting."""

import random

from tools.nano.item import Item, Split, answer, casual, fits, framed, user
from tools.nano.words import SPELLED, VALUES

_SPELL = ("Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "How is {w} spelled?", "Spell: {w}")
_BACK = ("Spell the word {w} backwards.", "Spell {w} backwards.", "What is {w} backwards?", "Reverse the word {w}.")
_LETTERS = ("How many letters are in {w}?", "Count the letters in {w}.", "How many letters does {w} have?")
_ENDS = ("What is the {nth} letter of {w}?", "Which letter is the {nth} of {w}?", "Tell me the {nth} letter of {w}.")


def spelling(rng: random.Random, split: Split) -> Item:
    """Spelling a word. Words are held out per direction, so that other questions teach their letters."""
    while True:
        word, direction = rng.choice(SPELLED), rng.choice(("forwards", "forwards", "backwards", "letters", "ends"))
        if split == "heldout" and direction == "ends":
            continue
        if direction == "ends" or fits(split, "spelling", f"{word}/{direction}"):
            break
    spelled = "-".join(word)
    nth = rng.choice(("first", "last"))
    ask, reply = {
        "forwards": (_SPELL, spelled),
        "backwards": (_BACK, spelled[::-1]),
        "letters": (_LETTERS, f"{spelled}: {len(word)} letters."),
        "ends": (_ENDS, f"The {nth} letter of {word} is {word[0 if nth == 'first' else -1]}."),
    }[direction]
    text = casual(rng, rng.choice(ask).format(w=word, nth=nth))
    return Item("spelling", f"{word}/{direction}", framed(rng, [user(text), answer(reply)], 0.05))


_SORT_NUMBERS: tuple[str, ...] = (
    "Sort these numbers: {x}.",
    "Sort the numbers {x}.",
    "Put these numbers in order: {x}.",
    "Sort: {x}",
)
_SORT_DOWN: tuple[str, ...] = (
    "Sort these numbers from largest to smallest: {x}.",
    "Sort from largest to smallest: {x}",
)
_SORT_WORDS: tuple[str, ...] = (
    "Sort these words: {x}.",
    "Sort the words {x}.",
    "Put these words in alphabetical order: {x}.",
    "Sort: {x}",
)
_SORTED_WORDS = VALUES[:89]


def sorting(rng: random.Random, split: Split) -> Item:
    """Sorting three to six numbers or words. Lists are held out."""
    while True:
        length, kind = rng.randrange(3, 7), rng.choice(("numbers", "numbers", "down", "words"))
        if kind == "words":
            things = rng.sample(_SORTED_WORDS, min(length, 5))
            ordered, ask = sorted(things), _SORT_WORDS
        else:
            numbers = rng.sample(range(100), length)
            things, ask = [str(x) for x in numbers], _SORT_DOWN if kind == "down" else _SORT_NUMBERS
            ordered = [str(x) for x in sorted(numbers, reverse=kind == "down")]
        key = f"{kind}/{','.join(things)}"
        if fits(split, "sorting", key):
            break
    text = rng.choice(ask).format(x=", ".join(things))
    return Item("sorting", key, framed(rng, [user(text), answer(f"{', '.join(ordered)}.")], 0.05))


_COUNT = ("How many words are in this list: {x}?", "Count the words: {x}.", "How many words: {x}?", "Count: {x}.")
_TIMES = ("How many times is {w} in this list: {x}?", "Count {w} in this list: {x}.", "How often does {w} appear: {x}?")


def counting(rng: random.Random, split: Split) -> Item:
    """Counting the words of a list, or how often one occurs. Lists are held out."""
    while True:
        if rng.random() < 0.5:
            words = rng.sample(VALUES, rng.randrange(1, 11))
            text, reply = rng.choice(_COUNT), _plural(len(words), "word")
            word = ""
        else:
            words = rng.choices(rng.sample(VALUES, rng.randrange(2, 4)), k=rng.randrange(3, 10))
            word = rng.choice(words)
            text, reply = rng.choice(_TIMES), _plural(words.count(word), "time")
        key = f"{word}/{','.join(words)}"
        if fits(split, "counting", key):
            break
    text = text.format(x=", ".join(words), w=word)
    return Item("counting", key, framed(rng, [user(text), answer(reply)], 0.05))


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}."


_UNITS: tuple[tuple[str, str, int, int], ...] = (
    ("kilometers", "meters", 1000, 99),
    ("kilograms", "grams", 1000, 99),
    ("liters", "milliliters", 1000, 99),
    ("meters", "centimeters", 100, 99),
    ("centimeters", "millimeters", 10, 99),
    ("euros", "cents", 100, 99),
    ("hours", "minutes", 60, 12),
    ("minutes", "seconds", 60, 12),
    ("weeks", "days", 7, 12),
    ("days", "hours", 24, 10),
    ("years", "months", 12, 12),
    ("dozen eggs", "eggs", 12, 12),
)
_CONVERT = (
    "How many {v} are {n} {u}?",
    "Convert {n} {u} to {v}.",
    "{n} {u} in {v}?",
    "What is {n} {u} in {v}?",
    "How many {v} are in {n} {u}?",
)


def units(rng: random.Random, split: Split) -> Item:
    """Converting a measure to another unit, both ways. Pairs of a measure and a form of its question are held out."""
    while True:
        big, small, factor, most = rng.choice(_UNITS)
        n, nth, up = rng.randrange(2, most + 1), rng.randrange(len(_CONVERT)), rng.random() < 0.3
        number, unit, other, result = (n * factor, small, big, n) if up else (n, big, small, n * factor)
        key = f"{number} {unit} {other}/{nth}"
        if fits(split, "units", key):
            break
    text = _CONVERT[nth].format(n=number, u=unit, v=other)
    reply = f"{number} {unit} are {result} {other}."
    return Item("units", key, framed(rng, [user(casual(rng, text)), answer(reply)], 0.05))
