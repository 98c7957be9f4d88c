"""How many threads a step is given."""

import pytest
import torch

from dsv4cli.engine.runtime import scheduler
from dsv4cli.engine.runtime.scheduler import Schedule, Stream
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


@pytest.mark.parametrize("way", [Schedule.logits, Schedule.step], ids=["logits", "step"])
def test_a_small_model_computes_a_few_tokens_with_one_thread(two_threads, monkeypatch, way):
    seen = []

    def fails(*_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "make_batch", fails)
    one = Schedule(model(), streams=1, prefill_chunk=8, device="cpu")
    one.add(Stream(0, [1]))
    with pytest.raises(KeyboardInterrupt):
        way(one)
    assert (seen, torch.get_num_threads()) == ([1], 2)
