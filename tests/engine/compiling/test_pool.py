"""Processes that compile: all is done once, and what one of them cannot is left to the launch."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4cli.engine.compiling import launches, pool
from dsv4cli.engine.compiling.demand import Span, Step
from dsv4cli.engine.compiling.launches import Launch
from dsv4cli.engine.compiling.pool import CompilerPool, Counts
from dsv4cli.engine.settings import Sampling
from tests.support.slow import slow

FIRST, SECOND = Step(((1, 0),), Sampling(), 8), Step(((1, 1),), Sampling(), 8)
SPAN = Span(1, 2, Sampling(), 8)


def launch(name: str) -> Launch:
    return Launch("module", name, "key", {}, {}, {}, {})


class DryRun:
    """Tasks, and what each launches."""

    def __init__(self, found: dict[Any, list[str]]) -> None:
        self._found = found

    def tasks(self) -> list[Any]:
        return [*self._found]

    def launches(self, task: Any) -> list[Launch]:
        if "raises" in self._found[task]:
            raise RuntimeError("no such layer\nand more")
        return [launch(name) for name in self._found[task]]


def run(found: dict[Any, list[str]], workers: int = 2, ready=lambda launch: None) -> tuple[Counts, list[int]]:
    done: list[int] = []
    one = CompilerPool(DryRun(found), workers, lambda counts: done.append(counts.done), ready)  # type: ignore[arg-type]
    one.run()
    return one.counts, done


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """What forks do instead of compiling."""

    def compiled(one: Launch) -> bool:
        if one.name == "dies":
            os._exit(9)
        if one.name == "refuses":
            raise ValueError("no registers left")
        return one.name != "there"

    monkeypatch.setattr(pool, "compile_launch", compiled)
    monkeypatch.setattr(pool, "work_of", lambda one: len(one.name))
    monkeypatch.setattr(pool, "builds_launchers", lambda: False)
    monkeypatch.setattr(pool, "end_with_parent", lambda parent: None)


def test_each_kernel_is_compiled_once():
    counts, done = run({FIRST: ["a", "b"], SECOND: ["b", "there"], SPAN: ["c", "a"]})
    assert counts == Counts(found=4, compiled=3, present=1, failed=[], searching=False)
    assert done == sorted(done)
    assert done[-1] == 4


def test_what_cannot_be_compiled_is_named_and_the_rest_goes_on():
    counts, _ = run({FIRST: ["refuses", "a", "dies", "b", "c"]})
    assert (counts.compiled, counts.done) == (3, 5)
    assert sorted(counts.failed) == [
        "module.dies: its process exited",
        "module.refuses: ValueError: no registers left",
    ]


def test_a_step_that_cannot_be_done_is_named():
    counts, _ = run({FIRST: ["a"], SPAN: ["raises"]})
    assert counts.compiled == 1
    [failed] = counts.failed
    assert failed.endswith(": RuntimeError: no such layer")


def test_it_ends_when_every_process_has():
    counts, _ = run({FIRST: ["dies", "a", "b"]}, workers=1)
    assert (counts.compiled, len(counts.failed)) == (0, 1)


@pytest.mark.parametrize("there", [True, False])
def test_launchers_are_built_where_triton_has_them_built(there, monkeypatch):
    """Triton 3.6 has a C compiler build one for each signature; without the driver's library that cannot be."""
    from triton.backends.nvidia import driver

    def library_dirs() -> list[str]:
        assert there, "libcuda.so cannot found!"
        return ["/lib"]

    built: list[Any] = []

    def launcher(source: Any, metadata: Any) -> None:
        built.append((source, metadata))
        raise ImportError("undefined symbol")

    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    monkeypatch.setattr(driver, "library_dirs", library_dirs)
    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    assert launches.builds_launchers() is there
    monkeypatch.setattr(launches, "compiled", lambda one: SimpleNamespace(src=one.name, metadata="metadata"))
    launches.build_launcher(launch("up"))
    assert built == [("up", "metadata")]
    monkeypatch.delattr(driver, "make_launcher")
    assert not launches.builds_launchers()


def test_launchers_are_built_with_few_optimisations(monkeypatch):
    """A launch takes as long, the C compiler two thirds."""
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build

    ran: list[list[str]] = []
    monkeypatch.setattr(build.subprocess, "check_call", lambda command, **how: ran.append(command))
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(launches, "compiled", lambda one: SimpleNamespace(src="source", metadata="metadata"))
    monkeypatch.setattr(
        driver, "CudaLauncher", lambda source, metadata: build._build("name", "name.c", "/folder", [], [], [], [])
    )
    for own in (None, lambda *given: ran.append(["own"])):  # who builds in another way still does
        monkeypatch.setattr(knobs.build, "impl", own)
        launches.build_launcher(launch("up"))
        assert knobs.build.impl is own
    assert [one for one in ran[0] if one.startswith("-O")] == ["-O3", "-O1"]
    assert ran[1:] == [["own"]]


@pytest.mark.parametrize("dies", [False, *slow(True)])
def test_a_launcher_is_built_once_for_all_with_its_signature(dies, monkeypatch):
    """And kernels are named when it is there: whoever loads one before would build it again."""
    events: list[str] = []

    def build(one: Launch) -> None:
        if dies:
            os._exit(9)

    monkeypatch.setattr(pool, "builds_launchers", lambda: True)
    monkeypatch.setattr(pool, "build_launcher", build)
    signatures = {"a": {"x": "*bf16"}, "there": {"x": "*fp32"}, "ccc": {"x": "*bf16"}}
    dry = DryRun({FIRST: []})
    monkeypatch.setattr(
        dry, "launches", lambda task: [replace(launch(name), signature=one) for name, one in signatures.items()]
    )
    one = CompilerPool(dry, 4, lambda counts: None, lambda launch: events.append(launch.name))  # type: ignore[arg-type]
    built = one._built

    def note(launch: Launch) -> None:
        events.append("launcher")
        built(launch)

    monkeypatch.setattr(one, "_built", note)
    one.run()
    assert sorted(events) == ["a", "ccc", "launcher", "launcher", "there"]
    assert events[0] == "launcher"
    assert (one.counts.compiled, one.counts.present) == (2, 1)
    assert [failed.partition(": ")[2] for failed in one.counts.failed] == ["its process exited"] * 2 * dies


def test_all_is_searched_before_it_is_compiled_and_the_longest_first():
    wide = Span(2, 9, Sampling(), 8)
    dry = DryRun({SPAN: ["a"], wide: ["b"], FIRST: ["c"], SECOND: ["d"]})
    one = CompilerPool(dry, 0, lambda counts: None, lambda launch: None)  # type: ignore[arg-type]
    assert [launch.name for launch in one._launches] == ["c"]
    assert [one._next() for _ in range(3)] == [SECOND, wide, SPAN]
    assert isinstance(one._next(), Launch)


def test_kernels_that_are_there_are_named():
    names: list[str] = []
    run({FIRST: ["a", "there", "refuses"]}, ready=lambda launch: names.append(launch.name))
    assert sorted(names) == ["a", "there"]


def test_long_sources_are_compiled_first():
    names: list[str] = []
    found = {FIRST: ["a", "cc", "there", "bbb"], SECOND: ["dddd"]}
    run(found, workers=1, ready=lambda launch: names.append(launch.name))
    assert names == ["there", "dddd", "bbb", "cc", "a"]
