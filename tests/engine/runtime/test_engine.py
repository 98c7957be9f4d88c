"""The engine on a small model in plain fp32: what a sequence gets, whatever else is in the batch."""

from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime import leader_step as drawing
from dsv4cli.engine.runtime import runner, scheduler, score
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step_sizes import DECODE_BATCHES
from dsv4cli.engine.settings import MAX_SEED, Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, UnsoundResult, UsageError
from tests.support.slow import slow_rows
from tests.support.small_model import by_number, drawn, engine, model, prompts, requests
from tests.support.speculation import mask_of


def ids_of(tokens) -> dict[int, list[int]]:
    return {number: [token.id for token in found] for number, found in by_number(tokens).items()}


def nothing_is_held(one: Engine) -> bool:
    cache = one.runner.cache
    return (cache.free_slots, cache.used_blocks) == (len(cache.layers[0].window.data), 0)


def fresh_prefill(ids: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each position of the answer, by one step over text and answer."""
    cache = Cache(model().config, model().numerics)
    batch = make_batch(cache, [(cache.allocate(), ids + answer[:-1])])
    with torch.no_grad():
        return model().logits(model()(batch, cache.layers).streams[-len(answer) :]).argmax(-1).tolist()


def test_greedy_is_the_argmax_of_a_fresh_prefill():
    one = engine(prompts(), Sampling(temperature=0), max_tokens=4, prefill_chunk=50)
    found = ids_of(drawn(one))
    assert found == {number: fresh_prefill(ids, found[number]) for number, ids in enumerate(prompts())}
    assert [len(answer) for answer in found.values()] == [4] * len(prompts())
    assert nothing_is_held(one)


SAMPLING, LIMITS = Sampling(1.3, 0.98, 7), {"max_tokens": 6, "logprobs": 2}


def each_alone(texts: list[list[int]]) -> list[list[Token]]:
    # prompt n draws with seed + n
    return [
        [token for _, token in drawn(engine([ids], Sampling(1.3, 0.98, 7 + number), **LIMITS))]
        for number, ids in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[Token]]:
    return each_alone(prompts())


@pytest.mark.parametrize(("slots", "chunk"), [(2, 30), *slow_rows((64, 2048), (1, 50))])
def test_a_sequence_does_not_depend_on_the_others(alone, monkeypatch, slots, chunk):
    monkeypatch.setattr(runner, "MAX_SLOTS", slots)
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 100)
    together = engine(prompts(), SAMPLING, prefill_chunk=chunk, **LIMITS)
    found = by_number(drawn(together))
    assert nothing_is_held(together)
    for number, expected in enumerate(alone):
        assert [step.id for step in found[number]] == [step.id for step in expected]
        for ours, other in zip(found[number], expected, strict=True):
            assert ours.logprob == pytest.approx(other.logprob, abs=1e-4)  # fp32 sums in another order
            assert len(ours.top) == 2


@pytest.mark.parametrize(("slots", "chunk", "longest"), [(2, 30, 131), *slow_rows((64, 2048, 131), (3, 1, 9))])
def test_a_decoder_draws_the_same_tokens(alone, monkeypatch, slots, chunk, longest):
    """As on a GPU, but for the graphs: steps of one token of each sequence go through numbers that stay in place."""
    texts = [ids[:longest] for ids in prompts()]
    expected = alone if texts == prompts() else each_alone(texts)
    monkeypatch.setattr(runner, "MAX_SLOTS", slots)
    monkeypatch.setattr(runner, "captures", lambda device: True)
    one = engine(texts, SAMPLING, prefill_chunk=chunk, **LIMITS)
    decoded = one.runner.graphs
    asked, waited = [], []
    one.report_preparing(waited.append)

    def filled(work, *on_preparing):
        asked.append(len(work))
        return type(decoded).filled(decoded, work, *on_preparing)

    monkeypatch.setattr(decoded, "filled", filled)
    steps = list(drawn(one))
    assert ids_of(steps) == {number: [step.id for step in steps] for number, steps in enumerate(expected)}
    assert max(asked) == min(slots, len(texts))
    # a step of each size is prepared once
    sizes = {next(size for size in DECODE_BATCHES if size >= count) for count in asked}
    assert waited == [True, False] * len(sizes)
    assert 0 < sum(step.prepared for _, step in steps) < len(steps)
    cache = one.runner.cache
    # the padding's
    assert (cache.free_slots, cache.used_blocks) == (cache.slots - 1, 1)


def test_seeds():
    texts, chosen = prompts()[2:], {"max_tokens": 5}
    first = ids_of(drawn(engine(texts, Sampling(seed=3), **chosen)))
    assert ids_of(drawn(engine(texts, Sampling(seed=3), **chosen))) == first
    assert ids_of(drawn(engine(texts, Sampling(seed=4), **chosen))) != first


def test_the_limit_of_an_answer_is_that_of_its_tokens_or_of_the_context():
    found = by_number(drawn(engine(prompts()[2:], max_tokens=5, max_context=9)))
    assert [len(steps) for steps in found.values()] == [5, 2]
    assert [[step.finish for step in steps] for steps in found.values()] == [[None] * 4 + ["length"], [None, "length"]]


def test_the_end_token_ends_a_sequence_and_its_slot_is_used_again(monkeypatch):
    monkeypatch.setattr(runner, "MAX_SLOTS", 2)
    whole, draws = drawing.sample, iter(range(100))

    def sample(logits, *rest):
        drawn = whole(logits, *rest)
        drawn[-1] = 1 if next(draws) == 2 else 5  # the third draw ends the second sequence
        return drawn

    monkeypatch.setattr(drawing, "sample", sample)
    one = engine([[3], [4], [5, 6]], max_tokens=6)
    steps = list(drawn(one))
    finished = [(number, step.finish) for number, step in steps if step.finish]
    assert finished == [(1, "stop"), (0, "length"), (2, "length")]
    assert ids_of(steps)[1] == [5, 5, 1]
    assert nothing_is_held(one)


def test_a_short_prompt_is_answered_before_a_long_one():
    steps = drawn(engine([[5] * 60, [6]], max_tokens=2, prefill_chunk=8))
    assert [number for number, step in steps if step.finish] == [1, 0]


@pytest.mark.parametrize(("asked", "expected"), [({}, 3), ({"prefill_chunk": 30}, 2)])
def test_a_step_has_as_many_tokens_of_a_prompt_as_the_model_has_space_for(monkeypatch, asked, expected):
    monkeypatch.setattr(model(), "prefill_chunk", 20)
    one, steps = engine([[5] * 60], max_tokens=1, **asked), 0
    while one.busy:
        one.step()
        steps += 1
    assert steps == expected


def test_a_step_has_no_more_tokens_than_the_bound(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 10)
    one = Runner(model(), Capacity(slots=3), "cpu")
    for number in range(3):
        one.add(Request([5] * 9, Sampling(), Limits(prefill_chunk=8), number=number, end=20))
    found = []
    for _ in range(3):
        chunks = one.run().chunks
        found.append([(chunk.request.number, chunk.tokens, chunk.row) for chunk in chunks])
    assert found == [[(0, 8, 0), (1, 2, 8)], [(0, 1, 0), (1, 7, 1), (2, 2, 8)], [(2, 7, 0)]]


def test_stopping_from_outside():
    asked = [Request(ids, Sampling(seed=1), Limits(max_tokens=8)) for ids in prompts()[2:]]
    one = Engine.of(model(), asked, "cpu")
    seen = []
    while one.busy:
        for result in one.step():
            seen += [result.request.number] * len(result.tokens)
            if seen.count(0) == 2:
                one.cancel(asked[0])
                one.cancel(asked[0])  # harmless
    assert (seen.count(0), seen.count(1)) == (2, 8)
    one.cancel(asked[1])
    assert nothing_is_held(one)


def test_log_probabilities_are_those_at_temperature_1():
    for temperature in (0.0, 0.5):
        [(_, step)] = drawn(engine([[5, 6]], Sampling(temperature), max_tokens=1, logprobs=20))
        values = [value for _, value in step.top]
        assert values == sorted(values, reverse=True)
        assert len(dict(step.top)) == 20
        assert dict(step.top).get(step.id, step.logprob) == step.logprob
        if temperature == 0:
            assert step.top[0] == (step.id, step.logprob)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([[]], "no tokens"),
        ([[1], [512]], "prompt 1 has the token id 512"),
        ([[1, -1]], "the prompt has the token id -1"),
        ([[1, 1 << 40]], "the prompt has the token id 1099511627776"),
        ([[1] * 9], "limit is 9 tokens, including the answer"),
    ],
)
def test_prompts_that_the_model_cannot_take(texts, words):
    with pytest.raises(UsageError, match=words):
        engine(texts, max_context=9)


def test_numbers_that_are_not_finite_and_memory_that_runs_out(monkeypatch):
    monkeypatch.setattr(Transformer, "logits", lambda self, streams: torch.full((len(streams), 512), torch.nan))
    with pytest.raises(UnsoundResult):
        engine([[1]]).step()

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Transformer, "logits", no_room)
    with pytest.raises(NotEnoughMemory, match="cpu ran out of memory: CUDA out of memory") as caught:
        engine([[1]]).step()
    assert "--prefill-chunk" in caught.value.remedy


def test_requests_draw_as_each_would_alone():
    """Two temperatures, two ends and two seeds beside each other."""
    texts = prompts()[:3]
    ways = [(Sampling(0.0), 5), (Sampling(0.7, 0.9, 3), 9), (Sampling(1.5, 1.0, 3), 5)]

    def asked():
        return [
            Request(ids, sampling, Limits(most, logprobs=number))
            for number, (ids, (sampling, most)) in enumerate(zip(texts, ways, strict=True))
        ]

    together = by_number(drawn(Engine.of(model(), asked(), "cpu")))
    alone = [[step for _, step in drawn(Engine.of(model(), [one], "cpu"))] for one in asked()]
    for number, steps in enumerate(alone):
        assert [step.id for step in together[number]] == [step.id for step in steps]
        assert {len(step.top) for step in together[number]} == {number}
    assert [len(steps) for steps in alone] == [5, 9, 5]


class Rule:
    """A constraint: the n-th token is forced, some are banned, one is taken for another, some alone are allowed."""

    def __init__(self, forced=None, banned=(), instead=None, allowed=None):
        self._forced, self._banned, self._instead = forced or {}, banned, instead or {}
        self._mask = None if allowed is None else mask_of(allowed, 512)
        self.seen = []

    def forced(self):
        return self._forced.get(len(self.seen))

    def banned(self):
        return self._banned

    def masks(self, drafts):
        return [self._mask]

    def instead(self, token):
        return self._instead.get(token)

    def push(self, token):
        self.seen.append(token)


def test_each_request_has_its_own_constraint():
    """What it forces, bans and replaces leaves the neighbours alone; probabilities are the model's."""
    greedy, most = Sampling(temperature=0), Limits(3, logprobs=2)
    free = [token for _, token in drawn(Engine.of(model(), [Request([5, 6], greedy, most)], "cpu"))]
    likeliest, second = (free[0].top[index][0] for index in (0, 1))
    rules = [Rule(forced={0: 9}), Rule(banned=[likeliest]), Rule(instead={likeliest: 11}), None]
    rules += [Rule(allowed=[second, 7]), Rule(allowed=[likeliest, second], banned=[likeliest])]
    asked = [Request([5, 6], greedy, most, rule) for rule in rules]
    found = by_number(drawn(Engine.of(model(), asked, "cpu")))
    assert [found[number][0].id for number in range(6)] == [9, second, 11, likeliest, second, second]
    assert [found[number][0].top for number in range(6)] == [found[3][0].top] * 6
    assert found[1][0].logprob == found[3][0].top[1][1]
    assert found[0][0].logprob < free[0].logprob
    assert [token.id for token in found[3]] == [token.id for token in free]
    assert {token.id for token in found[4]} <= {second, 7}
    assert all(rule.seen == [token.id for token in found[number]] for number, rule in enumerate(rules) if rule)


def test_a_bias_is_added_before_a_token_is_drawn():
    """Of its request alone, with the neighbours' probabilities and its own those of the model."""
    greedy, most = Sampling(temperature=0), Limits(2, logprobs=2)
    free = [token for _, token in drawn(Engine.of(model(), [Request([5, 6], greedy, most)], "cpu"))]
    (likeliest, first), (second, less) = free[0].top
    enough = first - less + 0.01
    ways = [((likeliest, -100.0),), ((second, enough),), ((second, enough - 0.02),), ((9, 100.0), (second, 3.0)), ()]
    asked = [Request([5, 6], replace(greedy, logit_bias=way), most) for way in ways]
    found = by_number(drawn(Engine.of(model(), asked, "cpu")))
    assert [found[number][0].id for number in range(5)] == [second, second, likeliest, 9, likeliest]
    assert [found[number][0].top for number in range(5)] == [free[0].top] * 5
    assert found[1][0].logprob == less
    biased = replace(greedy, logit_bias=((9, 100.0), (likeliest, 90.0)))
    banned = Request([5, 6], biased, most, Rule(banned=[likeliest]))
    assert next(drawn(Engine.of(model(), [banned], "cpu")))[1].id == 9


def test_a_bias_names_tokens_of_the_vocabulary():
    with pytest.raises(UsageError, match="logit_bias has the token id 512, but the model's vocabulary is 0 to 511"):
        Engine.of(model(), [Request([5], Sampling(logit_bias=((511, 1.0), (512, 1.0))), Limits())], "cpu")


def test_each_request_has_its_own_stop_ids():
    free = ids_of(drawn(engine([[5, 6]], Sampling(temperature=0), max_tokens=4)))[0]
    ends = [(free[1],), (), None, (free[0], free[2])]
    asked = [Request([5, 6], Sampling(temperature=0), Limits(4), stop_ids=stop_ids) for stop_ids in ends]
    found = by_number(drawn(Engine.of(model(), asked, "cpu")))
    first = free.index(free[1]) + 1
    assert [[token.id for token in found[number]] for number in range(4)] == [free[:first], free, free, free[:1]]
    assert [found[number][-1].finish for number in range(4)] == ["stop", "length", "length", "stop"]


def test_requests_join_between_any_two_steps():
    first, second = requests(prompts()[2:], Sampling(temperature=0), Limits(6))
    one = Engine(model(), Capacity(slots=2), "cpu")
    one.add(first)
    results = [result for _ in range(3) for result in one.step()]
    one.add(second)
    while one.busy:
        results += one.step()
    tokens = {
        request: [token.id for result in results if result.request is request for token in result.tokens]
        for request in (first, second)
    }
    alone = [ids_of(drawn(engine([ids], Sampling(temperature=0), max_tokens=6)))[0] for ids in prompts()[2:]]
    assert [tokens[first], tokens[second]] == alone
    assert nothing_is_held(one)


def test_scored_and_drawn_requests_share_steps():
    greedy = Sampling(temperature=0)
    [ids, other] = prompts()[1:3]
    scored = Request(ids, greedy, Limits(prefill_chunk=50, logprobs=1), scored=True)
    asked = Request(other, greedy, Limits(4))
    one = Engine(model(), Capacity(slots=2), "cpu")
    rows, tokens = [], []
    for request in (scored, asked):
        one.add(request)
    while one.busy:
        for result in one.step():
            rows += [] if result.scores is None else result.scores.logprobs
            tokens += [token.id for token in result.tokens]
    [expected] = score.score(model(), [ids], Limits(prefill_chunk=50, logprobs=1), "cpu")
    assert rows[:-1] == pytest.approx(expected.logprobs[1:], abs=1e-4)  # fp32 sums in another order
    assert tokens == ids_of(drawn(engine([other], greedy, max_tokens=4)))[0]


def test_the_seed_of_a_later_answer_is_one_that_can_be_given():
    assert [Sampling(seed=MAX_SEED - 1).plus(n).seed for n in range(3)] == [MAX_SEED - 1, MAX_SEED, 0]
