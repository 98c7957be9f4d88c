"""What the cache holds after drafts: of every position that counts, what it holds where nothing was drafted.

Each text is read up to a length, then fed a token a step with the drafter taking part; and fed in steps with drafts, of
which some number is right, from the same snapshot.
"""

from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.runtime import runner as runners
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.support.drafting import mtp_logits
from tests.support.slow import slow_rows
from tests.support.speculation import VOCABULARY, always_draft, know, model_of, text

DRAFTERS = ("mtp", "dspark")
# around the window, a block of entries and the larger ratio
LENGTHS = (3, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513)
FEW = (3, 127, 128, 130, 256)
# steps behind each other
STEPS = 2
# drafts that the drafter makes behind each step, which must leave no trace
DRAFTED = {"mtp": 3, "dspark": 5}

# of each layer the tensors of one sequence
State = list[torch.Tensor]


def ring_rows(ring: torch.Tensor, slot: int, first: int, end: int) -> torch.Tensor:
    """Those of positions first .. end - 1."""
    return ring[slot, torch.arange(max(first, 0), end) % ring.shape[1]].clone()


def state_of(runner: Runner, request: Request) -> State:
    """All that later tokens read: the window, open windows, entries, index keys, and the drafter's window."""
    sequence, cache = request.sequence, runner.cache
    assert sequence is not None
    length, found = sequence.length, []
    window = cache.config.sliding_window
    for ratio, layer in zip(cache.config.compress_ratios, cache.layers, strict=True):
        found.append(ring_rows(layer.window.data, sequence.slot, length - window, length))
        for held in (layer.compressed, layer.index):
            if held is not None:
                first = length // ratio * ratio - (ratio if ratio == 4 else 0)
                found += [ring_rows(ring.data, sequence.slot, first, length) for ring in (held.kv, held.score)]
                entries = torch.arange(length // ratio)
                blocks = torch.tensor(sequence.blocks)[entries * ratio // BLOCK_TOKENS]
                pools = [pool for pool in (held.entries, held.scale) if pool is not None]
                found += [pool.data[blocks * pool.per_block + entries % pool.per_block] for pool in pools]
    return found


class Fed:
    """Texts in one runner, which are fed on whatever the model would draw."""

    def __init__(self, drafter: str, lengths: Sequence[int], captured: bool, reference: bool) -> None:
        model = model_of(drafter, reference)
        longest = max(lengths) + 40
        self.runner = Runner(model, Capacity(len(lengths), longest if captured else None, 0, True), "cpu")
        self.texts = [text(length + 40, length) for length in lengths]
        self.lengths, self.count = lengths, DRAFTED[drafter]
        self.requests = [
            Request(ids[:length], Sampling(0.0), Limits(), number=number, end=length + 40)
            for number, (ids, length) in enumerate(zip(self.texts, lengths, strict=True))
        ]
        for request in self.requests:
            self.runner.add(request)
        while not all(request.done for request in self.requests):
            self.step([0] * len(lengths))
        # all have read their prompts in one step: the newest token is the first behind it
        self.snapshots = [self.runner.cache.snapshot(self.sequence(one)) for one in self.requests]

    def sequence(self, request: Request):
        assert request.sequence is not None
        return request.sequence

    def back(self) -> None:
        """To where the prompts had been read."""
        for request, ids, snapshot, length in zip(self.requests, self.texts, self.snapshots, self.lengths, strict=True):
            self.runner.cache.restore(self.sequence(request), snapshot)
            request.ids[:], request.done = ids[: length + 1], length

    def step(self, right: Sequence[int], wrong: Sequence[int] | None = None, count: int = 0) -> torch.Tensor:
        """A step in which of each text so many drafts are right, and so many behind them wrong; the drafts then."""
        for number, request in enumerate(self.requests):
            known, ids = len(request.ids), self.texts[number]
            request.drafts = ids[known : known + right[number]]
            mistakes = [] if wrong is None else ids[known + right[number] :][: wrong[number]]
            request.drafts += [(token + 1) % VOCABULARY for token in mistakes]
        ran = self.runner.run()
        drawn, took = [], []
        for chunk in ran.ready:
            ids = self.texts[chunk.request.number][chunk.end :]
            kept = right[chunk.request.number]
            drawn.append(ids[: kept + 1])
            # what the model draws behind a mistake is anything
            took += ids[: kept + 1] + [5] * (len(chunk.drafts) - kept)
        considered = [len(chunk.drafts) for chunk in ran.ready]
        made = self.runner.speculate(ran, torch.tensor(took), considered, count).clone()
        self.runner.finish(ran, drawn)
        return made

    def states(self) -> dict[tuple[int, int], State]:
        """By text and length."""
        return {(one.number, self.sequence(one).length): state_of(self.runner, one) for one in self.requests}


def assert_same(ours: dict[tuple[int, int], State], theirs: dict[tuple[int, int], State]) -> None:
    assert ours.keys() <= theirs.keys()
    for key, state in ours.items():
        for place, (mine, other) in enumerate(zip(state, theirs[key], strict=True)):
            assert torch.equal(mine, other), (key, place)


@pytest.fixture
def captured(request, monkeypatch):
    """Steps as on a GPU, but for the graphs."""
    monkeypatch.setattr(runners, "captures", lambda device: request.param)
    return request.param


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("drafter", "lengths", "captured", "reference"),
    [
        *slow_rows(("mtp", FEW, True, False)),
        ("dspark", FEW, False, False),
        *(pytest.param(one, LENGTHS, *how, marks=SLOW) for one, *how in product(DRAFTERS, *[(False, True)] * 2)),
    ],
    indirect=["captured"],
)
def test_after_every_kept_prefix_the_state_is_that_of_no_drafts(drafter, lengths, captured, reference):
    """Two steps in a row, each text with another number of right drafts and of wrong ones behind these."""
    most = 7 if drafter == "mtp" else 5
    fed = Fed(drafter, lengths, captured, reference)
    expected: dict[tuple[int, int], State] = {}
    fed.back()
    for _ in range(STEPS * (most + 1)):
        fed.step([0] * len(lengths))
        expected |= fed.states()
    for number in range(most + 1):
        fed.back()
        for step in range(STEPS):
            right = [(number + text * (step + 1)) % (most + 1) for text in range(len(lengths))]
            # now and then fewer drafts than there may be
            wrong = [(most - own) if (text + step) % 3 else min(1, most - own) for text, own in enumerate(right)]
            fed.step(right, wrong, fed.count)
            assert_same(fed.states(), expected)


@torch.no_grad()
def likeliest(ids: list[int]) -> int:
    """What the MTP block drafts behind the last of these tokens, by one step over all of them."""
    model = model_of("mtp")
    cache = Cache(model.config, model.numerics)
    batch = make_batch(cache, [(cache.allocate(), ids[:-1])])
    streams = model(batch, cache.layers).streams
    logits = mtp_logits(model, streams, torch.tensor(ids[1:]), batch, cache, torch.tensor([len(ids) - 2]))
    return int(logits.argmax())


def test_the_first_draft_follows_the_tokens_that_were_kept():
    """After each number of right drafts it is what the block says of the text alone."""
    fed = Fed("mtp", FEW, False, False)
    for right in ([0, 1, 2, 3, 4], [7, 6, 5, 0, 1]):
        made = fed.step(right, [7 - own for own in right], 3)
        assert made[:, 0].tolist() == [likeliest(request.ids) for request in fed.requests]


class Recited:
    """A constraint: the tokens are these, whatever the model draws."""

    def __init__(self, ids: list[int]) -> None:
        self._left = ids[::-1]

    def forced(self) -> int:
        return self._left[-1]

    def banned(self) -> tuple[int, ...]:
        return ()

    def masks(self, drafts: list[int]) -> list[None]:
        return [None] * (len(drafts) + 1)

    def instead(self, token: int) -> None:
        return None

    def push(self, token: int) -> None:
        assert self._left.pop() == token


@SLOW
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("captured", [False, True], indirect=True)
def test_two_thousand_steps_with_drafts_leave_nothing_behind(drafter, captured, monkeypatch):
    """Requests of random lengths join, end and are cancelled, with drafts of which some are right; their tokens are
    given, so that layers need not compute them."""
    always_draft(monkeypatch)
    monkeypatch.setattr(Attention, "forward", lambda self, x, batch, cache: x)
    monkeypatch.setattr(MoE, "forward", lambda self, x, batch: x)
    choice, slots = Random(0), 5
    one = Engine(model_of(drafter), Capacity(slots, 400), "cpu", drafting=Drafting(None))
    texts: list[list[int]] = []
    know(one, texts, lambda number, place: choice.randrange(8))
    taken, padding = set(), one.runner.graphs is not None
    for _ in range(2000):
        active = one.runner.scheduler.active
        if not active or (len(active) < slots and choice.random() < 0.1):
            texts.append(text(400, len(texts)))
            prompt, limits = texts[-1][: choice.randrange(1, 200)], Limits(choice.randrange(1, 150))
            one.add(Request(prompt, Sampling(0.0), limits, Recited(texts[-1][len(prompt) :]), stop_ids=()))
        one.step()
        for request in active:
            if choice.random() < 0.01:
                one.cancel(request)
        taken.add(one.runner.cache.used_blocks)
    assert max(taken) > slots
    for request in one.runner.scheduler.active:
        one.cancel(request)
    cache = one.runner.cache
    assert (cache.free_slots + padding, cache.used_blocks - padding) == (cache.slots, 0)
    assert one.draft_report().accepted > 200
    assert len(one._plan._chances) <= slots
