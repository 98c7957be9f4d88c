"""Tokens come in time while prompts are read, and these take turns: with a clock of the test's own."""

from itertools import pairwise
from random import Random

import pytest

from dsv4cli.engine.runtime import pace
from dsv4cli.engine.runtime.pace import PATIENCE, SIZES, Pace
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Chunk, Pick
from dsv4cli.engine.settings import Limits, Sampling

TARGET = 0.05


class Machine:
    """Steps that take as long as they are said to."""

    def __init__(self, monkeypatch, fixed=0.004, each=1 / 20_500, decode=0.006, noise=0.0):
        self.now, self.gaps, self.read, self._last = 0.0, [], [], 0.0
        self._fixed, self._each, self._decode = fixed, each, decode
        self._random, self._noise = Random(1), noise
        monkeypatch.setattr(pace, "perf_counter", lambda: self.now)

    def step(self, one: Pace, active: list[Request], prepared=False) -> Pick | None:
        """Whose step it was."""
        pick = one.pick(active)
        decoding = [request for request in active if request.decodes]
        if pick is None:
            chunks = [Chunk(request, request.done, len(request.ids), 0, []) for request in active]
            seconds = self._fixed + self._each * sum(chunk.tokens for chunk in chunks)
        elif pick.request is None:
            chunks = [Chunk(request, request.done, request.done + 1, 0, []) for request in decoding]
            seconds = self._decode
        else:
            [request] = [request for request in active if request.number == pick.request]
            chunks = [Chunk(request, request.done, request.done + pick.tokens, 0, [])]
            seconds = self._fixed + self._each * pick.tokens
            self.read.append((request.number, pick.tokens))
        self.now += seconds * (1 + self._noise * self._random.random())
        for chunk in chunks:
            chunk.request.done = chunk.end
            if chunk.request.caught_up:
                chunk.request.ids.append(7)
        if pick is not None and pick.request is None:
            self.gaps.append(self.now - self._last)
            self._last = self.now
        one.note(pick, chunks, prepared)
        return pick


def request(number: int, tokens: int, decodes: bool = False, chunk: int = 4096) -> Request:
    return Request(
        [5] * tokens, Sampling(), Limits(prefill_chunk=chunk), number=number, done=tokens - 1 if decodes else 0
    )


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("fixed", "each"), [(0.004, 1 / 20_500), (0.03, 1 / 60_000), (0.001, 1 / 5_000)])
def test_time_between_tokens(monkeypatch, fixed, each, noise):
    """The target is kept, and what it leaves is used."""
    machine, one = Machine(monkeypatch, fixed, each, noise=noise), Pace(TARGET)
    active = [request(number, 100, decodes=True) for number in range(8)] + [request(9, 900_000)]
    for _ in range(2000):
        machine.step(one, active)
    gaps, read = sorted(machine.gaps[50:]), machine.read[50:]
    assert gaps[int(0.99 * len(gaps))] <= 1.2 * TARGET
    assert sum(gaps) / len(gaps) > 0.6 * TARGET
    whole = max(size for size in SIZES if fixed + each * size <= TARGET - 0.006)
    assert max(tokens for _, tokens in read) >= whole / 2


def test_a_target_that_cannot_be_kept_starves_no_prompt(monkeypatch):
    machine, one = Machine(monkeypatch, decode=0.2), Pace(TARGET)
    active = [request(0, 100, decodes=True), request(1, 500)]
    picks = [machine.step(one, active) for _ in range(21)]
    assert active[1].decodes
    assert [pick.request for pick in picks[:4]] == [None, 1, None, 1]


def test_all_go_together_where_nobody_waits_for_a_token(monkeypatch):
    one = Pace(TARGET)
    assert one.pick([request(1, 300), request(2, 5000)]) is None
    assert one.pick([request(1, 300, decodes=True)]) == Pick()


def test_short_prompts_share_the_time_between_two_tokens(monkeypatch):
    machine, one = Machine(monkeypatch, 0.001, 1 / 20_000), Pace(TARGET)
    active = [request(0, 10, decodes=True), *(request(number, 30) for number in range(1, 40))]
    picks = [machine.step(one, active).request for _ in range(40)]
    assert max(len(run) for run in "".join("x" if pick else " " for pick in picks).split()) >= 5
    assert max(machine.gaps[1:]) <= TARGET


def test_shortest_first_and_none_is_passed_over_for_ever(monkeypatch):
    machine, one = Machine(monkeypatch, 0.001, 1 / 5_000), Pace(TARGET)
    active = [request(0, 10, decodes=True), request(1, 4000), request(2, 300)]
    order = []
    for number in range(3, 120):
        pick = machine.step(one, active)
        if pick.request is not None:
            order.append(pick.request)
        if not any(not one.decodes and one.number > 1 for one in active):
            active = [active[0], active[1], request(number, 300)]
    assert order[0] == 2
    places = [place for place, who in enumerate(order) if who == 1]
    assert places
    assert max(later - before for before, later in pairwise(places)) <= PATIENCE + 1


def test_a_step_that_captures_a_graph_teaches_nothing(monkeypatch):
    machine, one = Machine(monkeypatch), Pace(TARGET)
    active = [request(0, 100, decodes=True), request(1, 10_000)]
    for _ in range(20):
        machine.step(one, active)
    before = dict(one._reading)
    machine._fixed = 3.0
    machine.step(one, active, prepared=True)
    machine._fixed = 0.004
    machine.step(one, active)
    assert one._reading == before


def test_a_chunk_that_took_long_once_counts_twice_at_most(monkeypatch):
    machine, one = Machine(monkeypatch), Pace(TARGET)
    active = [request(0, 100, decodes=True), request(1, 100_000)]
    for _ in range(20):
        machine.step(one, active)
    before = dict(one._reading)
    machine._fixed = 3.0
    for _ in range(3):  # a chunk, and tokens behind it
        machine.step(one, active)
    assert max(one._reading[size] / before[size] for size in before) == pytest.approx(2)
