"""The rows of a training step: conversations as token ids, with the loss weight of each token."""

import random
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tools.nano.bpe import Bpe
from tools.nano.conversation import weighted
from tools.nano.item import Item
from tools.nano.mixture import long_items, short_item


def packed(kind: str, seed: int, rows: int, length: int) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
    """Return ids and weights, uint16 and float16 [rows, length + 2]. The result depends only on the arguments.

    A weight is that of predicting the token at its place. Every row begins with a conversation and truncates its last
    one.

    Args:
        kind: "short" for short conversations of all tasks; "long" for mostly retrieval, with conversations about as
            long as a row.
    """
    assert kind in ("short", "long"), kind
    ids = np.empty((rows, length + 2), dtype=np.uint16)
    weights = np.empty((rows, length + 2), dtype=np.float16)
    for row in range(rows):
        ids[row], weights[row] = _row(kind, random.Random(f"{kind} {seed} {row}"), length + 2)
    return ids, weights


def tokens_of(item: Item) -> tuple[list[int], list[float]]:
    """Return the ids of a whole conversation and their weights."""
    encode = bpe().encode
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in weighted(item):
        part = encode(text)
        ids += part
        weights += [weight] * len(part)
    return ids, weights


@cache
def bpe() -> Bpe:
    """Return nano's tokenizer."""
    return Bpe.from_file()


def _row(kind: str, rng: random.Random, width: int) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < width:
        room = width - len(ids)
        for item in [short_item(rng, room)] if kind == "short" else long_items(rng, room):
            more, their_weights = tokens_of(item)
            ids += more
            weights += their_weights
    return ids[:width], weights[:width]
