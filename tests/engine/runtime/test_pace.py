"""Tokens come in time while prompts are read, and these take turns: with a clock of the test's own."""

from bisect import bisect_left
from itertools import pairwise
from random import Random

import pytest

from dsv4cli.engine.runtime import pace
from dsv4cli.engine.runtime.chunk_graphs import TOKENS, room_of
from dsv4cli.engine.runtime.chunk_times import SIZES, ChunkTimes, rounded
from dsv4cli.engine.runtime.decoding_times import SHARE
from dsv4cli.engine.runtime.pace import PATIENCE, Pace
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Pick, Scheduler
from dsv4cli.engine.runtime.ways import MOST, Apart, Mixed
from dsv4cli.engine.settings import Limits, Sampling

TARGET = 0.05
# seconds of a captured chunk of Flash by its tokens: on two H200, with experts a quarter faster, on one; each size that
# is not named lies between its neighbours. Larger ones are launched by the host
TWO = {32: 0.022, 64: 0.026, 128: 0.036, 256: 0.040, 512: 0.047, 768: 0.054, 1024: 0.061, 2048: 0.1}
FASTER = {size: 0.82 * seconds for size, seconds in TWO.items()}
ONE = {32: 0.04, 64: 0.045, 512: 0.075, 1024: 0.101, 2048: 0.155}
LAUNCHED = 0.112


def affine(fixed, each):
    return lambda tokens: fixed + each * tokens


def flat(table):
    """What a chunk takes in the smallest graph that has room for it."""
    sizes = sorted(table)

    def seconds(tokens):
        size = rounded(tokens)
        place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        less, more = sizes[place - 1], sizes[place]
        found = table[less] + (table[more] - table[less]) * (size - less) / (more - less)
        return found if size <= TOKENS[-1] else max(found, LAUNCHED)

    return seconds


class Machine:
    """Steps that take as long as they are said to."""

    def __init__(self, monkeypatch, chunk, decode=0.006, noise=0.0, ways=(Apart, Apart)):
        """ways: between which the pace may choose."""
        monkeypatch.setattr(pace, "Apart", ways[0])
        monkeypatch.setattr(pace, "Mixed", ways[1])
        self.now, self.gaps, self.read, self._last = 0.0, [], [], 0.0
        self.chunk, self.decode = chunk, decode
        self._random, self._noise = Random(1), noise
        monkeypatch.setattr(pace, "perf_counter", lambda: self.now)

    def step(self, one: Pace, active: list[Request], prepared=False) -> Pick | None:
        """Whose step it was."""
        pick, scheduler = one.pick(active), Scheduler(None)
        scheduler._active = active
        chunks = scheduler.chunks(pick)
        tokens = room_of([chunk.tokens for chunk in chunks])
        seconds = self.decode if pick == Pick() else self.chunk(tokens)
        if pick is not None and pick.requests:
            self.read += [(one.request.number, one.tokens) for one in chunks if one.request.number in pick.requests]
        self.now += seconds * (1 + self._noise * self._random.gauss(0, 1))
        for chunk in chunks:
            chunk.request.done = chunk.end
            if chunk.request.caught_up:
                chunk.request.ids.append(7)
        if pick == Pick() or (pick and pick.decoding):
            self.gaps.append(self.now - self._last)
            self._last = self.now
        one.note(pick, chunks, prepared)
        return pick

    def rate(self, begin: float) -> float:
        """Tokens of prompts a second since then."""
        return sum(tokens for _, tokens in self.read) / (self.now - begin)


def request(number: int, tokens: int, decodes: bool = False, chunk: int = 4096) -> Request:
    return Request(
        [5] * tokens, Sampling(), Limits(prefill_chunk=chunk), number=number, done=tokens - 1 if decodes else 0
    )


def busy(machine: Machine, one: Pace, steps: int = 1000, warm: int = 200) -> tuple[list[float], float]:
    """The times between tokens of 8 that decode beside a prompt without an end, and the tokens a second of it."""
    active = [request(number, 100, decodes=True) for number in range(8)] + [request(9, 4_000_000)]
    for _ in range(warm):
        machine.step(one, active)
    begin, machine.gaps, machine.read = machine.now, [], []
    for _ in range(steps):
        machine.step(one, active)
    return sorted(machine.gaps), machine.rate(begin)


def best(chunk, decode: float, noise: float) -> float:
    """Tokens a second in what the target leaves of the time, with the fastest size that fits."""
    fitting = [size for size in SIZES if decode + chunk(size) * (1 + 3 * noise) <= MOST * TARGET]
    return max(size / chunk(size) for size in fitting) * (1 - decode / TARGET)


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.03])
@pytest.mark.parametrize("timed", [True, False], ids=["timed", "learned"])
@pytest.mark.parametrize(
    ("chunk", "decode"),
    [
        (affine(0.004, 1 / 20_500), 0.006),
        (affine(0.03, 1 / 60_000), 0.006),
        (affine(0.001, 1 / 5_000), 0.006),
        (flat(TWO), 0.0082),
        (flat(FASTER), 0.0082),
    ],
    ids=["slope", "fixed", "slow", "two", "faster"],
)
def test_time_between_tokens(monkeypatch, chunk, decode, timed, noise):
    """The target is kept on the average, few are much later, and what it leaves is used."""
    machine = Machine(monkeypatch, chunk, decode, noise)
    gaps, rate = busy(machine, Pace(TARGET, {size: chunk(size) for size in TOKENS} if timed else {}), steps=1200)
    assert gaps[int(0.99 * len(gaps))] <= MOST * TARGET
    assert sum(gaps) / len(gaps) <= 1.01 * TARGET
    assert rate > 0.85 * best(chunk, decode, noise)


# as measured on two H200 and on one
CAPTURED = {
    "two": [16.8, 24.3, 33.1, 40.3, 47.0, 52.5, 59.2, 60.2, 66.4, 66.8, 86.3, 102.3],
    "one": [23.7, 36.9, 44.7, 53.8, 63.4, 64.7, 73.6, 78.3, 85.4, 88.6, 115.6, 130.6],
}


@pytest.mark.parametrize(
    ("card", "part", "decode", "least", "latest"),
    [("two", 1.0, 0.00796, 9000, 0.06), ("two", 0.9, 0.0075, 13000, 0.06), ("one", 1.0, 0.0121, 5000, 0.07)],
)
def test_those_who_decode_go_along(monkeypatch, card, part, decode, least, latest):
    """More is read than where steps alternate, and no later."""
    table = {size: part * ms / 1e3 for size, ms in zip(TOKENS, CAPTURED[card], strict=True)}
    rates = []
    for ways in ((Apart, Mixed), (Apart, Apart)):
        machine = Machine(monkeypatch, flat(table), decode, 0.02, ways)
        gaps, rate = busy(machine, Pace(TARGET, dict(table)))
        rates.append(rate)
        if ways[1] is Mixed:
            assert gaps[int(0.99 * len(gaps))] <= latest
            assert sum(gaps) / len(gaps) <= 1.01 * TARGET
    assert rates[0] > max(least, 1.2 * rates[1])


def test_sizes_that_were_timed_wrongly_are_learned(monkeypatch):
    chunk = flat(TWO)
    timed = {size: chunk(size) * (0.85 if size % 256 else 1.15) for size in TOKENS}
    gaps, rate = busy(Machine(monkeypatch, chunk, 0.0082, 0.02), Pace(TARGET, timed))
    assert gaps[int(0.99 * len(gaps))] <= MOST * TARGET
    assert rate > 0.7 * best(chunk, 0.0082, 0.02)


def test_what_all_chunks_take_may_change(monkeypatch):
    """As at the end of a long prompt; and back."""
    machine = Machine(monkeypatch, flat(FASTER), 0.0082)
    one = Pace(TARGET, {size: machine.chunk(size) for size in TOKENS})
    _, before = busy(machine, one)
    machine.chunk = flat({size: 1.5 * seconds for size, seconds in FASTER.items()})
    gaps, _ = busy(machine, one, warm=80)
    assert gaps[int(0.99 * len(gaps))] <= MOST * TARGET
    machine.chunk = flat(FASTER)
    assert busy(machine, one)[1] == pytest.approx(before, rel=0.02)


def test_one_that_took_long_is_forgotten(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pace(TARGET, {size: machine.chunk(size) for size in TOKENS})
    _, before = busy(machine, one)
    machine.chunk = lambda tokens: 3.0
    busy(machine, one, steps=2, warm=0)
    machine.chunk = flat(TWO)
    busy(machine, one, steps=20, warm=0)
    assert len(machine.read) >= 8
    assert busy(machine, one, steps=300)[1] == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize(
    ("chunk", "decode", "target"), [(flat(ONE), 0.0127, 0.05), (flat(TWO), 0.0082, 0.02), (flat(TWO), 0.045, 0.05)]
)
def test_where_no_chunk_fits_the_target_holds_on_the_average(monkeypatch, chunk, decode, target):
    """With the smallest that does not waste the time: its tokens are a fourth of what the fastest reads."""
    gaps, rate = busy(Machine(monkeypatch, chunk, decode), Pace(target, {size: chunk(size) for size in TOKENS}))
    worth = 256
    assert gaps[-1] == pytest.approx(decode + chunk(worth))
    goal = max(target, decode / (1 - SHARE))
    assert sum(gaps) / len(gaps) == pytest.approx(goal, rel=0.02)
    assert rate == pytest.approx(worth / chunk(worth) * (1 - decode / goal), rel=0.02)


def test_where_no_chunk_fits_a_larger_one_that_takes_no_longer_goes(monkeypatch):
    """As on one H200, where the experts of 512 tokens are multiplied by faster kernels than those of 384."""
    machine = Machine(monkeypatch, flat(ONE | {256: 0.0747, 384: 0.0765, 512: 0.0707}), 0.012)
    busy(machine, Pace(TARGET, {size: machine.chunk(size) for size in TOKENS}))
    assert {tokens for _, tokens in machine.read[-9:]} == {512}


def test_a_target_that_cannot_be_kept_starves_no_prompt(monkeypatch):
    machine, one = Machine(monkeypatch, flat(TWO), decode=0.2), Pace(TARGET)
    gaps, rate = busy(machine, one)
    assert sum(gaps) / len(gaps) <= 1.01 * 0.2 / (1 - SHARE)
    assert rate > 3000


def test_time_that_was_not_needed_is_not_saved_up(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pace(TARGET, {size: machine.chunk(size) for size in TOKENS})
    alone = [request(number, 100, decodes=True) for number in range(8)]
    for _ in range(500):
        machine.step(one, alone)
    gaps, _ = busy(machine, one, steps=100, warm=0)
    assert sum(gaps) <= (len(gaps) + 1.2) * TARGET


def test_a_step_without_prompts_that_took_long_is_forgotten(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pace(TARGET, {size: machine.chunk(size) for size in TOKENS})
    _, before = busy(machine, one)
    alone = [request(number, 100, decodes=True) for number in range(8)]
    machine.decode = 3.0
    machine.step(one, alone)
    machine.decode = 0.0082
    assert busy(machine, one, warm=60)[1] == pytest.approx(before, rel=0.02)


def test_a_chunk_takes_no_more_than_a_larger_one():
    times = ChunkTimes({32: 0.1, 128: 0.05, 512: 0.08}, 1.0)
    assert [times.of(tokens) for tokens in (20, 100, 256, 512)] == pytest.approx([0.05, 0.05, 0.06, 0.08])


def test_a_part_of_a_size_does_not_tell_what_that_takes():
    """Where the host launches it; a captured one takes as long."""
    times, captured = ChunkTimes({}, 0.03), ChunkTimes({256: 0.03}, 1.0)
    times.learn([256], 0.05)
    for one in (times, captured):
        one.learn([130], 0.02)
    assert times.of(256) == pytest.approx(0.05)
    assert captured.of(256) < 0.03


def test_all_go_together_where_nobody_waits_for_a_token(monkeypatch):
    one = Pace(TARGET)
    assert one.pick([request(1, 300), request(2, 5000)]) is None
    assert one.pick([request(1, 300, decodes=True)]) == Pick()


def test_where_nobody_waits_all_but_a_few_are_captured(monkeypatch):
    """One more than a captured step has room for: all of them would be launched kernel by kernel."""
    machine, one = Machine(monkeypatch, flat(ONE)), Pace(TARGET, ONE, sequences=7)
    active = [request(number, 30) for number in range(8)]
    assert one.pick(active) == Pick(tuple(range(7)), 210)
    assert one.pick(active[:7]) is None
    assert one.pick([request(number, 300) for number in range(8)]) is None
    for _ in range(2):  # what a step takes is known
        machine.step(one, [request(9, 100, decodes=True)])
    one.pick(active)
    machine.step(one, active)
    assert [it.number for it in active if it.done == 0] == [7]
    # the last one follows at once: its first token is not later than the others' second
    assert machine.step(one, active) == Pick((7,), 30)
    assert machine.step(one, active) == Pick()
    assert Pace(TARGET, sequences=7).pick([request(number, 30) for number in range(8)]) is None


def test_short_prompts_share_the_time_between_two_tokens(monkeypatch):
    machine, one = Machine(monkeypatch, affine(0.001, 1 / 20_000)), Pace(TARGET)
    active = [request(0, 10, decodes=True), *(request(number, 30) for number in range(1, 40))]
    while len(machine.read) < 39:
        machine.step(one, active)
    assert len(machine.gaps) <= 5
    assert max(machine.gaps[1:]) <= MOST * TARGET


def test_little_is_read_in_the_time_that_is_left_only_where_it_ends_a_prompt(monkeypatch):
    """After a large chunk a small one would fit."""
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pace(0.1, {size: machine.chunk(size) for size in TOKENS})
    machine.step(one, [request(0, 100, decodes=True), request(1, 100_000)])
    busy(machine, one)
    assert {tokens for _, tokens in machine.read} == {2048}
    active = [request(0, 100, decodes=True), request(1, 100_000), request(2, 20)]
    begin = len(machine.read)
    while len(machine.read) < begin + 3:
        machine.step(one, active)
    assert (2, 20) in machine.read


def test_shortest_first_and_none_is_passed_over_for_ever(monkeypatch):
    machine, one = Machine(monkeypatch, affine(0.001, 1 / 5_000)), Pace(TARGET)
    active = [request(0, 10, decodes=True), request(1, 4000), request(2, 300)]
    order = []
    for number in range(3, 120):
        pick = machine.step(one, active)
        if pick.requests:
            order.append(pick.requests[0])
        if not any(not one.decodes and one.number > 1 for one in active):
            active = [active[0], active[1], request(number, 300)]
    assert order[0] == 2
    places = [place for place, who in enumerate(order) if who == 1]
    assert places
    between = [later - before for before, later in pairwise(places)]
    assert 1 < min(between) <= max(between) <= PATIENCE + 1


def test_a_step_that_captures_a_graph_teaches_nothing(monkeypatch):
    machine, one = Machine(monkeypatch, flat(TWO)), Pace(TARGET, {size: flat(TWO)(size) for size in TOKENS})
    active = [request(0, 100, decodes=True), request(1, 100_000)]
    for _ in range(20):
        machine.step(one, active)
    before = [one._chunks.of(size) for size in SIZES]
    machine.chunk = lambda tokens: 3.0
    machine.step(one, active, prepared=True)
    machine.chunk = flat(TWO)
    machine.step(one, active)
    assert [one._chunks.of(size) for size in SIZES] == before
