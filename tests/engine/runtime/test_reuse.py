"""Requests that begin with what earlier ones have left get what they would get alone, wherever that lay."""

from collections import defaultdict
from functools import cache

import pytest
import torch

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime import leader_step, runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import load_model
from dsv4cli.errors import NotEnoughMemory, UnsoundResult
from tests.support.questions import chosen
from tests.support.slow import slow, slow_rows
from tests.support.speculation import always_draft, model_of, text

# around the window, a block of entries and the larger ratio
SLOW = pytest.mark.slow
LENGTHS = [
    257,
    *slow(127, 128, 129, 130, 255, 256, 511, 512, 513),
]
WARM = Sampling(0.8, 0.9, 11)
# fp32 sums over other numbers of rows are made in another order
LOGPROB = 1e-4
TAIL, ANSWER = 21, 4
AGAIN = {"mtp": 1, "dspark": 0}


@pytest.fixture(autouse=True)
def gate(monkeypatch):
    always_draft(monkeypatch)


@pytest.fixture(params=[pytest.param(False, marks=SLOW), True], ids=["computed", "captured"])
def captured(request, monkeypatch) -> bool:
    """Whether steps of single tokens are made as on a GPU, but for the graphs."""
    monkeypatch.setattr(runner, "captures", lambda device: request.param)
    return request.param


def engine(drafter: str = "mtp", most: int = 0, **capacity) -> Engine:
    given = {"slots": 3, "longest": 640, "cache_memory": 2 * 10**7, **capacity}
    return Engine(model_of(drafter), Capacity(**given), "cpu", drafting=Drafting(most))


def asked(ids: list[int], tokens: int = ANSWER, **given) -> Request:
    limits = Limits(tokens, prefill_chunk=given.pop("prefill_chunk", 4096))
    return Request(ids, WARM.plus(len(ids)), limits, stop_ids=(), **given)


def answers(one: Engine, *requests: Request) -> list[list[Token]]:
    """What each of these gets, side by side, and beside others that run."""
    for request in requests:
        one.add(request)
    found: dict[Request, list[Token]] = defaultdict(list)
    while one.busy:
        for result in one.step():
            found[result.request] += result.tokens
    return [found[request] for request in requests]


@cache
def alone(drafter: str, ids: tuple[int, ...], tokens: int = ANSWER) -> list[Token]:
    """What a request gets in an engine of its own that keeps nothing."""
    one = Engine(model_of(drafter), Capacity(), "cpu")
    [found] = answers(one, asked(list(ids), tokens))
    return found


def check(drafter: str, request: Request, found: list[Token]) -> None:
    """It got what it would have got alone."""
    expected = alone(drafter, tuple(request.prompt), len(found))
    assert [token.id for token in found] == [token.id for token in expected]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected], abs=LOGPROB)


def check_empty(one: Engine) -> None:
    """Nothing is held when everything is forgotten."""
    assert not one.busy
    one.forget()
    left = one.usage
    assert left == Usage(hits=left.hits, found=left.found)
    assert one.runner.cache.free_slots + bool(one.runner.graphs) == one.runner.cache.slots


def prompt(length: int, tail: int = 1) -> list[int]:
    """A beginning of so many tokens, and one of many tails."""
    return text(length, length) + text(TAIL, 1000 + tail)


def kept(one: Engine, length: int) -> None:
    """Has a request keep the state of a beginning."""
    answers(one, asked(prompt(length, 0), 1, keep=(length,)))


def in_host_memory(one: Engine) -> None:
    """Has every state leave the device."""
    prefixes = one.runner.prefixes
    while prefixes._evict_one():
        pass
    used = one.usage
    assert (used.device_bytes, used.blocks, used.slots) == (0, 0, 0)
    assert used.host_bytes > 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", [*slow("device"), "host"])
def test_a_state_at_a_length(place, length, captured):
    one = engine(host_memory=10**7)
    kept(one, length)
    if place == "host":
        in_host_memory(one)
    for tail in (1, 2):
        request = asked(prompt(length, tail))
        [found] = answers(one, request)
        assert request.cached == length
        check("mtp", request, found)
    assert (one.usage.hits, one.usage.found) == (2, 2 * length)
    check_empty(one)


@pytest.mark.parametrize("length", [30, *slow(3, 41)])
def test_a_hit_changes_no_bit(length, captured):
    """Of prompts so short that their rows do not see each other on a CPU either."""
    first, again = asked(text(42, 1)), asked(text(42, 1))
    [expected] = answers(engine(), first)
    one = engine()
    answers(one, asked([*text(42, 1)[:length], 9], 1, keep=(length,)))
    [found] = answers(one, again)
    assert (first.cached, again.cached) == (0, length)
    assert [(token.id, token.logprob) for token in found] == [(token.id, token.logprob) for token in expected]


@pytest.mark.parametrize("drafter", ["mtp", *slow("dspark")])
def test_a_question_is_read_in_one_step(drafter):
    """The state before it is not kept where one of a token or two less is held."""
    one, ids = engine(drafter), [1]
    for number in range(3):
        request = asked([*ids, *text(20, number)], keep=(len(ids), len(ids) + 20))
        one.add(request)
        [result] = one.step()
        assert (request.cached, len(result.tokens)) == (len(ids) - 1, 1)
        answers(one)
        ids = request.ids


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", ["device", pytest.param("host", marks=SLOW)])
def test_a_state_that_is_rolled_back(place, length):
    one = engine(host_memory=10**7)
    kept(one, length + 3)
    if place == "host":
        in_host_memory(one)
    request = asked(prompt(length + 3)[:length] + text(TAIL, 5))
    [found] = answers(one, request)
    assert request.cached == length
    check("mtp", request, found)
    check_empty(one)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_that_was_cancelled_leaves_what_it_has_read(length):
    one = engine()
    first = asked(prompt(length, 0), prefill_chunk=length)
    one.add(first)
    one.step()
    one.cancel(first)
    assert (one.busy, one.usage.slots) == (False, 0)
    request = asked(prompt(length))
    [found] = answers(one, request)
    assert request.cached == length
    check("mtp", request, found)
    check_empty(one)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("drafter", "place"),
    [
        ("mtp", "host"),
        *slow_rows(("dspark", "device")),
        *(pytest.param(*one, marks=SLOW) for one in (("mtp", "device"), ("dspark", "host"))),
    ],
)
def test_an_answer_goes_on_with_drafts(drafter, place, length, captured):
    """Of a question behind it nothing is read that was read or written before, but what the drafter reads again."""
    one = engine(drafter, 3, host_memory=10**7)
    first = asked(text(length - ANSWER, length))
    answers(one, first)
    if place == "host":
        in_host_memory(one)
    request = asked(first.ids + text(TAIL, 9))
    [found] = answers(one, request)
    assert request.cached == length - 1 - AGAIN[drafter]
    check(drafter, request, found)
    check_empty(one)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("most", "place"),
    [(0, "host"), *(pytest.param(*one, marks=SLOW) for one in ((0, "device"), (3, "device"), (3, "host")))],
)
def test_sequences_that_share_a_beginning(most, place, length, captured):
    """Neither writes what the other or the state reads."""
    one = engine(most=most, host_memory=10**7)
    kept(one, length)
    if place == "host":
        in_host_memory(one)
    requests = [asked(prompt(length, tail), ANSWER + tail) for tail in (1, 2, 3)]
    for request, found in zip(requests, answers(one, *requests), strict=True):
        assert request.cached == length - (most > 0)
        check("mtp", request, found)
    check_empty(one)


def test_requests_of_one_prompt_read_it_once():
    """Those that wait for their turn find what the first has kept."""
    one = Engine(model_of("mtp"), Capacity(4, 640, cache_memory=2 * 10**7), "cpu", step_ms=1e6)
    waits = asked(text(9, 1), 40)
    ids = text(300, 2)
    requests = [asked(ids, keep=(300,)) for _ in range(3)]
    one.add(waits)
    one.step()
    for request, tokens in zip(requests, answers(one, *requests), strict=True):
        check("mtp", request, tokens)
    assert [request.cached for request in requests] == [0, 299, 299]
    check_empty(one)


def test_scored_requests_find_and_keep_nothing():
    one = engine()
    kept(one, 200)
    states = one.usage.states
    for cancelled in (False, True):
        request = asked(prompt(200), scored=True, prefill_chunk=64)
        one.add(request)
        one.step()
        if cancelled:
            one.cancel(request)
        answers(one)
        assert (request.cached, one.usage.states, one.usage.hits) == (0, states, 0)
    check_empty(one)


def test_a_step_that_has_given_no_tokens_leaves_no_state(monkeypatch):
    """What made its numbers unsound would be found again."""
    one, request = engine(), asked(prompt(200))
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "logits", lambda model, streams: torch.full((len(streams), 128), torch.nan))
        one.add(request)
        with pytest.raises(UnsoundResult):
            one.step()
    one.cancel(request)
    assert one.usage == Usage()
    [found] = answers(one, again := asked(prompt(200)))
    check("mtp", again, found)


def test_a_step_that_runs_already_is_of_those_that_decode(captured):
    one = Engine(model_of("mtp"), Capacity(3, 640, cache_memory=2 * 10**7), "cpu", step_ms=1e6)
    decodes, comes = asked(text(9, 1), 12), asked(text(50, 2))
    one.add(decodes)
    for _ in range(3):
        one.step()
    assert one.runner.ahead.launched == captured
    one.add(comes)
    one.step()
    assert one._pacer._chunk_rows == (0 if captured else 50)


def test_steps_run_ahead_in_a_cache_full_of_states(monkeypatch):
    monkeypatch.setattr(runner, "captures", lambda device: True)
    bound = runner.Cache.bound
    monkeypatch.setattr(runner.Cache, "bound", lambda cache, _: bound(cache, 5))
    one = engine()
    for number in range(4):
        answers(one, asked(text(100, number), 1))
    assert one.runner.cache.free_blocks == 0
    one.add(asked(text(120, 9), 12))
    for _ in range(3):
        one.step()
        assert one.runner.cache.free_blocks == 0
    assert one.runner.ahead.launched
    answers(one)
    check_empty(one)


def test_blocks_that_states_share_count_once():
    one = engine()
    answers(one, asked(text(511, 1), 1, keep=(128, 256, 384)))
    cache = one.runner.cache
    assert one.usage.states == 4
    assert one.usage.blocks == 4
    assert one.usage.device_bytes == 4 * cache.copies.nbytes + 4 * cache.block_bytes
    in_host_memory_of = engine(host_memory=10**7)
    answers(in_host_memory_of, asked(text(511, 1), 1, keep=(128, 256, 384)))
    in_host_memory(in_host_memory_of)
    store = in_host_memory_of.runner.prefixes._host
    rings = -(-cache.copies.nbytes // store._pages.shape[1])
    assert in_host_memory_of.usage.host_bytes == (4 * rings + 4) * store._pages.shape[1]
    check_empty(in_host_memory_of)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [0, 3])
def test_a_gpu_finds_states_in_both_memories(most):
    """nano answers as it does where nothing is kept, with real graphs, beside requests that decode."""
    source = resolve_model("nano")
    model, talk = load_model(source, Numerics.reference(), device="cuda"), open_dialogue(source, "off")
    counts = {"sums": 4, "facts": 4, "multi turn": 4, "retrieval 1 to 200": 2, "retrieval 200 to 1000": 4}
    prompts = [talk.prompt(item["messages"]).ids for items in chosen(counts).values() for item in items]

    def asks() -> list[Request]:
        return [Request(ids, Sampling(0.0), Limits(24), keep=(len(ids) // 2, len(ids))) for ids in prompts]

    plain = Engine(model, Capacity(), "cuda", drafting=Drafting(0))
    expected = [[token.id for token in answers(plain, one)[0]] for one in asks()]
    capacity = Capacity(4, 2048, cache_memory=10**8, host_memory=2 * 10**8)
    one = Engine(model, capacity, "cuda", drafting=Drafting(most), step_ms=50.0)
    while one.prepare():
        pass
    for rounds in range(3):
        requests = asks()
        found = answers(one, *requests)
        assert [[token.id for token in tokens] for tokens in found] == expected
        if rounds:
            assert all(request.cached >= len(request.prompt) - 1 - (most > 0) for request in requests)
        if rounds == 1:
            in_host_memory(one)
    assert one.usage.hits >= 2 * len(prompts)
    check_empty(one)


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("place", ["admission", "first chunk", "sampling"])
def test_memory_that_runs_out_between_the_parts_of_a_step_ends_requests_alone(place, monkeypatch):
    """Where a state is restored, and where tokens are sampled: the next request is served as if nothing had been."""
    one = Engine(model_of("mtp"), Capacity(3, 640, cache_memory=2 * 10**7), "cpu", step_ms=1e6)
    requests = [asked(prompt(257, tail), 2, keep=(257,)) for tail in range(2)]
    with monkeypatch.context() as patch:
        if place == "sampling":
            patch.setattr(leader_step, "sampled", no_memory)
        else:
            patch.setattr(Cache, "restore", no_memory)
        if place == "admission":
            kept(one, 257)
        with pytest.raises(NotEnoughMemory, match="cpu ran out of memory: CUDA out of memory"):
            answers(one, *requests)
    for request in requests:
        one.cancel(request)
    assert (one.usage.running, one.usage.waiting, one.usage.slots) == (0, 0, 0)
    again = asked(prompt(257, 0), keep=(257,))
    [found] = answers(one, again)
    check("mtp", again, found)
    check_empty(one)
