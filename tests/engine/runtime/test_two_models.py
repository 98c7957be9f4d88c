"""Two models in one process: each computes what it computes alone, with words of its own (kernels/workspace.py)."""

import pytest
import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels.workspace import words
from tests.kernels.test_workspace import together
from tests.support import small_model
from tests.support.slow import slow

PLAIN = Numerics.plain()
RATIOS, PROMPTS, STEPS = ((0, 4), (0, 4, 128)), ([5, 9, 30], [60, 7]), 5


class Decoding:
    """A model that goes on with its prompt by the likeliest token."""

    def __init__(self, number, device, numerics):
        if device == "cpu":
            model = small_model.model(RATIOS[number])
        else:
            model = load_model(resolve_model(f"random:tiny,layers={3 + number}"), numerics, device=device)
        self.ids = list(PROMPTS[number])
        self.runner = Runner(model, Capacity(longest=len(self.ids) + STEPS), device)
        self.begin()

    def begin(self):
        """Reads the text so far anew."""
        self.runner.forget()
        self.request = Request(self.ids, Sampling(), Limits(), end=len(PROMPTS[0]) + STEPS)
        self.runner.add(self.request)

    def step(self):
        """Logits fp32 [1, V]."""
        logits = self.runner.run().logits
        self.ids.append(int(logits.argmax()))
        self.request.ids.append(self.ids[-1])
        return logits.clone()

    def steps(self):
        return [self.step() for _ in range(STEPS)]


def two(device="cpu", numerics=PLAIN):
    return [Decoding(number, device, numerics) for number in range(2)]


class Aborted(Exception):
    """What ends a step."""


@pytest.fixture(params=[*slow(False), True], ids=["eager", "graphs"])
def launches(request, monkeypatch):
    """In place of kernels that share words: each step leaves something in its words and takes it again.

    The words of each step, by address; `launches.aborted` ends the next step between the two.
    """
    forward = Transformer.forward

    class Launches(list):
        aborted = False

    found = Launches()

    def launch(model, *given):
        mine = words(torch.device("cpu"), 4)
        found.append(mine.data_ptr())
        assert not mine.any()
        mine.fill_(7)
        streams = forward(model, *given)
        if found.aborted:
            raise Aborted
        assert (mine == 7).all()
        mine.fill_(0)
        return streams

    monkeypatch.setattr(Transformer, "forward", launch)
    monkeypatch.setattr(runner, "captures", lambda _: request.param)
    return found


def test_step_by_step_in_turn(launches):
    expected = [one.steps() for one in two()]
    launches.clear()
    models = two()
    for step in range(STEPS):
        for one, logits in zip(models, expected, strict=True):
            assert torch.equal(one.step(), logits[step])
    assert len({*launches}) == 2


def test_a_step_that_was_aborted_leaves_both_models_right(launches):
    expected = [one.steps() for one in two()]
    first, second = two()
    assert torch.equal(first.step(), expected[0][0])
    launches.aborted = True
    with pytest.raises(Aborted):
        first.step()
    launches.aborted = False
    assert all(map(torch.equal, second.steps(), expected[1]))
    first.begin()
    for logits in expected[0][1:]:
        # the first reads the whole text: sums in another order
        torch.testing.assert_close(first.step(), logits, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", [PLAIN, Numerics.reference()], ids=["plain", "reference"])
def test_two_threads_with_a_stream_each(numerics):
    """Graphs are captured and replayed side by side."""
    expected = [one.steps() for one in two("cuda", numerics)]
    found = [[], []]

    def computing(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                found[number].append(Decoding(number, "cuda", numerics).steps())

    together(lambda: computing(0), lambda: computing(1))
    for ours, alone in zip(found, expected, strict=True):
        assert len(ours) == 10
        assert all(torch.equal(*pair) for steps in ours for pair in zip(steps, alone, strict=True))
