"""What `run` and `chat` compile while they load, and who of several ranks does."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from dsv4cli.commands import compiling, job
from dsv4cli.commands.compiling import NoCompilation, compiled_in_background, early_compiler, report_compiled
from dsv4cli.commands.job import Job, LocalProcess, open_job
from dsv4cli.engine.compiling import card, compile_ahead
from dsv4cli.engine.compiling.pool import Counts
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.weights.placement import FreeMemory
from dsv4cli.kernels.card import CARDS
from dsv4cli.options import ModelOptions
from dsv4cli.output import Colours, Output


@pytest.fixture
def asked(monkeypatch):
    """What is to be compiled, on a machine whose GPU is an H200."""
    found = []

    @contextmanager
    def meanwhile(out, demand, device, process):
        found.append((demand, device))
        yield NoCompilation()

    monkeypatch.setattr(job, "compiled_in_background", meanwhile)
    monkeypatch.setattr(compile_ahead, "found_memory", lambda *given: FreeMemory(10**12, 10**12))
    monkeypatch.setattr(Job, "kernels", "triton")
    monkeypatch.setattr(Job, "_load", lambda job, note, prompts, drawn: f"a model{note()}")
    return found


def opened(**options) -> Job:
    return open_job(Output(Colours()), ModelOptions(model="random:tiny", seed=1, temperature=0.0, **options))


def test_a_run_compiles_for_its_prompt(asked):
    with opened(max_tokens=30).model([7]) as model:
        assert model == "a model"
    [(demand, where)] = asked
    assert (demand.length, demand.longest, demand.sequences, demand.memory) == (7, (37,), 1, FreeMemory(10**12, 10**12))
    assert where == torch.device("cpu")


def test_a_conversation_and_scores_compile_for_theirs(asked):
    for prompts, drawn in ((None, True), ([5, 6], False)):
        with opened(max_context=9000).model(prompts, sampled=drawn):
            pass
    (conversation, _), (scores, _) = asked
    assert (conversation.length, conversation.longest) == (None, (8192, 9000))
    assert (scores.length, scores.longest, scores.sequences) == (None, (), 2)


def test_one_of_several_ranks_compiles(asked):
    for rank in range(2):
        with replace(opened(), process=LocalProcess("auto", World(rank, 2))).model([7]):
            pass
    [(demand, _)] = asked
    assert demand.ranks == 2


def test_a_cpu_compiles_nothing(asked, monkeypatch):
    monkeypatch.setattr(Job, "kernels", "torch")
    with opened().model([7]):
        pass
    assert asked == []


def test_people_are_told_what_was_compiled_and_what_was_not(monkeypatch, capsys):
    counts = Counts(found=3, compiled=1, present=1, failed=["up: no registers left"], searching=False)

    class Compilation:
        def __init__(self, demand, found, device, process):
            assert (found, device, process) == (CARDS["h200"], 1, "waits")
            self.counts = counts

        def wait(self, on_progress):
            on_progress(counts)
            return counts

    monkeypatch.setattr(card, "card_of", lambda device: CARDS["h200"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(compile_ahead, "Compilation", lambda *given: nullcontext(Compilation(*given)))
    monkeypatch.setattr(compiling, "perf_counter", iter((1.0, 3.0)).__next__)
    with compiled_in_background(Output(Colours()), None, None, "waits") as meanwhile:  # type: ignore[arg-type]
        assert meanwhile.note() == ", 3 of 3 kernels compiled"
        meanwhile.finish()
    assert capsys.readouterr().err == (
        "1 kernel compiled in 2.0 s; 1 were in the cache\n"
        "warning: some kernels cannot be compiled in advance, only at their first launch: up: no registers left\n"
    )
    report_compiled(Output(Colours()), Counts(found=3, present=3, searching=False), 2.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("device", "backend"), [("auto", "auto"), ("cpu", "auto"), ("auto", "torch")])
def test_a_process_is_started_early_where_a_gpu_may_compute(device, backend, monkeypatch):
    monkeypatch.setattr("dsv4cli.engine.compiling.process.start_early", lambda: "process")
    wanted = "process" if (device, backend) == ("auto", "auto") else None
    assert early_compiler(ModelOptions(device=device, backend=backend)) == wanted
