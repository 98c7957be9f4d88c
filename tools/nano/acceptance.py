"""Measures the acceptance of drafts: runs the engine's drafter after every token of finished replies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.drafts.drafters import Choose, Drafts, Newest, drafter_of
from dsv4cli.engine.runtime.state.cache import Cache


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts after the tokens of replies.

    Attributes:
        wanted: by place in the block, drafts for which the reply has a token.
        accepted: by place in the block, drafts that equal that token, as do all before them.
        steps, tokens: of replies that were written with these drafts.
    """

    wanted: list[int]
    accepted: list[int]
    steps: int
    tokens: int

    def __add__(self, other: "Acceptance") -> "Acceptance":
        wanted = [a + b for a, b in zip(self.wanted, other.wanted, strict=True)]
        accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        return Acceptance(wanted, accepted, self.steps + other.steps, self.tokens + other.tokens)

    @property
    def shares(self) -> list[float]:
        """The acceptance rate at each place."""
        return [a / max(b, 1) for a, b in zip(self.accepted, self.wanted, strict=True)]

    @property
    def length(self) -> float:
        """The mean number of accepted drafts of a whole block."""
        return sum(self.shares)


def greedy(logits: torch.Tensor, number: int) -> torch.Tensor:
    """Return the first choice of each row: fp32 [B, V] -> int64 [B]."""
    return logits.argmax(-1)


@torch.no_grad()
def drafts_along(
    model: Transformer, ids: Sequence[int], start: int, count: int, choose: Callable[[int], Choose] = lambda _: greedy
) -> list[Drafts]:
    """Return `count` drafts after each token from position `start` on, each given all tokens up to it.

    Args:
        choose: samples drafts, given the position of the newest token.
    """
    cache = Cache(model.config, model.numerics, slots=1, device=model.embed.weight.device)
    sequence, drafter, found = cache.allocate(), drafter_of(model, cache), []
    assert drafter is not None
    for place in range(start, len(ids)):
        first = sequence.length
        batch = make_batch(cache, [(sequence, ids[first:place])])
        hidden = model(batch, cache.layers)
        drafter.absorb(hidden, torch.tensor(ids[first + 1 : place + 1], device=cache.device), batch)
        cache.advance(sequence, place - first)
        token, position, slot = torch.tensor([[ids[place]], [place], [sequence.slot]], device=cache.device)
        newest = Newest(token, position, slot, hidden.streams[-1:])
        found.append(drafter.draft(newest, count, choose(place)))
    return found


def acceptance(model: Transformer, ids: Sequence[int], start: int, count: int) -> Acceptance:
    """Measure greedy drafts along ids whose reply begins at `start`. The model alone produces its first token."""
    lengths, wanted, accepted = [], [0] * count, [0] * count
    for place, drafts in enumerate(drafts_along(model, ids[:-1], start, count), start):
        theirs = ids[place + 1 : place + 1 + count]
        same = [a == b for a, b in zip(drafts.tokens[0].tolist(), theirs, strict=False)]
        length = same.index(False) if False in same else len(same)
        lengths.append(length)
        for number in range(len(theirs)):
            wanted[number] += 1
            accepted[number] += number < length
    place, steps = 0, 0
    while place < len(lengths):
        place += lengths[place] + 1
        steps += 1
    return Acceptance(wanted, accepted, steps, len(lengths))
