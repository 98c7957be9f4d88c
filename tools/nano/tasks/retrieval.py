"""Retrieval: texts of needles and filler, and questions about values up to thousands of tokens earlier."""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass

from tools.nano.item import Item, Message, Split, answer, fits, user
from tools.nano.tables import DAYS
from tools.nano.words import ANIMALS, COLORS, NAMES, PLACES, THINGS, VALUES

MOST = 4000  # maximum tokens between a needle and its question
_ATTRIBUTES = ("code", "code", "code", "secret", "password", "sign")
_KEYS = (*NAMES, *(f"the {thing}" for thing in THINGS))
_NEEDLES = ("The {a} of {k} is {v}.", "The {a} of {k} is {v}.", "Now the {a} of {k} is {v}.", "So {k} has the {a} {v}.")
_QUESTIONS = (
    "What is the {a} of {k}?",
    "What is the {a} of {k}?",
    "Tell me the {a} of {k}.",
    "What's the {a} of {k}?",
    "Which {a} does {k} have?",
)
_REPLY = "The {a} of {k} is {v}."
_FILLER = (
    "{n} saw a {c} {t} in the {p}.",
    "{n} and {m} went to the {p}.",
    "The {t} of {n} is in the {p}.",
    "The {t} in the {p} is {c}.",
    "On {d} {n} was in the {p}.",
    "{n} gave the {t} to {m}.",
    "A {x} sat near the {t} of {n}.",
    "It was {d} and the {p} was empty.",
    "{n} has a {c} {t} and a {x}.",
    "The {x} was in the {p} on {d}.",
    "{n} likes the {c} {t} of {m}.",
    "Then {n} and the {x} left the {p}.",
)


def filler(rng: random.Random) -> str:
    """Return a sentence that no question is about."""
    pick = rng.random  # ten times as fast as rng.choice, and most of the time is spent here
    return _FILLER[int(pick() * len(_FILLER))].format(
        n=NAMES[int(pick() * len(NAMES))],
        m=NAMES[int(pick() * len(NAMES))],
        c=COLORS[int(pick() * len(COLORS))],
        t=THINGS[int(pick() * len(THINGS))],
        p=PLACES[int(pick() * len(PLACES))],
        d=DAYS[int(pick() * len(DAYS))],
        x=ANIMALS[int(pick() * len(ANIMALS))],
    )


def size(text: str) -> int:
    """Return the number of tokens of sentences whose words are one token each."""
    return text.count(" ") + text.count(".") + 1


@dataclass
class Needle:
    """A statement of a key's value, and the position of its end in tokens."""

    attribute: str
    key: str
    value: str
    end: int = 0

    def say(self, form: str) -> str:
        """Return the needle in the words of a form."""
        return form.format(a=self.attribute, k=self.key, v=self.value)


class Story:
    """A growing text with its needles. `place` is its length in tokens."""

    def __init__(self, rng: random.Random, split: Split, density: float) -> None:
        """Start an empty text. `density` is the share of needles among its sentences."""
        self.rng, self.split, self.density = rng, split, density
        self.place = 0
        self.needles: list[Needle] = []
        self.attribute = rng.choice(_ATTRIBUTES)
        self._keys = list(rng.choice((NAMES, NAMES, _KEYS)))
        rng.shuffle(self._keys)

    def needle(self) -> Needle | None:
        """Return a new key with its value; None if all keys are used."""
        if not self._keys:
            return None
        key = self._keys.pop()
        while True:
            value = self.rng.choice(VALUES)
            if fits(self.split, "retrieval", f"{key} {value}"):
                return Needle(self.attribute, key, value)

    def write(self, length: int) -> str:
        """Write the next sentences, about `length` tokens."""
        sentences, end = [], self.place + length
        while self.place < end:
            needle = self.needle() if self.rng.random() < self.density else None
            sentences.append(self._add(needle) if needle else filler(self.rng))
            self.place += size(sentences[-1])
            if needle:
                needle.end = self.place
        return " ".join(sentences)

    def _add(self, needle: Needle) -> str:
        self.needles.append(needle)
        return needle.say(self.rng.choice(_NEEDLES))

    def ask(self, wanted: float) -> tuple[Needle, Message, Message]:
        """Return a question and its answer about the unused needle whose distance is closest to `wanted` tokens."""
        at = bisect_left(self.needles, self.place - wanted, key=lambda needle: needle.end)
        needle = self.needles.pop(min(at, len(self.needles) - 1))
        return needle, user(needle.say(self.rng.choice(_QUESTIONS))), answer(needle.say(_REPLY))


def retrieval(rng: random.Random, budget: int) -> Item:
    """A training conversation of about `budget` tokens: text and questions, perhaps followed by more of both."""
    story = Story(rng, "train", rng.choice((1.0, 0.5, 0.3, 0.15)))
    text = story.write(_log_uniform(rng, 20, max(30, int(budget * 0.85))))
    if not story.needles:
        text = f"{text} {_forced(story)}"
    messages: list[Message] = []
    while story.needles and (story.place < budget - 24 or not messages):
        wanted = _log_uniform(rng, 1, MOST) if rng.random() < 0.8 else rng.randrange(1, MOST)
        _, question, reply = story.ask(wanted)
        question["content"] = f"{text}\n\n{question['content']}" if text else question["content"]
        messages += [question, reply]
        story.place += size(question["content"]) - size(text) + size(reply["content"]) + 6
        room = budget - story.place - 60
        more = room > 10 and (rng.random() < 0.25 or not story.needles)
        text = story.write(_log_uniform(rng, 10, min(room, 800))) if more else ""
    return Item("retrieval", "", messages, filler="back")


def retrieval_front(rng: random.Random, budget: int) -> Item:
    """A training conversation whose question precedes the text, as in `dsv4 run QUESTION < text`."""
    return _front(rng, "train", rng.choice((1.0, 0.5, 0.15)), _log_uniform(rng, 20, budget), rng.random())


def _front(rng: random.Random, split: Split, density: float, length: int, where: float) -> Item:
    story = Story(rng, split, density)
    text = story.write(length)
    if not story.needles:
        text = f"{text} {_forced(story)}"
    needle, question, reply = story.ask(where * story.place)
    question["content"] = f"{question['content']}\n\n{text}"
    distance = story.place - needle.end
    key = f"{needle.key} {needle.value}"
    return Item("retrieval front", key, [question, reply], filler="front", distance=distance)


def _forced(story: Story) -> str:
    density, story.density = story.density, 1.0
    text = story.write(1)
    story.density = density
    return text


def needle_at(rng: random.Random, split: Split, distance: int, density: float) -> Item:
    """A question whose needle ends about `distance` tokens before it, after up to 300 tokens of other text."""
    story = Story(rng, split, density)
    parts = [story.write(rng.randrange(1, 300)), _forced(story)]
    needle = story.needles[-1]
    if distance > 8:
        parts.append(story.write(distance - 6))
    question = f"{' '.join(parts)}\n\n{needle.say(rng.choice(_QUESTIONS))}"
    messages = [user(question), answer(needle.say(_REPLY))]
    return Item("retrieval", f"{needle.key} {needle.value}", messages, filler="back", distance=story.place - needle.end)


def front_at(rng: random.Random, split: Split, length: int, density: float) -> Item:
    """A question before a text of `length` tokens with its needle anywhere."""
    return _front(rng, split, density, length, rng.random())


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
