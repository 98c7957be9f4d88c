"""Drafts change nothing but the number of steps: tokens, ends and log-probabilities are those without drafts."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, pairwise, product

import pytest
import torch

from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.runtime import runner, scheduler
from dsv4cli.engine.runtime.drafts.draft_steps import DraftSteps
from dsv4cli.engine.runtime.drafts.speculate import Verified
from dsv4cli.engine.runtime.drafts.stopwatch import Stopwatch
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Constraint, Request, Token
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, UnsoundResult
from tests.support.slow import slow
from tests.support.speculation import Mistake, always_draft, know, mask_of, model_of, text

DRAFTERS = ("mtp", "dspark")
MOST = {"mtp": 7, "dspark": 5}
GREEDY, WARM = Sampling(0.0), Sampling(0.8, 0.9, 11)
LENGTHS = (1, 126, 4, 7, 33, 12)
# fp32 sums over other numbers of rows are made in another order
LOGPROB = 1e-4

Build = Callable[[], list[Request]]


def asked(sampling: Sampling, count: int = len(LENGTHS), **limits) -> list[Request]:
    """Prompts of many lengths, answers of 9 tokens and more, prompt chunks between them."""
    return [
        Request(
            text(length, number), sampling.plus(number), Limits(**{"max_tokens": 10 + number, **limits}), stop_ids=()
        )
        for number, length in enumerate(LENGTHS[:count])
    ]


@dataclass
class Played:
    """What requests got, how many tokens each step gave one of them, and the engine."""

    engine: Engine
    tokens: list[list[Token]]
    steps: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[list[int]]:
        return [[token.id for token in found] for found in self.tokens]


def play(engine: Engine, requests: list[Request], together: int = 8, each: Callable[[int], None] = id) -> Played:
    """Adds requests, one each other step, at most so many at once; each: called with the number of a step before it."""
    played, waiting, number = Played(engine, [[] for _ in requests]), list(requests), 0
    while waiting or engine.busy:
        if waiting and len(engine.runner.scheduler.active) < together and (number % 2 == 0 or not engine.busy):
            engine.add(waiting.pop(0))
        each(number)
        for result in engine.step():
            played.tokens[requests.index(result.request)] += result.tokens
            played.steps += [len(result.tokens)] if result.tokens else []
        number += 1
    return played


def engine(drafter: str, most: int | None = 0, slots: int = 8, longest: int | None = 300) -> Engine:
    return Engine(model_of(drafter), Capacity(slots, longest), "cpu", drafting=Drafting(most))


_PLAIN: dict[tuple[str, Sampling], Played] = {}


def plain(drafter: str, sampling: Sampling) -> Played:
    """What each of `asked` gets without drafts, beside the others: that these change nothing is test_engine.py's."""
    if (drafter, sampling) not in _PLAIN:
        _PLAIN[drafter, sampling] = play(engine(drafter), asked(sampling))
    return _PLAIN[drafter, sampling]


def whole(requests: list[Request], played: Played) -> list[list[int]]:
    """The prompts and their answers."""
    return [one.prompt + ids for one, ids in zip(requests, played.ids, strict=True)]


def everywhere() -> Mistake:
    """Mistakes at every depth, one after another, of each request beginning with another one."""
    depths = {number: cycle([(7 - number - step) % 8 for step in range(8)]) for number in range(9)}
    return lambda number, place: next(depths[number])


def nothing_is_held(one: Engine) -> bool:
    cache, padding = one.runner.cache, one.runner.graphs is not None
    return (cache.free_slots + padding, cache.used_blocks - padding) == (cache.slots, 0)


SLOW = pytest.mark.slow


@pytest.fixture(params=[pytest.param(False, marks=SLOW), True], ids=["eager", "captured"])
def captured(request, monkeypatch):
    """Steps as on a GPU, but for the graphs."""
    monkeypatch.setattr(runner, "captures", lambda device: request.param)
    return request.param


def cases(numbers, *always):
    """Drafter, sampling, a number, and whether steps are captured: all of them, most only among the slow tests."""
    every = product(DRAFTERS, (GREEDY, WARM), numbers, (False, True))
    return [case if case in always else pytest.param(*case, marks=SLOW) for case in every]


@pytest.mark.parametrize(
    ("drafter", "sampling", "most", "captured"),
    cases(
        range(1, 8),
    ),
    indirect=["captured"],
)
def test_a_net_with_its_own_drafts_draws_the_same(drafter, sampling, most, captured, monkeypatch):
    """All at once with joins, leaves and prompt chunks between; all drafts are verified."""
    always_draft(monkeypatch)
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 90)
    one = engine(drafter, most)
    played = play(one, asked(sampling, prefill_chunk=50))
    assert played.ids == plain(drafter, sampling).ids
    assert one.draft_report().drafted > 40
    assert nothing_is_held(one)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_with_numbers_that_are_not_finite_is_told(drafter):
    model = deepcopy(model_of(drafter))
    for parameter in model.mtp.parameters():
        parameter.data.fill_(float("nan"))
    one = Engine(model, Capacity(1), "cpu", drafting=Drafting(3))
    with pytest.raises(UnsoundResult, match="the drafter's chances are not finite") as error:
        play(one, asked(GREEDY, 1))
    assert "--draft off" in error.value.remedy


@SLOW
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_as_many_drafts_as_pay(drafter):
    one = engine(drafter, None)
    assert play(one, asked(WARM)).ids == plain(drafter, WARM).ids
    assert nothing_is_held(one)


@pytest.mark.parametrize(
    ("drafter", "sampling", "together", "captured"),
    cases(
        (8, 1),
        ("mtp", GREEDY, 8, True),
    ),
    indirect=["captured"],
)
def test_every_kept_prefix_draws_the_same(drafter, sampling, together, captured, monkeypatch):
    """A drafter that is right up to a chosen draft: steps give 1 to 1 + k tokens, no more than an answer has."""
    always_draft(monkeypatch)
    one, requests = engine(drafter, 7, slots=together), asked(sampling, prefill_chunk=60)
    know(one, whole(requests, plain(drafter, sampling)), everywhere())
    played = play(one, requests, together)
    assert played.ids == plain(drafter, sampling).ids
    assert set(played.steps) == set(range(1, MOST[drafter] + 2))
    assert [found[-1].finish for found in played.tokens] == ["length"] * len(LENGTHS)
    report = one.draft_report()
    # the first token of each comes with the last chunk of its prompt
    assert (report.tokens, report.steps) == (sum(played.steps) - len(LENGTHS), len(played.steps) - len(LENGTHS))
    assert report.accepted == report.tokens - report.steps == sum(report.per_position)
    expected = [sum(count > 1 + depth for count in played.steps) for depth in range(MOST[drafter])]
    assert report.per_position == expected
    assert nothing_is_held(one)


@pytest.mark.slow
@pytest.mark.parametrize("most", [pytest.param(2, marks=SLOW), 7])
def test_right_drafts_are_all_accepted(most, captured, monkeypatch):
    """So the answers take as few steps as they can, and only drafts that can be accepted are made."""
    always_draft(monkeypatch)
    requests, run = asked(GREEDY), runner.Runner.run

    def within(self, pick):
        ran = run(self, pick)
        assert all(chunk.end + len(chunk.drafts) < chunk.request.end for chunk in ran.ready)
        return ran

    monkeypatch.setattr(runner.Runner, "run", within)
    one = engine("mtp", most)
    know(one, whole(requests, plain("mtp", GREEDY)), lambda number, place: 9)
    played = play(one, requests)
    assert played.ids == plain("mtp", GREEDY).ids
    # the first token comes with the prompt
    assert len(played.steps) == sum(1 + -(-(len(ids) - 1) // (most + 1)) for ids in played.ids)
    assert one.draft_report().drafted == one.draft_report().accepted


def test_log_probabilities_are_those_without_drafts(captured, monkeypatch):
    always_draft(monkeypatch)
    expected = play(engine("mtp"), asked(WARM, 4, logprobs=3), 4)
    requests = asked(WARM, 4, logprobs=3)
    one = engine("mtp", 7)
    know(one, whole(requests, expected), everywhere())
    played = play(one, requests, 4)
    assert max(played.steps) > 4
    for ours, theirs in zip(chain(*played.tokens), chain(*expected.tokens), strict=True):
        assert ours.id == theirs.id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB)
        assert [one for one, _ in ours.top] == [one for one, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=LOGPROB)


def test_answers_end_within_accepted_drafts(captured, monkeypatch):
    """At a stop id, at the limit of an answer, at the end of the context; the drafter sees none of it."""
    always_draft(monkeypatch)
    [prompt] = [text(9, 3)]
    [[*free]] = play(engine("dspark"), [Request(prompt, WARM, Limits(30), stop_ids=())]).ids
    stop = next(token for place, token in enumerate(free) if place > 6 and token not in free[:place])
    cases = [
        ({}, (stop,), "stop", free.index(stop) + 1),
        ({"max_tokens": 8}, (), "length", 8),
        ({"max_context": 20}, (), "length", 11),
        ({"max_tokens": 1}, (), "length", 1),
        ({"max_tokens": 2}, (free[1],), "stop", 2),
    ]
    requests = [Request(prompt, WARM, Limits(**{"max_tokens": 30, **given}), stop_ids=ids) for given, ids, *_ in cases]
    one = engine("dspark", 5)
    know(one, [prompt + free] * len(cases), lambda number, place: 9)
    played = play(one, requests)
    for (_, _, finish, length), found, ids in zip(cases, played.tokens, played.ids, strict=True):
        assert (found[-1].finish, ids) == (finish, free[:length])
        assert all(token.finish is None for token in found[:-1])
    # behind a prompt's token 6 a step
    report = one.draft_report()
    assert report.drafted == report.accepted
    assert report.steps == sum(-(-(length - 1) // 6) for *_, length in cases)
    assert nothing_is_held(one)


class Script(Constraint):
    """Asks for other tokens at chosen places of an answer."""

    def __init__(self, forced=None, banned=None, instead=None):
        self._forced, self._banned, self._instead = forced or {}, banned or {}, instead or {}
        self.seen: list[int] = []

    def forced(self):
        return self._forced.get(len(self.seen))

    def banned(self):
        return self._banned.get(len(self.seen), ())

    def instead(self, token):
        return self._instead.get((len(self.seen), token))

    def push(self, token):
        self.seen.append(token)


class Divided(Script):
    """After each token those may come that make, with it, a multiple of three, from some place of the answer on."""

    def __init__(self, first: int):
        super().__init__()
        self._from = first

    def masks(self, drafts):
        path, made = [*self.seen, *drafts], []
        for length in range(len(self.seen), len(path) + 1):
            last = path[length - 1] if length else 0
            allowed = [token for token in range(128) if (token + last) % 3 == 0]
            made.append(mask_of(allowed, 128) if length >= self._from else None)
        return made


def constraints(free: list[int]) -> list[Constraint]:
    """free: what comes without any."""
    every = range(128)
    return [
        Script(forced={3: 9, 4: 0, 8: 12}),
        Script(banned={2: [free[2]], 6: every[::2]}),
        Script(instead={(5, free[5]): 77}),
        Script(forced={0: 5}, banned={1: every[4:]}, instead={(1, token): 40 for token in every[:4]}),
        Script(forced={6: 9}, instead={(6, 9): 10}),
        Thinking(True, 20, 4, 50, (free[0], 1)),
        Thinking(True, 12, None, 50, tuple(every[::3])),
        Thinking(True, 20, 0, 50, tuple(every[::5])),
        Divided(0),
        Divided(5),
    ]


@pytest.mark.parametrize(("drafter", "most"), [pytest.param("mtp", 2, marks=SLOW), ("dspark", 5)])
@pytest.mark.parametrize("foreseen", [False, *slow(True)])
def test_constraints_act_within_a_step(drafter, most, foreseen, captured, monkeypatch):
    """What is forced, banned and replaced behind accepted drafts, whether the drafter foresees it or not."""
    always_draft(monkeypatch)
    prompt = text(6, 8)

    def requests(free):
        return [Request(prompt, WARM, Limits(12), rule, stop_ids=()) for rule in constraints(free)]

    [free] = play(engine(drafter), [Request(prompt, WARM, Limits(12), stop_ids=())]).ids
    expected = play(engine(drafter), plainly := requests(free)).ids
    one, ours = engine(drafter, most), requests(free)
    know(one, [prompt + (ids if foreseen else free) for ids in expected], lambda number, place: 9)
    played = play(one, ours)
    assert played.ids == expected
    assert max(played.steps) == most + 1
    for request, other in zip(ours, plainly, strict=True):
        mine, theirs = request.constraint, other.constraint
        assert vars(mine) == vars(theirs)
    assert [rule.closed for rule in (one.constraint for one in plainly[5:8])] != ["", "", ""]
    for ids, start in ((expected[8], 0), (expected[9], 5)):
        path = [0, *ids] if start == 0 else ids[start - 1 :]
        assert all((first + second) % 3 == 0 for first, second in pairwise(path))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=SLOW), WARM])
def test_a_bias_changes_what_is_drawn_alike(sampling, captured, monkeypatch):
    always_draft(monkeypatch)
    prompt = text(6, 8)
    [free] = play(engine("mtp"), [Request(prompt, sampling, Limits(12), stop_ids=())]).ids
    biased = replace(sampling, logit_bias=((free[1], -100.0), (9, 1.5), (77, 1.0)))
    [expected] = play(engine("mtp"), [Request(prompt, biased, Limits(12), stop_ids=())]).ids
    assert free[1] not in expected
    one = engine("mtp", 3)
    know(one, [prompt + expected], lambda number, place: 9)
    played = play(one, [Request(prompt, biased, Limits(12), stop_ids=())])
    assert played.ids == [expected]
    assert max(played.steps) == 4


def test_what_is_drafted_anew_follows_the_tokens_that_came(captured, monkeypatch):
    """A constraint replaces a token: the drafter is asked again, and reads what was taken."""
    always_draft(monkeypatch)
    prompt = text(6, 8)
    [free] = play(engine("mtp"), [Request(prompt, GREEDY, Limits(12), stop_ids=())]).ids
    asked_for = []
    own = type(engine("mtp", 3).runner.drafts.drafter).draft

    def draft(self, newest, count, choose):
        asked_for.append((newest.positions[0].item(), newest.tokens[0].item()))
        return own(self, newest, count, choose)

    one = engine("mtp", 3, slots=1)
    monkeypatch.setattr(type(one.runner.drafts.drafter), "draft", draft)
    rule = Script(forced={4: 9})
    request = Request(prompt, GREEDY, Limits(6), rule, stop_ids=())
    played = play(one, [request], 1)
    assert played.ids[0][:5] == [*free[:4], 9]
    # the place of each newest token, and the token that is there in the end
    final = dict(asked_for)
    assert all(request.ids[place] == token for place, token in final.items())
    assert final[len(prompt) + 4] == 9


def turn(one: Engine, ids: list[int], number: int) -> Request:
    """Answers a turn of a conversation, of which two places are kept."""
    request = Request(ids, WARM.plus(number), Limits(10), stop_ids=(), keep=(len(ids) // 2, len(ids)))
    one.add(request)
    return request


def finish(one: Engine) -> None:
    while one.busy:
        one.step()


# of each turn: how many tokens of the one before go, and how many new ones come
TURNS = ((0, 0), (0, 20), (3, 5), (40, 9), (1, 130), (9, 2), (0, 1), (13, 1))


@pytest.mark.parametrize(
    ("drafter", "turns"), [("mtp", 3), *(pytest.param(one, len(TURNS), marks=SLOW) for one in DRAFTERS)]
)
def test_a_prefix_cache_keeps_no_draft(drafter, turns, captured, monkeypatch):
    """Turn after turn in one cache, also after some tokens were taken back: as each turn would be answered alone."""
    always_draft(monkeypatch)
    capacity = Capacity(longest=300, snapshots=8)
    one = Engine(model_of(drafter), capacity, "cpu", drafting=Drafting(7))
    ids, texts, held = text(130, 5), [], []
    for number, (back, more) in enumerate(TURNS[:turns]):
        ids = ids[: len(ids) - back] + text(more, 60 + number)
        alone = engine(drafter, slots=1)
        expected = turn(alone, ids, number)
        finish(alone)
        texts.append(expected.ids)
        know(one, texts, everywhere())
        found = turn(one, ids, number)
        held.append(len(ids) - found.done)
        finish(one)
        assert found.ids == expected.ids
        ids = found.ids
    # what is read of each prompt: all of the first, then little but what is new
    assert held[0] == 130
    assert max(held[1:3]) < 40
    one.forget()
    assert nothing_is_held(one)


@pytest.mark.slow  # test_speculation_ranks.py cancels a request that drafts
@pytest.mark.parametrize("drafter", [*slow("mtp"), "dspark"])
def test_requests_are_cancelled_between_steps(drafter, captured, monkeypatch):
    always_draft(monkeypatch)
    one, requests = engine(drafter, 7), asked(WARM)
    know(one, whole(requests, plain(drafter, WARM)), everywhere())

    def cancel(number: int) -> None:
        for victim, step in ((0, 2), (3, 8), (5, 11)):
            if step == number:
                one.cancel(requests[victim])
                one.cancel(requests[victim])  # harmless

    played = play(one, requests, each=cancel)
    for number, (ours, theirs) in enumerate(zip(played.ids, plain(drafter, WARM).ids, strict=True)):
        assert ours == (theirs[: len(ours)] if number in (0, 3, 5) else theirs)
    assert any(len(played.ids[number]) < len(plain(drafter, WARM).ids[number]) for number in (0, 3, 5))
    assert nothing_is_held(one)


@pytest.mark.parametrize("drafter", ["mtp", pytest.param("dspark", marks=SLOW)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, *slow(NotEnoughMemory("full", "less"))], ids=["ctrl-c", "memory"])
def test_a_step_that_is_broken_off_while_it_drafts(drafter, error, captured, monkeypatch):
    """Requests are gone, and what comes later is as ever."""
    always_draft(monkeypatch)
    one = Engine(model_of(drafter), Capacity(longest=300, snapshots=4), "cpu", drafting=Drafting(5))
    ids = text(140, 6)
    alone = engine(drafter, slots=1)
    expected = turn(alone, ids, 0)
    finish(alone)
    know(one, [expected.ids] * 9, lambda number, place: 9)
    own = DraftSteps.after
    for steps in (1, 2):
        calls = iter(range(9))

        def after(self, *given, steps=steps, calls=calls):
            made = own(self, *given)
            if next(calls) == steps - 1:
                raise error
            return made

        with monkeypatch.context() as patch:
            patch.setattr(DraftSteps, "after", after)
            turn(one, ids, 0)
            with pytest.raises(type(error) if isinstance(error, Exception) else error):
                finish(one)
        found = turn(one, ids, 0)
        finish(one)
        assert found.ids == expected.ids
    one.forget()
    assert nothing_is_held(one)


@pytest.mark.slow
def test_scored_requests_beside_drafts(captured, monkeypatch):
    always_draft(monkeypatch)
    scored = Request(text(90, 1), GREEDY, Limits(prefill_chunk=7), scored=True)
    requests = asked(GREEDY, 4)

    def scores(one: Engine) -> list[float]:
        found = []
        for request in (scored, *requests):
            one.add(request)
        while one.busy:
            found += [value for result in one.step() if result.scores for value in result.scores.logprobs]
        return found

    expected = scores(engine("mtp"))
    answers = whole(asked(GREEDY), plain("mtp", GREEDY))[:4]
    scored, requests = Request(scored.prompt, GREEDY, scored.limits, scored=True), asked(GREEDY, 4)
    one = engine("mtp", 7)
    know(one, [scored.prompt, *answers], lambda number, place: 4)
    assert scores(one)[:-1] == pytest.approx(expected[:-1], abs=LOGPROB)
    assert [request.ids for request in requests] == answers
    assert one.draft_report().accepted > 20


def test_the_time_is_asked_for_only_where_the_device_was_waited_for(monkeypatch):
    """On a GPU a mark that it has not reached yet has no time."""
    one, waited = engine("mtp", 3), []

    def seconds(watch):
        waited.append(len(request.ids))
        return [1.0, 1.0]

    monkeypatch.setattr(Stopwatch, "seconds", seconds)
    request = Request(text(40, 1), GREEDY, Limits(4, prefill_chunk=10))
    one.add(request)
    while one.busy:
        one.step()
    assert waited
    assert min(waited) == 41


def test_an_answer_that_ends_is_drafted_for_once(monkeypatch):
    """Nothing follows an end token, whatever the drafts behind it were."""
    always_draft(monkeypatch)
    prompt = text(6, 8)
    [free] = play(engine("mtp"), [Request(prompt, GREEDY, Limits(12), stop_ids=())]).ids
    one, calls, own = engine("mtp", 7), [], DraftSteps.after
    monkeypatch.setattr(DraftSteps, "after", lambda *given: (calls.append(1), own(*given))[1])
    know(one, [prompt + free], lambda number, place: 9)
    played = play(one, [Request(prompt, GREEDY, Limits(12), stop_ids=(free[4],))], 1)
    assert played.ids == [free[: free.index(free[4]) + 1]]
    assert len(calls) == len(played.steps)


@SLOW
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("most", [None, *range(1, 8)])
def test_two_thousand_tokens(drafter, most, captured, monkeypatch):
    """Greedy and drawn, of prompts of any length, 8 at once."""
    monkeypatch.setattr(runner, "captures", lambda device: False)
    requests = [
        [Request(text(3 + 40 * n, n), (GREEDY, WARM)[n % 2].plus(n // 2), Limits(250), stop_ids=()) for n in range(8)]
        for _ in range(2)
    ]
    expected = play(engine(drafter, longest=600), requests[0]).ids
    monkeypatch.setattr(runner, "captures", lambda device: captured)
    one = engine(drafter, most, longest=600)
    assert play(one, requests[1]).ids == expected
    assert sum(map(len, expected)) == 2000


def test_drafts_count_among_the_tokens_of_a_step(monkeypatch):
    always_draft(monkeypatch)
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 10)
    one, requests, tokens, run = engine("mtp", 7), asked(GREEDY, 2, prefill_chunk=8), [], runner.Runner.run

    def counted(self, pick):
        ran = run(self, pick)
        tokens.append(sum(chunk.tokens for chunk in ran.chunks))
        return ran

    monkeypatch.setattr(runner.Runner, "run", counted)
    assert play(one, requests).ids == plain("mtp", GREEDY).ids[:2]
    assert max(tokens) == 10


@pytest.mark.parametrize("drafter", ["mtp", *slow("dspark")])
def test_one_token_of_a_prompt_alone_drafts_nothing(drafter, captured, monkeypatch):
    """A conversation keeps the state before its first question, one token after the beginning: a step that decodes, of
    which nobody is ready."""
    always_draft(monkeypatch)
    answers = []
    for most in (0, 3):
        request = Request(text(12, 1), GREEDY, Limits(6), keep=(1, 12), stop_ids=())
        answers.append(play(engine(drafter, most, longest=600), [request]).ids)
    assert answers[0] == answers[1]


def test_drafts_behind_those_considered_are_not_accepted():
    """Though they are what was drawn: a constraint leaves their row to the next step, or they only fill a row."""
    numbers = torch.tensor([0, 0]), torch.tensor([9, 9]), torch.tensor([0, 3]), torch.tensor([1, 0])
    verified = Verified(*numbers, drafts=torch.tensor([[5, 6], [0, 0]]))
    assert verified.accepted(torch.tensor([5, 6, 7, 0, 0, 0])).tolist() == [1, 0]
