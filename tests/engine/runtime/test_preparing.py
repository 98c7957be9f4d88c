"""Waits that steps have once: noticed through Triton's hook, told of, and left out of the rate."""

import pytest
import torch

from dsv4cli.commands import clock
from dsv4cli.commands.clock import Clock
from dsv4cli.engine.runtime.preparing import Preparing

triton = pytest.importorskip("triton")


@pytest.fixture
def runtime(monkeypatch):
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_cache_hook", None)
    return runtime


def test_a_kernel_that_is_compiled_is_noticed(runtime):
    waited, seen = [], []

    def before(**details):
        seen.append(details["repr"])
        return False

    runtime.jit_cache_hook = before
    with Preparing(torch.device("cuda"), waited.append) as preparing:
        assert (preparing.happened, waited) == (False, [])
        for name in ("a", "b"):
            assert not runtime.jit_cache_hook(repr=name)
            assert (preparing.happened, waited) == (True, [True])
    assert (waited, seen, runtime.jit_cache_hook) == ([True, False], ["a", "b"], before)


def test_an_error_does_not_leave_the_hook(runtime):
    waited = []

    def compiles():
        with Preparing(torch.device("cuda"), waited.append):
            runtime.jit_cache_hook(repr="a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiles()
    assert (waited, runtime.jit_cache_hook) == ([True, False], None)


def test_nothing_is_compiled_on_a_cpu(runtime):
    with Preparing(torch.device("cpu"), pytest.fail) as preparing:
        assert runtime.jit_cache_hook is None
    assert not preparing.happened


def test_the_rate_is_that_of_steps_that_only_compute(monkeypatch):
    """1.11 s to the first token, 0.3 s for one that captures, 62 at 200 a second."""
    times = iter([1.11, 1.41, *(1.41 + number / 200 for number in range(1, 63))])
    monkeypatch.setattr(clock, "perf_counter", lambda: 7 + next(times))
    one = Clock(start=7)
    one.tick(prepared=True)
    assert one.rate is None
    one.tick(prepared=True)
    for _ in range(62):
        one.tick()
    assert one.rate == pytest.approx(200)
    sentence = "64 tokens; first token after 1.11 s, then 200.0 tokens/s; 1.4 s in steps that compiled kernels"
    assert one.sentence() == sentence


def test_the_first_tokens_of_many_answers_are_no_rate(monkeypatch):
    times = iter([1.0, 1.0, 1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    one = Clock()
    for number in range(6):
        one.tick(later=number >= 3)
    assert one.rate == 6
