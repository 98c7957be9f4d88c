"""Chunks of prompts in captured steps, with padding behind them, give what computed ones give, and leave its state."""

import gc
from dataclasses import is_dataclass, replace
from itertools import pairwise
from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_SLOTS, PREFILL_ROWS, ROLLBACK, captured_rows, columns_of
from dsv4cli.engine.model import moe
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.batch_builder import Extent
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.graphs.prefill_graphs import CapturedPrefill
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import StepChoice
from dsv4cli.engine.runtime.step_sizes import CHUNK_ROWS, ROWS_PER_SEQUENCE, prefill_sequences, sequences_in
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.kernels import alike
from tests.engine.runtime.test_speculation_state import state_of
from tests.support.cache_state import same
from tests.support.slow import slow, slow_rows
from tests.support.speculation import model_of, text

SLOW = pytest.mark.slow
# of each step the tokens of the text that go through the model
STEPS = ([30, 1, 32, 33], [128, 5], [127, 129, 64], [257, 200], [512, 1])
# of each step the tokens of four texts
TOGETHER = (
    [[30, 30, 0, 0], [2, 1, 40, 9]],
    [[3, 125, 1, 90], [257, 5, 127, 130]],
    [[61, 0, 63, 64], [64, 257, 1, 2], [1, 129, 128, 4]],
    [[1, 2, 3, 121], [5, 126, 7, 250]],
)
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
@pytest.mark.parametrize("drafts", [*slow(False), True])
def test_a_chunk_and_its_state_are_those_of_a_computed_step(steps, drafts):
    (logits, state), (expected, expected_state) = read(steps, True, drafts), read(steps, False, drafts)
    assert all(map(same, logits, expected))
    assert all(map(same, state, expected_state))


@pytest.mark.parametrize("tokens", CHUNK_ROWS)
def test_the_room_for_others_changes_no_kernel_of_one_prompt(tokens):
    """As compressor and indexer choose them."""
    pytest.importorskip("triton")
    from dsv4cli.kernels.compressor.kernel import MANY, entry_tiles
    from dsv4cli.kernels.indexer.kernel import MANY as OF_A_SEQUENCE

    def chosen(sequences: int) -> tuple[object, ...]:
        config = model_of("mtp").config
        groups, rows = Extent.around(config, tokens, sequences, BLOCK_TOKENS).groups, tokens
        tiles = [entry_tiles(8, width, rows, groups[4]) for width in (128, 512)]
        return tiles, rows >= groups[128] * MANY // 2, rows >= OF_A_SEQUENCE * sequences

    assert chosen(sequences_in(tokens, prefill_sequences(MAX_SLOTS)) + 1) == chosen(2)


def read_together(steps: list[list[int]], chunks: bool, drafts: bool):
    """The same of several texts, which share the steps."""
    texts = [text(sum(own), 4 + number) for number, own in enumerate(zip(*steps, strict=True))]
    one = Runner(model_of("mtp", reference=True), Capacity(5, LONGEST, drafts=drafts, chunks=chunks), "cpu")
    requests = [Request([], Sampling(0.0), Limits(), number=number, end=LONGEST) for number in range(len(texts))]
    found = []
    for counts in steps:
        reading = [request for request, count in zip(requests, counts, strict=True) if count]
        for request, ids, count in zip(requests, texts, counts, strict=True):
            request.ids[:] = ids[: len(request.ids) + count]
        for request in reading:
            if request.sequence is None:
                one.add(request)
        ran = one.run(StepChoice([request.number for request in reading], 1000))
        assert [chunk.tokens for chunk in ran.chunks] == [count for count in counts if count]
        assert (len(ran.hidden.streams) > sum(counts)) == chunks
        found.append(ran.logits.clone())
        if drafts:
            found.append(one.speculate(ran, ran.logits.argmax(-1), [0] * len(reading), 3))
    return found, [part for request in requests for part in state_of(one, request)]


@pytest.mark.parametrize("steps", [TOGETHER[0], *(pytest.param(one, marks=SLOW) for one in TOGETHER[1:])], ids=str)
@pytest.mark.parametrize("drafts", [*slow(False), True])
def test_several_prompts_share_a_captured_step(steps, drafts, monkeypatch):
    # a captured step has more rows, and of more than ROWS_ALIKE a BLAS may sum each in another order
    monkeypatch.setattr(alike, "ROWS_ALIKE", LONGEST)
    (logits, state), (expected, expected_state) = (read_together(steps, chunks, drafts) for chunks in (True, False))
    assert all(map(same, logits, expected))
    assert all(map(same, state, expected_state))


@pytest.mark.parametrize(
    ("slots", "counts", "held"),
    [
        (5, [8] * 4, True),
        (5, [8] * 5, False),
        *slow_rows((5, [400, 400], False), (1, [8], True)),
        *slow_rows((5, [400, 300], True)),
    ],
)
def test_which_steps_are_captured(slots, counts, held):
    """Those of prompts beside one that decodes, as long as one prompt may be."""
    one = Runner(model_of("mtp"), Capacity(slots, LONGEST, chunks=True), "cpu")
    for number, count in enumerate(counts):
        one.add(Request(text(count, number), Sampling(), Limits(), number=number, end=LONGEST))
    assert (len(one.run().hidden.streams) > sum(counts)) == held


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_as_many_prompts_share_a_step_as_a_captured_one_holds(slots):
    one = Engine(model_of("mtp"), Capacity(slots, LONGEST), "cpu", step_ms=50)
    held, most = one.runner._chunks.hold, one._pacer._sequences
    assert held([(None, [5])] * most)
    assert not held([(None, [5])] * (most + 1))


@pytest.mark.parametrize("count", [2, 33, *slow(5, 50, 90)])
def test_padding_asks_for_no_expert_of_its_own(count, monkeypatch):
    compute, chosen = moe.experts.mixture, []
    monkeypatch.setattr(moe.experts, "mixture", lambda *given: chosen.append(given[3]) or compute(*given))
    one = Runner(model_of("mtp"), Capacity(4, LONGEST, chunks=True), "cpu")
    one.add(Request(text(count + 40, 4), Sampling(0.0), Limits(), number=0, end=LONGEST))
    one.run(StepChoice((0,), count))
    for own in chosen[2 * len(chosen) // 3 :]:  # the first two runs time it
        assert len(own) > count
        assert torch.equal(own, own[torch.arange(len(own)) % count])


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


@pytest.mark.parametrize("tokens", CHUNK_ROWS)
def test_a_step_has_room_for_the_groups_of_any_chunks(tokens):
    """So that one graph holds all of them, and no more than the worst need."""
    config, draw = model_of("mtp").config, Random(tokens)
    sequences = max(tokens // ROWS_PER_SEQUENCE, 1) + 1
    room = Extent.around(config, tokens, sequences, BLOCK_TOKENS).groups
    worst = {
        ratio: Extent.of(config, [1] * (sequences - 1) + [tokens + 1 - sequences], BLOCK_TOKENS).groups[ratio]
        for ratio in room
    }
    for _ in range(200):
        ends = sorted(draw.choices(range(tokens + 1), k=sequences - 1))
        counts = [end - first for first, end in pairwise([0, *ends, tokens])]
        groups = Extent.of(config, counts, BLOCK_TOKENS).groups
        assert all(groups[ratio] <= room[ratio] for ratio in room)
    assert all(worst[ratio] <= room[ratio] <= worst[ratio] + 1 for ratio in room)


def test_steps_are_captured_while_there_is_time(monkeypatch):
    compute, ran = CapturedPrefill.run, []
    monkeypatch.setattr(CapturedPrefill, "run", lambda self, work: ran.extend(work) or compute(self, work))
    one = Runner(model_of("mtp"), Capacity(3, 250, chunks=True, cache_memory=10**7), "cpu")
    count = 0
    while one.prepare():
        count += 1
    sizes = [size for size in PREFILL_ROWS if size <= 384]  # the blocks of the longest sequence
    assert count == 3 + len(sizes)  # 1, 2 and 4 sequences
    # the largest first: the others reuse its memory
    assert list(one.chunk_seconds) == [384, *sizes[:-1]]
    assert [len(ids) for _, ids in ran] == [size for size in one.chunk_seconds for _ in range(2)]
    assert all(len({*ids}) > 20 and sequence is one.graphs.padding for sequence, ids in ran)
    assert all(seconds > 0 for seconds in one.chunk_seconds.values())
    one.add(Request(text(40, 1), Sampling(), Limits(), end=50))
    one.preparing.happened = True
    one.run()
    assert not one.preparing.happened
    assert not Runner(model_of("mtp"), replace(Capacity(), longest=None), "cpu").prepare()


def test_sizes_of_captured_steps():
    """Up to the longest sequence; ranks, which compute faster than a host launches, capture larger ones too."""
    assert captured_rows(columns_of(8192), 1) == PREFILL_ROWS
    assert {ranks: captured_rows(columns_of(8192), ranks)[-3:] for ranks in (2, 8)} == dict.fromkeys(
        (2, 8), (2048, 3072, 4096)
    )
    assert captured_rows(columns_of(3072 - ROLLBACK), 2) == (*PREFILL_ROWS, 3072)
    assert captured_rows(columns_of(3072 - ROLLBACK - BLOCK_TOKENS), 2) == PREFILL_ROWS
    assert captured_rows(columns_of(1), 2) == (32, 64, 128)
