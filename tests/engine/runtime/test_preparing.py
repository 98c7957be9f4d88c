"""Waits that steps have once: noticed through Triton's hook, told of, and left out of the rate."""

from threading import Barrier, Thread

import pytest
import torch

from dsv4cli.commands import clock
from dsv4cli.commands.clock import Clock
from dsv4cli.engine.runtime.graphs.compile_watch import CompileWatch

triton = pytest.importorskip("triton")


@pytest.fixture
def runtime(monkeypatch):
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_cache_hook", None)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return runtime


def test_a_kernel_that_is_compiled_is_noticed(runtime):
    waited, seen = [], []

    def before(**details):
        seen.append(details["repr"])
        return False

    runtime.jit_cache_hook = before
    with CompileWatch(torch.device("cuda"), waited.append) as preparing:
        assert (preparing.happened, waited) == (False, [])
        for name in ("a", "b"):
            assert not runtime.jit_cache_hook(repr=name)
            assert (preparing.happened, waited) == (True, [True])
    assert (waited, seen) == ([True, False], ["a", "b"])
    runtime.jit_cache_hook(repr="c")  # outside a step nobody is told, and what was there before still hears of it
    assert (waited, seen) == ([True, False], ["a", "b", "c"])


def test_kernels_that_the_cache_lacked_are_counted(runtime):
    seen = []
    triton.knobs.compilation.listener = lambda **details: seen.append(details["cache_hit"])
    with CompileWatch(torch.device("cuda")) as preparing:
        for hit in (True, False, False):
            triton.knobs.compilation.listener(cache_hit=hit, src=None)
    triton.knobs.compilation.listener(cache_hit=False, src=None)  # outside a step it is nobody's
    assert (preparing.compiled, seen) == (2, [True, False, False, False])


def test_a_step_hears_of_its_own_thread_only(runtime):
    """Two engines in two threads: each waits for the other to be inside, then the first compiles."""
    both, done, heard = Barrier(2), Barrier(2), {}

    def step(number):
        heard[number] = []
        with CompileWatch(torch.device("cuda"), heard[number].append):
            both.wait(10)
            if number == 0:
                runtime.jit_cache_hook(repr="a")
            done.wait(10)

    threads = [Thread(target=step, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {0: [True, False], 1: []}


def test_an_error_ends_the_listening(runtime):
    waited = []

    def compiles():
        with CompileWatch(torch.device("cuda"), waited.append):
            runtime.jit_cache_hook(repr="a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiles()
    assert waited == [True, False]
    runtime.jit_cache_hook(repr="b")
    assert waited == [True, False]


def test_nothing_is_compiled_on_a_cpu(runtime):
    with CompileWatch(torch.device("cpu"), pytest.fail) as preparing:
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
    sentence = (
        "64 tokens; first token after 1.11 s, then 200.0 tokens/s; 1.4 s in steps that prepared kernels or graphs"
    )
    assert one.sentence() == sentence
    one.compiled = 3
    assert one.sentence() == f"{sentence}, 3 compiled"


def test_tokens_of_one_step_come_together(monkeypatch):
    """0.4 s to the first token, a step that captures for 0.6 s and gives 3, then 4 steps of 0.25 s that give 3 each."""
    ends = [0.4, *[1.0] * 3, *(1.0 + 0.25 * step for step in range(1, 5) for _ in range(3))]
    times = iter(ends)
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    one = Clock()
    for number in range(len(ends)):
        one.tick(prepared=1 <= number <= 3)
    assert (one.tokens, one.first, one.prepared) == (16, 0.4, pytest.approx(0.6))
    assert one.rate == pytest.approx(12)


def test_the_first_tokens_of_many_answers_are_no_rate(monkeypatch):
    times = iter([1.0, 1.0, 1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    one = Clock()
    for number in range(6):
        one.tick(later=number >= 3)
    assert one.rate == 6


@pytest.mark.parametrize(
    ("seconds", "speed"), [(0.025, "40.0 tokens/s"), (1.0, "1.0 tokens/s"), (24.0, "0.042 tokens/s")]
)
def test_a_slow_rate_is_not_none(monkeypatch, seconds, speed):
    """A large model on a CPU."""
    times = iter([1.0, 1.0 + seconds])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    one = Clock()
    one.tick(later=False)
    one.tick()
    assert one.sentence() == f"2 tokens; first token after 1.00 s, then {speed}"
