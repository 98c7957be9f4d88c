"""Ranks capture the same prefill steps, larger ones than one GPU does, and replay them for the same chunks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config import capacity
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import follow
from dsv4cli.engine.runtime.graphs.prefill_graphs import CapturedPrefill, PrefillGraphs
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.weights.random_weights import random_tensors
from tests.engine.parallel.test_world import CONFIG, from_random, in_ranks

# with threads of pytest's about, Python 3.12 warns of a fork
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
# two prompts, one after the other, and the tokens of an answer
PROMPTS, ANSWER = ([(5 * place) % 512 for place in range(120)], [(3 * place) % 512 for place in range(30)]), 3


@pytest.mark.parametrize(("ranks", "most"), [(1, 2048), (2, 4096), (8, 4096)])
def test_the_largest_chunk_that_is_replayed(ranks, most):
    model, cache = SimpleNamespace(world=World(0, ranks)), SimpleNamespace(slots=64, blocks=1)
    graphs = PrefillGraphs(SimpleNamespace(model=model, cache=cache, columns=capacity.columns_of(8192)))
    assert graphs.hold([(None, [0] * most)])
    assert not graphs.hold([(None, [0] * (most + 1))])


def answer(world: World, tensors) -> tuple[list[int], list[int], list[list[int]]]:
    """The sizes that this rank captures, those of the steps that it replays, and on the leader two answers."""
    captured, replayed, compute = [], [], CapturedPrefill.run

    def run(step: CapturedPrefill, work):
        (replayed if work[0][0] is not step._padding else captured).append(step._rows)
        return compute(step, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedPrefill, "run", run)
        model = from_random(tensors, world)
        if world.rank:
            follow(model, "cpu", world.receive_orders)
            return captured[::2], replayed, []
        followers = Followers(world) if world.size > 1 else None
        requests = [Request(ids, Sampling(0.0), Limits(ANSWER), stop_ids=()) for ids in PROMPTS]
        with Engine(model, Capacity(4, 200, cache_memory=10**7), "cpu", followers, step_ms=1e6) as engine:
            while engine.prepare():
                pass
            for request in requests:
                engine.add(request)
                while engine.busy:
                    engine.step()
        if followers is not None:
            followers.dismiss()
        return captured[::2], replayed, [request.ids[-ANSWER:] for request in requests]  # each is timed with two runs


def test_ranks_replay_the_same_large_chunks(tmp_path, monkeypatch):
    tensors = list(random_tensors(expected_tensors(CONFIG, Formats("f32", "f32", "f32")).values(), 0, 4))
    alone = answer(SINGLE, tensors)
    assert alone[:2] == ([], [])
    monkeypatch.setattr(runner, "captures", lambda device: True)
    monkeypatch.setattr(capacity, "PREFILL_ROWS", (32,))
    monkeypatch.setattr(capacity, "RANK_ROWS", (96, 128))
    # prefill steps divide their rows, decode steps do not
    leader, other = in_ranks(2, lambda world: answer(replace(world, divides_from=9), tensors), tmp_path)
    # the largest first: the others reuse its memory
    assert leader[0] == other[0] == [128, 32, 96]
    assert leader[1] == other[1] == [128, 32]
    assert leader[2] == alone[2]
