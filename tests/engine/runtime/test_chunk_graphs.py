"""Chunks of prompts in captured steps, with padding behind them, give what computed ones give, and leave its state."""

import gc
from dataclasses import is_dataclass, replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.model import moe
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.capacity import Capacity
from dsv4cli.engine.runtime.chunk_graphs import TOKENS, CapturedChunk
from dsv4cli.engine.runtime.graphs import GraphRunner
from dsv4cli.engine.runtime.prepare import Extent
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.scheduler import Pick
from dsv4cli.engine.settings import Limits, Sampling
from tests.engine.runtime.test_speculation_state import state_of
from tests.support.cache_state import same
from tests.support.speculation import model_of, text

SLOW = pytest.mark.slow
# of each step the tokens of the text that go through the model
STEPS = ([30, 1, 2, 33], [128, 5], [127, 129, 64], [257, 200], [512, 1])
LONGEST = 700


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """As on a GPU, but for the graphs."""
    monkeypatch.setattr(runner, "captures", lambda device: True)


def read(steps: list[int], chunks: bool, drafts: bool = False):
    """The logits after each step, and the state after the last."""
    ids = text(sum(steps), 4)
    one = Runner(model_of("mtp", reference=True), Capacity(2, LONGEST, drafts=drafts, chunks=chunks), "cpu")
    request = Request(ids[: steps[0]], Sampling(0.0), Limits(), number=0, end=LONGEST)
    one.add(request)
    found, end = [], 0
    for count in steps:
        end += count
        request.ids[:] = ids[:end]
        ran = one.run()
        found.append(ran.logits.clone())
        if drafts:
            tokens = ran.logits.argmax(-1)
            found.append(one.speculate(ran, tokens, [0], 3))
    return found, state_of(one, request)


@pytest.mark.parametrize("steps", [STEPS[0], *(pytest.param(one, marks=SLOW) for one in STEPS[1:])], ids=str)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_chunk_and_its_state_are_those_of_a_computed_step(steps, drafts):
    (logits, state), (expected, expected_state) = read(steps, True, drafts), read(steps, False, drafts)
    assert all(map(same, logits, expected))
    assert all(map(same, state, expected_state))


@pytest.mark.parametrize("count", [2, 5, 32, 50])
def test_padding_asks_for_no_expert_of_its_own(count, monkeypatch):
    compute, chosen = moe.experts.mixture, []
    monkeypatch.setattr(moe.experts, "mixture", lambda *given: chosen.append(given[3]) or compute(*given))
    one = Runner(model_of("mtp"), Capacity(2, LONGEST, chunks=True), "cpu")
    one.add(Request(text(count + 40, 4), Sampling(0.0), Limits(), number=0, end=LONGEST))
    one.run(Pick(0, count))
    for own in chosen[2 * len(chosen) // 3 :]:  # the first two runs time it
        assert len(own) > count
        assert {*own[count:].flatten().tolist()} <= {*own[:count].flatten().tolist()}


def tensors_of(value):
    """Those that a closure, or a part of it, consists of."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors_of(list(vars(value).values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)


def test_what_a_graph_reads_is_held(monkeypatch):
    """A graph knows addresses only: what lies there must not be given back when it has been captured."""
    given = []

    def capture(graphs, compute):
        output = graphs._within(compute)()
        inputs = tensors_of([cell.cell_contents for cell in compute.__closure__])
        given.append([StorageWeakRef(one.untyped_storage()) for one in inputs])
        return lambda: output

    monkeypatch.setattr(GraphRunner, "capture", capture)
    one = Runner(model_of("mtp", reference=True), Capacity(2, LONGEST, drafts=True, chunks=True), "cpu")
    request = Request(text(30, 4), Sampling(0.0), Limits(), number=0, end=LONGEST)
    one.add(request)
    for _ in range(2):  # a chunk, then a step and its drafts
        ran = one.run()
        one.speculate(ran, ran.logits.argmax(-1), [0], 3)
        request.ids.append(5)
    gc.collect()
    assert len(given) == 3
    assert all(given)
    assert not any(storage.expired() for own in given for storage in own)


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_step_has_as_many_groups_wherever_its_chunk_ends(tokens):
    """So that one graph holds all of them."""
    config = model_of("mtp").config
    of_all = {str(Extent.of(config, [own, tokens + 1 - own], BLOCK_TOKENS).groups) for own in range(1, tokens + 1)}
    assert of_all == {str(Extent.of(config, [tokens, 1], BLOCK_TOKENS).groups)}


def test_steps_are_captured_while_there_is_time(monkeypatch):
    compute, ran = CapturedChunk.run, []
    monkeypatch.setattr(CapturedChunk, "run", lambda self, *given: ran.append(given) or compute(self, *given))
    one = Runner(model_of("mtp"), Capacity(3, 250, chunks=True, cache_memory=10**7), "cpu")
    count = 0
    while one.prepare():
        count += 1
    sizes = [size for size in TOKENS if size <= 384]  # the blocks of the longest sequence
    assert count == 3 + len(sizes)  # 1, 2 and 4 sequences
    assert list(one.chunk_seconds) == sizes
    assert [len(ids) for _, ids in ran] == [size for size in sizes for _ in range(2)]
    assert all(len({*ids}) > 20 and sequence is one.graphs.padding for sequence, ids in ran)
    assert all(0 < seconds < 10 for seconds in one.chunk_seconds.values())
    one.add(Request(text(40, 1), Sampling(), Limits(), end=50))
    one.preparing.happened = True
    one.run()
    assert not one.preparing.happened
    assert not Runner(model_of("mtp"), replace(Capacity(), longest=None), "cpu").prepare()
