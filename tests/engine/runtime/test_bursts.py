"""Short prompts that come together share steps, and what each gets is what it gets alone."""

import pytest

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime import pace, runner, scheduler
from dsv4cli.engine.runtime.capacity import Capacity
from dsv4cli.engine.runtime.chunk_graphs import ROWS_EACH, TOKENS
from dsv4cli.engine.runtime.chunk_times import SIZES, ChunkTimes
from dsv4cli.engine.runtime.decoding_times import SHARE
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.pace import APART, SAVED, Pace
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.scheduler import Pick
from dsv4cli.engine.runtime.ways import LONGEST, MOST, Apart, Mixed
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.engine.runtime.test_pace import ONE, TARGET, TWO, Machine, flat, request
from tests.engine.runtime.test_reuse import asked, check, check_empty
from tests.support.speculation import model_of, open_gate, text

SLOW = pytest.mark.slow
# seconds of a captured chunk of Flash by its tokens on one H200, whose rows are as many as its tokens
ROWS = {32: 0.024, 64: 0.037, 128: 0.046, 256: 0.054, 512: 0.066, 1024: 0.091, 1536: 0.119, 2048: 0.134}


def burst(monkeypatch, table, prompts, decoding=8, decode=lambda requests: 0.008, saved=0, ways=(Apart, Apart)):
    """A machine that has read prompts of so many tokens that come together beside some that decode, and when each had
    its first token. Steps of 1 to 64 that decode were timed before; so many longer times between tokens are saved.
    ways: as of `Machine`."""
    chunk = flat(table)
    machine, one = Machine(monkeypatch, chunk, ways=ways), Pace(TARGET, {size: chunk(size) for size in TOKENS})
    for count in (1, 2, 4, 8, 16, 32, 64, decoding, decoding):
        machine.decode = decode(count)
        for _ in range(3):
            machine.step(one, [request(number, 100, decodes=True) for number in range(count)])
    begin, machine.gaps, firsts, one._even = machine.now, [], {}, saved * APART
    active = [request(number, 100, decodes=True) for number in range(decoding)]
    active += [request(number, tokens) for number, tokens in enumerate(prompts, decoding)]
    while len(firsts) < len(prompts):
        machine.decode = decode(sum(one.decodes for one in active))
        machine.step(one, active)
        firsts |= {one.number: machine.now - begin for one in active[decoding:] if one.decodes} | firsts
    machine.decode = decode(len(active))
    machine.step(one, active)
    return machine, [firsts[number] for number in sorted(firsts)]


@pytest.mark.parametrize("ways", [(Apart, Apart), (Apart, Mixed)], ids=["apart", "mixed"])
def test_prompts_that_come_together_share_chunks_that_fit(monkeypatch, ways):
    machine, firsts = burst(monkeypatch, TWO, [30] * 56, ways=ways)
    assert max(machine.gaps) <= MOST * TARGET
    # one by one 17 chunks of 22 ms a second beside steps of 8, that is 3.3 s
    assert max(firsts) < 0.3


def test_those_who_join_count_in_the_steps_that_follow(monkeypatch):
    """A step of 64 takes three times as long as one of 8."""
    machine, _ = burst(monkeypatch, TWO, [30] * 50, decode=lambda requests: 0.004 + 0.02 * requests / 64)
    assert max(machine.gaps) <= MOST * TARGET


def test_where_no_chunk_fits_prompts_share_what_a_long_one_gets(monkeypatch):
    """A chunk of 256 tokens is the smallest that is worth it."""
    machine, firsts = burst(monkeypatch, ONE, [30] * 56, decode=lambda requests: 0.0127)
    assert max(machine.gaps) == pytest.approx(0.0127 + machine.chunk(256))
    assert sum(machine.gaps) / len(machine.gaps) <= 1.1 * TARGET
    assert max(tokens for _, tokens in machine.read) == 30
    # one by one 56 times what is between two tokens, 2.9 s
    assert max(firsts) < 0.75


def test_many_prompts_are_read_at_once_where_times_between_tokens_were_even(monkeypatch):
    """As many as are read the fastest: 51 of them."""
    machine, firsts = burst(monkeypatch, ROWS, [30] * 56, saved=1)
    assert machine.gaps[0] == pytest.approx(machine.chunk(1536) + 0.008)
    assert MOST * TARGET < machine.gaps[0] <= LONGEST * TARGET
    assert firsts[:51] == [pytest.approx(machine.chunk(1536))] * 51


def test_those_who_decode_go_along_where_many_prompts_are_read_at_once(monkeypatch):
    """Their eight rows leave room for 50 prompts."""
    machine, firsts = burst(monkeypatch, ROWS, [30] * 56, saved=1, ways=(Apart, Mixed))
    assert machine.gaps[0] == pytest.approx(machine.chunk(1536))
    assert firsts[:50] == [pytest.approx(machine.chunk(1536))] * 50


def test_no_time_between_tokens_is_longer_than_the_longest(monkeypatch):
    """Those who join count in it."""
    machine, firsts = burst(monkeypatch, ROWS, [30] * 56, decode=lambda requests: 0.001 * requests, saved=SAVED)
    goal = 0.064 / (1 - SHARE)
    assert MOST * goal < machine.gaps[0] <= LONGEST * goal
    slow = {tokens: 2 * seconds for tokens, seconds in ROWS.items()}
    machine, firsts = burst(monkeypatch, slow, [30] * 56, saved=SAVED)
    assert max(machine.gaps) <= LONGEST * TARGET
    assert len(set(firsts)) > 1


def test_one_of_a_hundred_times_between_tokens_is_longer(monkeypatch):
    """However often many prompts come together."""
    machine, one = Machine(monkeypatch, flat(ROWS), 0.005), Pace(TARGET, {size: flat(ROWS)(size) for size in TOKENS})
    deciding, waiting, number = [request(number, 100, decodes=True) for number in range(8)], [], 8
    for _ in range(2000):
        waiting = [one for one in waiting if not one.decodes]
        if len(machine.gaps) % 40 == 0 and not waiting:
            waiting, number = [request(number + more, 30) for more in range(56)], number + 56
        machine.step(one, [*deciding, *waiting])
    late = [place for place, gap in enumerate(machine.gaps) if gap > MOST * TARGET]
    assert SAVED < len(late) <= SAVED + len(machine.gaps) / APART


def test_many_prompts_are_read_at_once_also_where_every_chunk_is_late(monkeypatch):
    """As on one H200: a chunk that does not fit is none of the longer times between tokens."""
    machine, table = Machine(monkeypatch, flat(ROWS), 0.0127), {size: flat(ROWS)(size) for size in TOKENS}
    one, decoding = Pace(TARGET, table), [request(number, 100, decodes=True) for number in range(8)]
    for _ in range(300):
        machine.step(one, [*decoding, request(8, 100_000)])
    assert max(machine.gaps[1:]) > MOST * TARGET
    before, active = len(machine.read), [*decoding, *(request(number, 30) for number in range(9, 65))]
    while len(machine.read) == before:
        machine.step(one, active)
    assert len(machine.read) - before == 51


def test_few_prompts_share_what_fits(monkeypatch):
    """Where that reads not much less than all of them at once, which no token should wait for."""
    machine, firsts = burst(monkeypatch, ONE, [30] * 3, decode=lambda requests: 0.0127, saved=SAVED)
    assert max(machine.gaps) <= MOST * TARGET
    assert firsts[0] == firsts[1] == pytest.approx(ONE[64])


@pytest.mark.parametrize("tokens", [31, 10])
def test_prompts_go_one_after_another_where_that_is_as_fast(tokens, monkeypatch):
    """The first has its token earlier."""
    table = {32: 0.02, 64: 0.042, 128: 0.045, 512: 0.09, 2048: 0.2}
    _, firsts = burst(monkeypatch, table, [tokens] * 2)
    assert firsts[0] == pytest.approx(0.02)


def test_a_prompt_that_is_longer_than_a_chunk_joins_none(monkeypatch):
    machine, _ = burst(monkeypatch, ONE, [40, 3000], decode=lambda requests: 0.0127)
    assert machine.read[:2] == [(8, 40), (9, 256)]
    assert max(machine.gaps) <= 0.0127 + machine.chunk(256) + 1e-9


def test_in_the_time_that_is_left_no_more_is_read_than_fits(monkeypatch):
    """Behind a chunk of 1,536 tokens few prompts fit, though many together would be read six times as fast."""
    machine, target = Machine(monkeypatch, flat(TWO), 0.0082), 0.1
    one = Pace(target, {size: machine.chunk(size) for size in TOKENS})
    active = [request(0, 100, decodes=True), request(1, 1500)]
    while not one._read:
        machine.step(one, active)
    active += [request(number, 20) for number in range(2, 40)]
    machine.gaps = []
    while not machine.gaps:
        machine.step(one, active)
    assert [tokens for _, tokens in machine.read] == [1500, 20, 20, 20]
    assert machine.gaps[0] <= MOST * target


def test_no_step_is_larger_than_the_largest_whose_time_is_known(monkeypatch):
    machine = Machine(monkeypatch, flat(TWO), 0.0082)
    one = Pace(1.0, {size: machine.chunk(size) for size in TOKENS})
    active = [request(0, 100, decodes=True), *(request(number, 1500) for number in range(1, 20))]
    picks = [machine.step(one, active) for _ in range(10)]
    assert 2048 < max(pick.tokens for pick in picks) <= SIZES[-1]


def added(one: Runner, *prompts: list[int], **given) -> list[Request]:
    """Requests of these prompts in a runner."""
    requests = [
        Request(ids, Sampling(), Limits(), number=number, end=600, **given) for number, ids in enumerate(prompts)
    ]
    for own in requests:
        one.add(own)
    return requests


def parts(one: Runner, *given) -> list[tuple[int, int, int]]:
    """Of each chunk of a step its request and its tokens."""
    ran = one.run(Pick(*given))
    one.finish(ran, [[5]] * len(ran.ready))
    return [(chunk.request.number, chunk.first, chunk.end) for chunk in ran.chunks]


def test_the_first_is_read_as_far_as_there_is_room_others_whole_or_not():
    one = Runner(model_of("mtp"), Capacity(6), "cpu")
    added(one, *(text(count, count) for count in (10, 50, 200, 40, 31, 4)))
    assert parts(one, (2, 0), 64) == [(2, 0, 64)]
    assert parts(one, (1, 0, 2, 3, 4), 50 + ROWS_EACH + 50) == [(1, 0, 50), (0, 0, 10), (3, 0, 40)]
    assert parts(one, (5, 4), 2 * ROWS_EACH - 1) == [(5, 0, 4)]
    assert parts(one, (4,), 1000) == [(4, 0, 31)]


def test_those_who_decode_go_in_front_whatever_room_there_is():
    one = Runner(model_of("mtp"), Capacity(5), "cpu")
    requests = added(one, *(text(count, count) for count in (9, 8, 60, 20)))
    assert parts(one, (0, 1), 40) == [(0, 0, 9), (1, 0, 8)]
    assert all(own.decodes for own in requests[:2])
    assert parts(one, (2, 3), 30, (0, 1)) == [(0, 9, 10), (1, 8, 9), (2, 0, 28)]


def test_a_step_has_no_more_tokens_than_its_memory_is_for(monkeypatch):
    """Whatever was picked, and however large a chunk may be."""
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 40)
    one = Runner(model_of("mtp"), Capacity(2), "cpu")
    added(one, text(100, 1))
    assert parts(one, (0,), 100) == [(0, 0, 40)]


def test_what_one_is_about_to_keep_is_waited_for():
    """By those that begin with it, not by others, nor where it saves next to nothing."""
    one = Runner(model_of("mtp"), Capacity(6, cache_memory=2 * 10**7), "cpu")
    system = text(100, 1)
    prompts = [system + text(20, 3), text(40, 2), system + text(9, 4), system[:99] + text(20, 5)]
    requests = added(one, *prompts, keep=(100,))
    assert parts(one, (0, 1, 2, 3), 500) == [(0, 0, 100), (1, 0, 40), (3, 0, 100)]
    assert parts(one, (0, 2, 3), 500) == [(0, 100, 120), (2, 100, 109), (3, 100, 119)]
    assert [own.cached for own in requests] == [0, 0, 100, 0]
    one.forget()
    added(one, *[text(30, 6)] * 3, keep=(30,))
    assert parts(one, (0, 1, 2), 500) == [(0, 0, 30)]
    assert parts(one, (1, 2), 500) == [(1, 29, 30), (2, 29, 30)]
    one.forget()
    added(one, text(30, 7), text(30, 7) + text(5, 8))
    assert parts(one, (0, 1), 500) == [(0, 0, 30), (1, 0, 35)]


def test_scored_texts_wait_for_nothing():
    """They find nothing and keep nothing."""
    one = Runner(model_of("mtp"), Capacity(6, cache_memory=2 * 10**7), "cpu")
    added(one, *[text(30, 6)] * 2, keep=(30,), scored=True)
    assert parts(one, (0, 1), 500) == [(0, 0, 30), (1, 0, 30)]


@pytest.mark.parametrize("beside", [0, 1])
def test_prompts_share_no_step_that_changes_their_bits(beside):
    """On a CPU those of up to 64 rows change none."""
    one, prompts = Engine(model_of("mtp"), Capacity(12, 640), "cpu", step_ms=1e6), (31, 3, 130, 20, 257, 34)
    decodes = [asked(text(9, 1), 60) for _ in range(beside)]
    for own in decodes:
        one.add(own)
    for _ in range(3 * beside):
        one.step()
    reading = [asked(text(count, count), 2) for count in prompts]
    for own in reading:
        one.add(own)
    steps = []
    while any(not own.done for own in reading):
        before = [own.done for own in reading]
        one.step()
        steps.append([own.done - done for own, done in zip(reading, before, strict=True) if done < len(own.prompt)])
    shared = [[count for count in step if count] for step in steps]
    assert max(map(len, shared)) == 3
    assert all(sum(step) <= MAX_SLOTS for step in shared if len(step) > 1)


@pytest.mark.parametrize("captured", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("most", [0, 3])
def test_each_gets_what_it_gets_alone(captured, most, monkeypatch):
    """Beside one that decodes, also where some of them are cancelled."""
    monkeypatch.setattr(runner, "captures", lambda device: captured)
    monkeypatch.setattr(ChunkTimes, "of", lambda times, tokens: 1 + tokens / 1000)
    open_gate(monkeypatch)
    one = Engine(
        model_of("mtp"), Capacity(12, 640, cache_memory=2 * 10**7), "cpu", drafting=Drafting(most), step_ms=1e6
    )
    one._pace._most = None  # as on a GPU
    monkeypatch.setattr(pace, "Apart", Mixed)
    waits = asked(text(9, 1), 60)
    one.add(waits)
    for _ in range(3):
        one.step()
    prompts = [asked(text(count, count), keep=(1, count)) for count in (30, 3, 130, 31, 257, 30, 18, 64)]
    found, shared = {own: [] for own in (waits, *prompts)}, 0
    for own in prompts:
        one.add(own)
    picks, pick = [], one._pace.pick
    monkeypatch.setattr(one._pace, "pick", lambda active: picks.append(pick(active)) or picks[-1])
    while one.busy:
        reading = [own for own in prompts if not own.done]
        for result in one.step():
            found.setdefault(result.request, []).extend(result.tokens)
        shared = max(shared, sum(own.done > 0 for own in reading))
        if prompts[3].done:
            one.cancel(prompts[3])
    assert shared >= 5
    assert any(own and own.decoding for own in picks)
    for own in (*prompts[:3], *prompts[4:]):
        check("mtp", own, found[own])
    check_empty(one)
