"""The generation loop on a small model in plain fp32: what a sequence gets, whatever else is in the batch."""

import pytest
import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime import generate, scheduler
from dsv4cli.engine.runtime.cache import Cache
from dsv4cli.engine.runtime.generate import Generator, Step
from dsv4cli.engine.runtime.graphs import SIZES
from dsv4cli.engine.runtime.prepare import make_batch
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import MAX_SEED, Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, UnsoundResult, UsageError
from tests.support.small_model import by_number, generator, model, prompts


def tokens(steps) -> dict[int, list[int]]:
    return {number: [step.token for step in found] for number, found in by_number(steps).items()}


def nothing_is_held(one: Generator) -> bool:
    cache = one.schedule.cache
    return (cache.free_slots, cache.used_blocks) == (len(cache.layers[0].window.data), 0)


def fresh_prefill(ids: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of the answer, by one step over text and answer."""
    cache = Cache(model().config, model().numerics)
    batch = make_batch(cache, [(cache.allocate(), ids + answer[:-1])])
    with torch.no_grad():
        return model().logits(model()(batch, cache.layers).streams[-len(answer) :]).argmax(-1).tolist()


def test_greedy_is_the_argmax_of_a_fresh_prefill():
    one = generator(prompts(), Sampling(temperature=0), max_tokens=4, prefill_chunk=50)
    found = tokens(one.steps())
    assert found == {number: fresh_prefill(ids, found[number]) for number, ids in enumerate(prompts())}
    assert [len(answer) for answer in found.values()] == [4] * len(prompts())
    assert nothing_is_held(one)


SAMPLING, LIMITS = Sampling(1.3, 0.98, 7), {"max_tokens": 6, "logprobs": 2}


def each_alone(texts: list[list[int]]) -> list[list[Step]]:
    # prompt n draws with seed + n
    return [
        list(generator([ids], Sampling(1.3, 0.98, 7 + number), **LIMITS).steps()) for number, ids in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[Step]]:
    return each_alone(prompts())


@pytest.mark.parametrize(("slots", "chunk"), [(64, 2048), (2, 30), (1, 50)])
def test_a_sequence_does_not_depend_on_the_others(alone, monkeypatch, slots, chunk):
    monkeypatch.setattr(scheduler, "MAX_SLOTS", slots)
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 100)
    together = generator(prompts(), SAMPLING, prefill_chunk=chunk, **LIMITS)
    found = by_number(together.steps())
    assert nothing_is_held(together)
    for number, expected in enumerate(alone):
        assert [step.token for step in found[number]] == [step.token for step in expected]
        for ours, other in zip(found[number], expected, strict=True):
            assert ours.logprob == pytest.approx(other.logprob, abs=1e-4)  # fp32 sums in another order
            assert len(ours.top) == 2


@pytest.mark.parametrize(("slots", "chunk", "longest"), [(64, 2048, 131), (2, 30, 131), (3, 1, 9)])
def test_a_decoder_draws_the_same_tokens(alone, monkeypatch, slots, chunk, longest):
    """As on a GPU, but for the graphs: steps of one token of each sequence go through numbers that stay in place."""
    texts = [ids[:longest] for ids in prompts()]
    expected = alone if texts == prompts() else each_alone(texts)
    monkeypatch.setattr(scheduler, "MAX_SLOTS", slots)
    monkeypatch.setattr(scheduler, "captures", lambda device: True)
    one = generator(texts, SAMPLING, prefill_chunk=chunk, **LIMITS)
    decoded = one.schedule._decoder
    asked, waited = [], []
    one.schedule.preparing.waits = waited.append

    def logits(work, begins):
        asked.append(len(work))
        return type(decoded).logits(decoded, work, begins)

    monkeypatch.setattr(decoded, "logits", logits)
    steps = list(one.steps())
    assert tokens(steps) == {number: [step.token for step in steps] for number, steps in enumerate(expected)}
    assert max(asked) == min(slots, len(texts))
    # a step of each size is prepared once
    sizes = {next(size for size in SIZES if size >= count) for count in asked}
    assert waited == [True, False] * len(sizes)
    assert 0 < sum(step.prepared for step in steps) < len(steps)
    cache = one.schedule.cache
    assert (cache.free_slots, cache.used_blocks) == (cache.slots - 1, 0)


def test_seeds():
    texts, chosen = prompts()[2:], {"max_tokens": 5}
    first = tokens(generator(texts, Sampling(seed=3), **chosen).steps())
    assert tokens(generator(texts, Sampling(seed=3), **chosen).steps()) == first
    assert tokens(generator(texts, Sampling(seed=4), **chosen).steps()) != first


def test_the_limit_of_an_answer_is_that_of_its_tokens_or_of_the_context():
    found = by_number(generator(prompts()[2:], max_tokens=5, max_context=9).steps())
    assert [len(steps) for steps in found.values()] == [5, 2]
    assert [[step.finish for step in steps] for steps in found.values()] == [[None] * 4 + ["length"], [None, "length"]]


def test_the_end_token_ends_a_sequence_and_its_slot_is_used_again(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_SLOTS", 2)
    whole, draws = generate.sample, iter(range(100))

    def sample(logits, *rest):
        drawn = whole(logits, *rest)
        drawn[-1] = 1 if next(draws) == 2 else 5  # the third draw ends the second sequence
        return drawn

    monkeypatch.setattr(generate, "sample", sample)
    one = generator([[3], [4], [5, 6]], max_tokens=6)
    steps = list(one.steps())
    finished = [(step.number, step.finish) for step in steps if step.finish]
    assert finished == [(1, "stop"), (0, "length"), (2, "length")]
    assert tokens(steps)[1] == [5, 5, 1]
    assert nothing_is_held(one)


def test_a_short_prompt_is_answered_before_a_long_one():
    steps = generator([[5] * 60, [6]], max_tokens=2, prefill_chunk=8).steps()
    assert [step.number for step in steps if step.finish] == [1, 0]


def test_a_step_has_no_more_tokens_than_the_bound(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 10)
    one = scheduler.Schedule(model(), streams=3, prefill_chunk=8, device="cpu")
    for number in range(3):
        one.add(scheduler.Stream(number, [5] * 9))
    found = []
    for _ in range(3):
        chunks, streams = one.step()
        assert len(streams) == sum(chunk.end - chunk.first for chunk in chunks)
        found.append([(chunk.stream.number, chunk.end - chunk.first, chunk.row) for chunk in chunks])
    assert found == [[(0, 8, 0), (1, 2, 8)], [(0, 1, 0), (1, 7, 1), (2, 2, 8)], [(2, 7, 0)]]


def test_stopping_from_outside():
    one = generator(prompts()[2:], max_tokens=8)
    seen = []
    for step in one.steps():
        seen.append(step.number)
        if seen.count(0) == 2:
            one.stop(0)
            one.stop(0)  # harmless
    assert (seen.count(0), seen.count(1)) == (2, 8)
    one.stop(1)
    assert nothing_is_held(one)


def test_log_probabilities_are_those_at_temperature_1():
    for temperature in (0.0, 0.5):
        (step,) = generator([[5, 6]], Sampling(temperature), max_tokens=1, logprobs=20).steps()
        values = [value for _, value in step.top]
        assert values == sorted(values, reverse=True)
        assert len(dict(step.top)) == 20
        assert dict(step.top).get(step.token, step.logprob) == step.logprob
        if temperature == 0:
            assert step.top[0] == (step.token, step.logprob)


@pytest.mark.parametrize(
    ("texts", "words"),
    [([[]], "no tokens"), ([[1], [512]], "prompt 1 has the token id 512"), ([[1] * 9], "room for 8 and an answer")],
)
def test_prompts_that_the_model_cannot_take(texts, words):
    with pytest.raises(UsageError, match=words):
        generator(texts, max_context=9)


def test_numbers_that_are_not_finite_and_memory_that_runs_out(monkeypatch):
    monkeypatch.setattr(Transformer, "logits", lambda self, streams: torch.full((len(streams), 512), torch.nan))
    with pytest.raises(UnsoundResult):
        next(generator([[1]]).steps())

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Transformer, "logits", no_room)
    with pytest.raises(NotEnoughMemory, match="cpu ran out of memory: CUDA out of memory") as caught:
        next(generator([[1]]).steps())
    assert "--prefill-chunk" in caught.value.remedy


def test_requests_draw_as_each_would_alone():
    """Two temperatures, two ends and two seeds beside each other."""
    texts = prompts()[:3]
    ways = [(Sampling(0.0), 5), (Sampling(0.7, 0.9, 3), 9), (Sampling(1.5, 1.0, 3), 5)]
    asked = [
        Request(ids, sampling, Limits(most, logprobs=number))
        for number, (ids, (sampling, most)) in enumerate(zip(texts, ways, strict=True))
    ]
    together = by_number(Generator(model(), asked, "cpu").steps())
    alone = [[*Generator(model(), [one], "cpu").steps()] for one in asked]
    for number, steps in enumerate(alone):
        assert [step.token for step in together[number]] == [step.token for step in steps]
        assert {len(step.top) for step in together[number]} == {number}
    assert [len(steps) for steps in alone] == [5, 9, 5]


def test_the_seed_of_a_later_answer_is_one_that_can_be_given():
    assert [Sampling(seed=MAX_SEED - 1).plus(n).seed for n in range(3)] == [MAX_SEED - 1, MAX_SEED, 0]
