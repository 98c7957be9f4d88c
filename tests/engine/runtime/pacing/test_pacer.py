"""Inter-token latency stays near its target while prompts are prefilled: simulated steps, with a clock of the test."""

from bisect import bisect_left
from itertools import pairwise
from random import Random

import pytest

from dsv4cli.engine.config.capacity import PREFILL_ROWS
from dsv4cli.engine.runtime.pacing import pacer
from dsv4cli.engine.runtime.pacing.pacer import Pacer
from dsv4cli.engine.runtime.pacing.policy import PacingPolicy
from dsv4cli.engine.runtime.pacing.step_times import StepTimes
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Scheduler
from dsv4cli.engine.runtime.step import StepChoice
from dsv4cli.engine.runtime.step_sizes import CHUNK_ROWS, chunk_rows, rows_needed
from dsv4cli.engine.settings import Limits, Sampling
from tests.support.slow import slow_rows

POLICY = PacingPolicy(target=0.05)
TARGET, LONGEST = POLICY.target, POLICY.max_gap * POLICY.target
# requests may share a prefill step of any size, but decoding ones take no part in it
SEPARATE = CHUNK_ROWS[-1]
# seconds of a captured chunk of Flash by its rows: on two H200, with experts a quarter faster, on one; a size that is
# not named lies between its neighbors. Larger ones are launched by the host
TWO = {32: 0.022, 64: 0.026, 128: 0.036, 256: 0.040, 512: 0.047, 768: 0.054, 1024: 0.061, 2048: 0.1}
FASTER = {size: 0.82 * seconds for size, seconds in TWO.items()}
ONE = {32: 0.04, 64: 0.045, 512: 0.075, 1024: 0.101, 2048: 0.155}
LAUNCHED = 0.112
# another measurement of one H200
ROWS = {32: 0.024, 64: 0.037, 128: 0.046, 256: 0.054, 512: 0.066, 1024: 0.091, 1536: 0.119, 2048: 0.134}


def affine(fixed, each):
    return lambda tokens: fixed + each * tokens


def flat(table):
    """Return what a chunk takes in the smallest graph that it fits."""
    sizes = sorted(table)

    def seconds(tokens):
        size = chunk_rows(tokens)
        place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        less, more = sizes[place - 1], sizes[place]
        found = table[less] + (table[more] - table[less]) * (size - less) / (more - less)
        return found if size <= PREFILL_ROWS[-1] else max(found, LAUNCHED)

    return seconds


def timed(chunk):
    return {size: chunk(size) for size in PREFILL_ROWS}


class Machine:
    """A machine whose steps take as long as the test says."""

    def __init__(self, monkeypatch, chunk, decode=0.006, noise=0.0):
        self.now, self.gaps, self.read, self._last = 0.0, [], [], 0.0
        self.chunk, self.decode = chunk, decode
        self._random, self._noise = Random(1), noise
        monkeypatch.setattr(pacer, "perf_counter", lambda: self.now)

    def step(self, one: Pacer, active: list[Request], prepared=False) -> StepChoice | None:
        """Run a step and return which requests shared it."""
        pick, scheduler = one.choose(active), Scheduler(None)
        scheduler._active = active
        chunks = scheduler.chunks(pick)
        rows = rows_needed([chunk.tokens for chunk in chunks])
        seconds = self.decode if pick == StepChoice() else self.chunk(rows)
        if pick is not None and pick.requests:
            self.read += [(one.request.number, one.tokens) for one in chunks if one.request.number in pick.requests]
        self.now += seconds * (1 + self._noise * self._random.gauss(0, 1))
        for chunk in chunks:
            chunk.request.done = chunk.end
            if chunk.request.caught_up:
                chunk.request.ids.append(7)
        if pick == StepChoice() or (pick and pick.decoding):
            self.gaps.append(self.now - self._last)
            self._last = self.now
        one.note(pick, chunks, prepared)
        return pick

    def rate(self, begin: float) -> float:
        """Return the prompt tokens per second since then."""
        return sum(tokens for _, tokens in self.read) / (self.now - begin)


def request(number: int, tokens: int, decodes: bool = False, chunk: int = 4096) -> Request:
    return Request(
        [5] * tokens, Sampling(), Limits(prefill_chunk=chunk), number=number, done=tokens - 1 if decodes else 0
    )


def decoding(count=8):
    return [request(number, 100, decodes=True) for number in range(count)]


def busy(machine: Machine, one: Pacer, steps: int = 1000, warm: int = 200) -> tuple[list[float], float]:
    """Return the sorted gaps of 8 that decode beside an endless prompt, and the prompt's tokens per second."""
    active = [*decoding(), request(9, 4_000_000)]
    for _ in range(warm):
        machine.step(one, active)
    begin, machine.gaps, machine.read = machine.now, [], []
    for _ in range(steps):
        machine.step(one, active)
    return sorted(machine.gaps), machine.rate(begin)


def p99(gaps):
    return gaps[int(0.99 * len(gaps))]


def mean(numbers):
    return sum(numbers) / len(numbers)


def best(chunk, decode: float, noise: float) -> float:
    """Return the tokens per second in the time that decode steps leave, with the fastest size that is in time."""
    fitting = [size for size in CHUNK_ROWS if decode + chunk(size) * (1 + 3 * noise) <= LONGEST]
    return max(size / chunk(size) for size in fitting) * (1 - decode / TARGET)


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.03])
@pytest.mark.parametrize("known", [True, False], ids=["timed", "learned"])
@pytest.mark.parametrize(
    ("chunk", "decode"),
    [
        *slow_rows((affine(0.004, 1 / 20_500), 0.006), (affine(0.03, 1 / 60_000), 0.006)),
        (affine(0.001, 1 / 5_000), 0.006),
        (flat(TWO), 0.0082),
        *slow_rows((flat(FASTER), 0.0082)),
    ],
    ids=["slope", "fixed", "slow", "two", "faster"],
)
def test_gaps_stay_near_the_target_and_the_time_is_used(monkeypatch, chunk, decode, known, noise):
    machine = Machine(monkeypatch, chunk, decode, noise)
    gaps, rate = busy(machine, Pacer(POLICY, timed(chunk) if known else {}, SEPARATE), steps=1200)
    assert p99(gaps) <= LONGEST
    assert mean(gaps) <= 1.01 * TARGET
    assert rate > 0.85 * best(chunk, decode, noise)


# as measured on two H200 and on one
CAPTURED = {
    "two": [16.8, 24.3, 33.1, 40.3, 47.0, 52.5, 59.2, 60.2, 66.4, 66.8, 86.3, 102.3],
    "one": [23.7, 36.9, 44.7, 53.8, 63.4, 64.7, 73.6, 78.3, 85.4, 88.6, 115.6, 130.6],
}


@pytest.mark.parametrize(
    ("card", "part", "decode", "least", "gain"),
    # on one H200 no separate chunk is in time, and those that are used are late
    [
        *slow_rows(("two", 1.0, 0.00796, 12_000, 1.2)),
        ("two", 0.9, 0.0075, 16_000, 1.2),
        *slow_rows(("one", 1.0, 0.0121, 4_400, 0.95)),
    ],
)
def test_decoding_requests_that_ride_along_leave_more_time(monkeypatch, card, part, decode, least, gain):
    table = {size: part * ms / 1e3 for size, ms in zip(PREFILL_ROWS, CAPTURED[card], strict=True)}
    rates = []
    for shared_rows in (None, SEPARATE):
        machine = Machine(monkeypatch, flat(table), decode, 0.02)
        gaps, rate = busy(machine, Pacer(POLICY, dict(table), shared_rows))
        rates.append(rate)
        if shared_rows is None:
            assert p99(gaps) <= LONGEST
            assert mean(gaps) <= 1.01 * TARGET
    assert rates[0] > max(least, gain * rates[1])


def test_sizes_that_were_timed_wrongly_are_learned(monkeypatch):
    chunk = flat(TWO)
    wrong = {size: chunk(size) * (0.85 if size % 256 else 1.15) for size in PREFILL_ROWS}
    gaps, rate = busy(Machine(monkeypatch, chunk, 0.0082, 0.02), Pacer(POLICY, wrong, SEPARATE))
    assert p99(gaps) <= LONGEST
    assert rate > 0.7 * best(chunk, 0.0082, 0.02)


def test_a_change_of_all_chunks_is_followed(monkeypatch):
    """As at the end of a long prompt; and back."""
    machine = Machine(monkeypatch, flat(FASTER), 0.0082)
    one = Pacer(POLICY, timed(machine.chunk), SEPARATE)
    _, before = busy(machine, one)
    machine.chunk = flat({size: 1.5 * seconds for size, seconds in FASTER.items()})
    gaps, _ = busy(machine, one, warm=80)
    assert p99(gaps) <= LONGEST
    machine.chunk = flat(FASTER)
    assert busy(machine, one)[1] == pytest.approx(before, rel=0.02)


def test_an_outlier_is_forgotten(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pacer(POLICY, timed(machine.chunk), SEPARATE)
    _, before = busy(machine, one)
    machine.chunk = lambda tokens: 3.0
    busy(machine, one, steps=2, warm=0)
    machine.chunk = flat(TWO)
    busy(machine, one, steps=20, warm=0)
    assert len(machine.read) >= 8
    assert busy(machine, one, steps=300)[1] == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize(
    ("chunk", "decode", "target"),
    [(flat(ONE), 0.0127, 0.045), *slow_rows((flat(TWO), 0.0082, 0.02)), (flat(TWO), 0.045, 0.05)],
)
def test_where_no_chunk_is_in_time_the_target_holds_on_average(monkeypatch, chunk, decode, target):
    """The shortest chunk that prefills a fourth of the tokens per second of the fastest is used."""
    machine = Machine(monkeypatch, chunk, decode)
    gaps, rate = busy(machine, Pacer(PacingPolicy(target), timed(chunk), SEPARATE))
    worth = min(size for size in CHUNK_ROWS if size / chunk(size) >= 0.25 * max(s / chunk(s) for s in CHUNK_ROWS))
    goal = max(target, decode / (1 - POLICY.min_prefill_share))
    assert decode + chunk(worth) > POLICY.max_gap * goal
    assert {tokens for _, tokens in machine.read} == {worth}
    assert mean(gaps) == pytest.approx(goal, rel=0.02)
    assert rate == pytest.approx(worth / chunk(worth) * (1 - decode / goal), rel=0.02)


def test_a_larger_chunk_that_takes_no_longer_is_used(monkeypatch):
    """As on one H200, where the experts of 512 tokens are multiplied by faster kernels than those of 384."""
    machine = Machine(monkeypatch, flat(ONE | {256: 0.0747, 384: 0.0765, 512: 0.0707}), 0.012)
    busy(machine, Pacer(POLICY, timed(machine.chunk), SEPARATE))
    assert {tokens for _, tokens in machine.read[-9:]} == {512}


def test_a_target_that_cannot_be_kept_starves_no_prompt(monkeypatch):
    machine, one = Machine(monkeypatch, flat(TWO), decode=0.2), Pacer(POLICY, shared_rows=SEPARATE)
    gaps, rate = busy(machine, one)
    assert mean(gaps) <= 1.01 * 0.2 / (1 - POLICY.min_prefill_share)
    assert rate > 3000


def test_unused_time_is_not_saved_up(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pacer(POLICY, timed(machine.chunk), SEPARATE)
    for _ in range(500):
        machine.step(one, decoding())
    gaps, _ = busy(machine, one, steps=100, warm=0)
    assert sum(gaps) <= (len(gaps) + 1.2) * TARGET


def test_a_long_decode_step_is_forgotten(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pacer(POLICY, timed(machine.chunk), SEPARATE)
    _, before = busy(machine, one)
    machine.decode = 3.0
    machine.step(one, decoding())
    machine.decode = 0.0082
    assert busy(machine, one, warm=60)[1] == pytest.approx(before, rel=0.02)


def test_the_time_in_which_none_decoded_is_not_that_of_a_step(monkeypatch):
    """Prompts that are cached as a whole begin to decode at once, minutes after the last answer has ended."""
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pacer(POLICY, timed(machine.chunk), SEPARATE)
    for _ in range(9):
        machine.step(one, decoding(1))
    machine.now += 300
    for _ in range(2):
        machine.step(one, [request(number, 100, decodes=True) for number in (20, 21)])
    assert one.times.decode(2) == pytest.approx(0.0082)


def test_a_chunk_takes_no_more_than_a_larger_one():
    times = StepTimes(POLICY, {32: 0.1, 128: 0.05, 512: 0.08})
    assert [times.chunk(rows) for rows in (20, 100, 256, 512)] == pytest.approx([0.05, 0.05, 0.06, 0.08])


def test_part_of_a_captured_size_takes_as_long_as_all_of_it_and_part_of_another_less():
    captured, launched = StepTimes(POLICY, {256: 0.03}), StepTimes(POLICY, {})
    launched.learn_chunk(256, 0.03)
    assert captured.chunk(130) == pytest.approx(0.03)
    assert launched.chunk(130) == pytest.approx(0.03 * 130 / 256)
    captured.learn_chunk(130, 0.02)
    assert captured.chunk(256) < 0.03


def test_all_share_a_step_while_none_decodes():
    one = Pacer(POLICY)
    assert one.choose([request(1, 300), request(2, 5000)]) is None
    assert one.choose([request(1, 300, decodes=True)]) == StepChoice()


def test_more_prompts_than_a_step_holds_are_divided(monkeypatch):
    """The last one follows at once: its first token comes before the second token of the others."""
    machine, free = Machine(monkeypatch, flat(ONE)), Pacer(POLICY, ONE, sequences=7)
    active = [request(number, 30) for number in range(8)]
    assert free.choose(active) == StepChoice(tuple(range(7)), 210)
    assert free.choose(active[:7]) is None
    free.times.learn_decode(1, 0.006)
    machine.step(free, active)
    assert [it.number for it in active if it.done == 0] == [7]
    assert machine.step(free, active).requests == (7,)


def test_prompts_share_no_larger_step_than_keeps_their_bits():
    one = Pacer(POLICY, shared_rows=64)
    assert one.choose([request(0, 30), request(1, 20), request(2, 100)]) == StepChoice((1, 0), 50)
    assert one.choose([request(0, 300), request(1, 200)]) == StepChoice((1,), 200)
    assert one.choose([request(0, 300)]) is None


def test_short_prompts_share_the_time_between_two_tokens(monkeypatch):
    machine, one = Machine(monkeypatch, affine(0.001, 1 / 20_000)), Pacer(POLICY, shared_rows=SEPARATE)
    active = [request(0, 10, decodes=True), *(request(number, 30) for number in range(1, 40))]
    while len(machine.read) < 39:
        machine.step(one, active)
    assert len(machine.gaps) <= 5


def test_the_shortest_prompt_goes_first_and_none_starves(monkeypatch):
    machine, one = Machine(monkeypatch, affine(0.001, 1 / 5_000)), Pacer(POLICY, shared_rows=SEPARATE)
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
    assert 1 < min(between) <= max(between) <= POLICY.max_passes + 1


def test_no_prompt_starves_while_none_decodes(monkeypatch):
    """Answers of one token end with their prefill, so requests may arrive for hours without one that decodes."""
    machine, one = Machine(monkeypatch, affine(0.001, 1 / 5_000)), Pacer(POLICY, shared_rows=64)
    long = request(1, 1000, chunk=64)
    for number in range(2, 100, 2):
        machine.step(one, [long, request(number, 30), request(number + 1, 20)])
    assert long.done // 64 == 49 // (POLICY.max_passes + 1)


def test_a_step_that_captures_a_graph_teaches_nothing(monkeypatch):
    machine, one = Machine(monkeypatch, flat(TWO)), Pacer(POLICY, timed(flat(TWO)), SEPARATE)
    active = [request(0, 100, decodes=True), request(1, 100_000)]
    for _ in range(20):
        machine.step(one, active)
    before = [one.times.chunk(size) for size in CHUNK_ROWS]
    machine.chunk = lambda tokens: 3.0
    machine.step(one, active, prepared=True)
    machine.chunk = flat(TWO)
    machine.step(one, active)
    assert [one.times.chunk(size) for size in CHUNK_ROWS] == before


def burst(monkeypatch, table, prompts, count=8, decode=lambda requests: 0.008, credit=False, shared_rows=SEPARATE):
    """Return a machine that prefilled prompts of these lengths that came together, and their times to first token.

    Decode steps of 1 to 64 were timed before. credit: whether a long gap is allowed at once.
    """
    chunk = flat(table)
    machine, one = Machine(monkeypatch, chunk), Pacer(POLICY, timed(chunk), shared_rows)
    for number in (1, 2, 4, 8, 16, 32, 64, count, count):
        machine.decode = decode(number)
        for _ in range(3):
            machine.step(one, decoding(number))
    begin, machine.gaps, firsts = machine.now, [], {}
    one._gaps_since_burst = POLICY.gaps_per_burst if credit else -1000
    active = [*decoding(count), *(request(number, tokens) for number, tokens in enumerate(prompts, count))]
    while len(firsts) < len(prompts):
        machine.decode = decode(sum(one.decodes for one in active))
        machine.step(one, active)
        firsts |= {one.number: machine.now - begin for one in active[count:] if one.decodes} | firsts
    machine.decode = decode(len(active))
    machine.step(one, active)
    return machine, [firsts[number] for number in sorted(firsts)]


@pytest.mark.parametrize("shared_rows", [SEPARATE, None], ids=["separate", "riding"])
def test_prompts_that_come_together_share_chunks_that_are_in_time(monkeypatch, shared_rows):
    machine, firsts = burst(monkeypatch, TWO, [30] * 56, shared_rows=shared_rows)
    assert max(machine.gaps) <= LONGEST
    # one by one 17 chunks of 22 ms a second beside steps of 8, that is 3.3 s
    assert max(firsts) < 0.3


def test_prompts_that_join_count_in_the_decode_steps_that_follow(monkeypatch):
    """A decode step of 64 takes three times as long as one of 8."""
    machine, _ = burst(monkeypatch, TWO, [30] * 50, decode=lambda requests: 0.004 + 0.02 * requests / 64)
    assert max(machine.gaps) <= LONGEST


def test_where_no_chunk_is_in_time_prompts_share_the_shortest_efficient_one(monkeypatch):
    machine, firsts = burst(monkeypatch, ONE, [30] * 56, decode=lambda requests: 0.03)
    assert max(machine.gaps) > LONGEST
    assert mean(machine.gaps) <= 1.1 * TARGET
    assert max(tokens for _, tokens in machine.read) == 30
    # one by one 56 gaps, 2.9 s
    assert max(firsts) < 2


def test_a_burst_of_prompts_may_take_one_long_gap(monkeypatch):
    machine, firsts = burst(monkeypatch, ROWS, [30] * 56, credit=True)
    assert LONGEST < machine.gaps[0] <= POLICY.burst_gap * TARGET
    assert sum(first == min(firsts) for first in firsts) > 40


def test_no_gap_is_longer_than_that_of_a_burst(monkeypatch):
    slow = {tokens: 2 * seconds for tokens, seconds in ROWS.items()}
    machine, firsts = burst(monkeypatch, slow, [30] * 56, credit=True)
    assert max(machine.gaps) <= POLICY.burst_gap * TARGET
    assert len(set(firsts)) > 1


def test_long_gaps_are_rare(monkeypatch):
    """However often many prompts come together."""
    machine, one = Machine(monkeypatch, flat(ROWS), 0.005), Pacer(POLICY, timed(flat(ROWS)), SEPARATE)
    waiting, number = [], 8
    for _ in range(2000):
        waiting = [one for one in waiting if not one.decodes]
        if len(machine.gaps) % 40 == 0 and not waiting:
            waiting, number = [request(number + more, 30) for more in range(56)], number + 56
        machine.step(one, [*decoding(), *waiting])
    late = [gap for gap in machine.gaps if gap > LONGEST]
    assert 1 < len(late) <= 1 + len(machine.gaps) / POLICY.gaps_per_burst


def test_a_long_prompt_takes_no_burst(monkeypatch):
    machine, _ = burst(monkeypatch, ROWS, [3000], credit=True)
    assert max(machine.gaps) <= LONGEST


def test_a_long_prompt_shares_no_step_with_a_short_one_that_is_done_before(monkeypatch):
    machine, _ = burst(monkeypatch, ONE, [40, 3000])
    assert machine.read[0] == (8, 40)


def test_no_step_is_larger_than_the_largest_that_is_timed(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pacer(PacingPolicy(1.0), timed(machine.chunk), SEPARATE)
    active = [request(0, 100, decodes=True), *(request(number, 1500) for number in range(1, 20))]
    picks = [machine.step(one, active) for _ in range(10)]
    assert 2048 < max(pick.tokens for pick in picks) <= CHUNK_ROWS[-1]
