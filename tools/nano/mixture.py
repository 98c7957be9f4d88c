"""The share of each task in the conversations."""

import random
from itertools import accumulate

from tools.nano.item import KNOWN, Item, Task
from tools.nano.tasks import arithmetic, facts, retrieval, talk, tools, turns, words

# task, share of the short conversations in percent
SHARES: tuple[tuple[Task, float], ...] = (
    (arithmetic.sums, 18),
    (arithmetic.tables, 3),
    (arithmetic.products, 8),
    (arithmetic.long_sums, 8),
    (facts.facts, 20),
    (words.spelling, 7),
    (words.sorting, 6),
    (words.counting, 5),
    (words.units, 5),
    (talk.greetings, 4),
    (talk.chinese, 4),
    (talk.system, 6),
    (turns.multi_turn, 6),
)
RETRIEVAL = 5.0
"""Short texts with questions about them, percent beside the shares above."""
TOOLS_FIRST = 0.3
"""How often a conversation with tools comes where there is room for one, as at the beginning of a row."""
TOOLS_ROOM = 500
THINKING = 0.08
"""How often a question that needs no working out is asked with thinking."""
MAX_EFFORT = 0.03
"""How often a thinking conversation begins with the text of the effort "max"."""

TASKS: dict[str, Task] = {task.__name__: task for task, _ in SHARES} | {"tool_use": tools.tool_use}
_TASKS = [task for task, _ in SHARES]
_SUMS = list(accumulate(share for _, share in SHARES))
_LOOKED_UP = ("retrieval", "retrieval front")
_EASY = ("facts", "spelling", "sorting", "counting", "units", "greetings", "chinese", "system", *_LOOKED_UP)


def short_item(rng: random.Random, room: int) -> Item:
    """Return a training conversation of any task; one with tools only if most of it fits in `room` tokens."""
    if room >= TOOLS_ROOM and rng.random() < TOOLS_FIRST:
        item = tools.tool_use(rng, "train")
    elif rng.random() * 100 < RETRIEVAL:
        draw = retrieval.retrieval_front if rng.random() < 0.3 else retrieval.retrieval
        item = draw(rng, rng.randrange(60, 420))
    else:
        item = rng.choices(_TASKS, cum_weights=_SUMS)[0](rng, "train")
    return _thinking(rng, item)


def long_items(rng: random.Random, room: int) -> list[Item]:
    """Return the next conversations of a row for training on long contexts, with `room` tokens left."""
    draw = rng.random()
    if draw < 0.12:
        return [short_item(rng, room) for _ in range(6)]
    if draw < 0.24 and room > 200:
        item = retrieval.retrieval_front(rng, min(room, retrieval.MOST) - 60)
    else:
        item = retrieval.retrieval(rng, max(60, round(room * rng.choice((1, 1, 1, 0.5)))))
    return [_thinking(rng, item)]


def _thinking(rng: random.Random, item: Item) -> Item:
    if item.task in _EASY and rng.random() < THINKING:
        item.thinking = True
        item.messages[-1]["reasoning_content"] = KNOWN
    if item.thinking and rng.random() < MAX_EFFORT:
        item.effort = "max"
    return item
