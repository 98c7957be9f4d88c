"""Short prompts that come together share steps, and what each gets is what it gets alone."""

import pytest

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime import runner, scheduler
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.pacing.pacer import Pacer
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import StepChoice
from dsv4cli.engine.runtime.step_sizes import ROWS_PER_SEQUENCE
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.engine.runtime.test_reuse import asked, check, check_empty
from tests.support.slow import slow
from tests.support.speculation import always_draft, model_of, text

SLOW = pytest.mark.slow


def largest_riding(pacer, steps, decoding):
    """Return the largest step in which decoding requests ride along, whatever it takes."""
    return max(steps, key=lambda step: (step.riding, step.tokens))


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
    ran = one.run(StepChoice(*given))
    one.finish(ran, [[5]] * len(ran.ready))
    return [(chunk.request.number, chunk.first, chunk.end) for chunk in ran.chunks]


def test_the_first_is_read_as_far_as_there_is_room_others_whole_or_not():
    one = Runner(model_of("mtp"), Capacity(6), "cpu")
    added(one, *(text(count, count) for count in (10, 50, 200, 40, 31, 4)))
    assert parts(one, (2, 0), 64) == [(2, 0, 64)]
    assert parts(one, (1, 0, 2, 3, 4), 50 + ROWS_PER_SEQUENCE + 50) == [(1, 0, 50), (0, 0, 10), (3, 0, 40)]
    assert parts(one, (5, 4), 2 * ROWS_PER_SEQUENCE - 1) == [(5, 0, 4)]
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


@pytest.mark.parametrize("beside", [*slow(0), 1])
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


def counts_of(one: Engine, requests: list[Request]) -> list[int]:
    """How many tokens of each prompt a step prefills, of those that have some in it."""
    before = [own.done for own in requests]
    one.step()
    return [own.done - done for own, done in zip(requests, before, strict=True) if own.done > done]


def test_a_prompt_that_stops_early_leaves_its_rows_to_none_whose_bits_would_change():
    """A chunk ends where the state is cached, which the choice of the step does not know."""
    one = Engine(model_of("mtp"), Capacity(12, 640, cache_memory=2 * 10**7), "cpu", step_ms=1e6)
    one.add(asked(text(9, 1), 60))
    for _ in range(3):
        one.step()
    reading = [asked(text(300, 2), 2, keep=(20,)), asked(text(310, 3), 2), asked(text(320, 4), 2)]
    for own in reading:
        one.add(own)
    steps = [counts_of(one, reading) for _ in range(3)]
    assert [20] in steps
    assert all(len(step) < 2 for step in steps)


def test_a_prompt_that_is_admitted_now_shares_no_step_that_changes_its_bits():
    """It waited for the place of another that has ended since the last step."""
    one = Engine(model_of("mtp"), Capacity(2, 640), "cpu", step_ms=1e6)
    reading = [asked(text(count, count), 2) for count in (300, 310, 320)]
    for own in reading:
        one.add(own)
    one.cancel(reading[1])
    assert counts_of(one, reading) == [300]
    assert reading[2].sequence is not None


def test_an_engine_of_one_sequence_takes_prompts_one_by_one(monkeypatch):
    """On a GPU, where the sequences of a step are limited only by their number."""
    monkeypatch.setattr(runner, "captures", lambda device: True)
    one = Engine(model_of("mtp"), Capacity(1, 640), "cpu", step_ms=1e6)
    monkeypatch.setattr(one._pacer, "_shared_rows", None)
    both = [asked(text(count, count), 2) for count in (31, 130)]
    for own in both:
        one.add(own)
    while one.busy:
        one.step()
    assert [len(own.ids) for own in both] == [33, 132]


@pytest.mark.parametrize("captured", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("most", [*slow(0), 3])
def test_each_gets_what_it_gets_alone(captured, most, monkeypatch):
    """Beside one that decodes, also where some of them are cancelled."""
    monkeypatch.setattr(runner, "captures", lambda device: captured)
    monkeypatch.setattr(Pacer, "_best", largest_riding)
    always_draft(monkeypatch)
    one = Engine(
        model_of("mtp"), Capacity(12, 640, cache_memory=2 * 10**7), "cpu", drafting=Drafting(most), step_ms=1e6
    )
    one._pacer._shared_rows = None  # as on a GPU
    waits = asked(text(9, 1), 40)
    one.add(waits)
    for _ in range(3):
        one.step()
    prompts = [asked(text(count, count), keep=(1, count)) for count in (30, 3, 130, 31, 140, 30, 18, 64)]
    found, shared = {own: [] for own in (waits, *prompts)}, 0
    for own in prompts:
        one.add(own)
    picks, pick = [], one._pacer.choose
    monkeypatch.setattr(one._pacer, "choose", lambda active: picks.append(pick(active)) or picks[-1])
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
