"""How many threads a step is given."""

import pytest
import torch

from dsv4cli.engine.runtime import leader_step as drawing
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.system.device import ONE_THREAD_BYTES, ONE_THREAD_TOKENS, step_threads
from tests.support.small_model import model


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("tokens", "weights", "threads"), [(0, 0, 1), (1, 0, 2), (0, 1, 2)])
def test_a_large_step_has_every_thread(two_threads, tokens, weights, threads):
    with step_threads(ONE_THREAD_TOKENS + tokens, ONE_THREAD_BYTES + weights):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("scored", [False, True], ids=["drawn", "scored"])
def test_a_small_model_computes_a_few_tokens_with_one_thread(two_threads, monkeypatch, scored):
    seen = []

    def fails(*_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make_batch", fails)
    one = Runner(model(), Capacity(), "cpu")
    one.add(Request([1], Sampling(), Limits(), scored=scored, end=1 + (not scored)))
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert (seen, torch.get_num_threads()) == ([1], 2)


def test_a_small_model_draws_with_one_thread(two_threads, monkeypatch):
    seen = []
    drawn = drawing.start_logprobs
    monkeypatch.setattr(drawing, "start_logprobs", lambda *given: seen.append(torch.get_num_threads()) or drawn(*given))
    engine = Engine.of(model(), [Request([1], Sampling(0.0), Limits(max_tokens=2))], "cpu")
    while engine.busy:
        engine.step()
    assert (seen, torch.get_num_threads()) == ([1, 1], 2)
