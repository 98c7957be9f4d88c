"""The process beside a command: what it says, how long it is waited for, what is remembered of it."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import dsv4cli
from dsv4cli.engine.compiling.compile_ahead import Compilation, _mark
from dsv4cli.engine.compiling.demand import Demand, demand_of
from dsv4cli.engine.compiling.pool import Counts
from dsv4cli.engine.compiling.process import start, start_early
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.settings import NO_DRAFTS, Limits, Sampling
from dsv4cli.kernels.card import CARDS
from tests.engine.compiling.test_pool import launch
from tests.support.compiler import compiler

CARD = CARDS["h200"]


def demand(length: int) -> Demand:
    config = parse_config(PRESETS["tiny"], "tiny")
    return demand_of(config, Formats(), Numerics.reference(), Limits(), [Sampling()], NO_DRAFTS, [length])


@pytest.fixture
def says(monkeypatch, tmp_path):
    return compiler(monkeypatch, tmp_path)


def waited(length: int = 5, device: int | None = 0) -> Counts:
    with Compilation(demand(length), CARD, device) as ahead:
        return ahead.wait(lambda counts: None)


ALL = {"found": 2, "compiled": 2, "searching": False}


def test_what_was_compiled_is_not_asked_for_again(says):
    says({"found": 2}, ALL)
    assert waited() == Counts(**ALL)
    says(code=1)
    assert waited() == Counts()
    assert waited(device=None).failed == ["the compiling process exited with code 1"]


def test_kernels_are_loaded_as_they_are_compiled_and_when_they_are_known(says, monkeypatch):
    loaded, launches = [], [launch("up"), launch("down")]
    monkeypatch.setattr(
        "dsv4cli.engine.compiling.compile_ahead.load_launch", lambda one, device: loaded.append((one.name, device))
    )
    says(*({"ready": pickle.dumps(one).hex()} for one in launches), ALL)
    waited(device=1)
    assert loaded == [("up", 1), ("down", 1)]
    says(code=1)
    with Compilation(demand(5), CARD, 1) as ahead:
        ahead._worker.join()
    assert loaded[2:] == [("up", 1), ("down", 1)]
    says(*({"ready": pickle.dumps(one).hex()} for one in launches), ALL)
    waited(device=None)
    assert len(loaded) == 4


def test_a_mark_that_was_not_written_to_the_end_loads_nothing(says, monkeypatch):
    monkeypatch.setattr(
        "dsv4cli.engine.compiling.compile_ahead.load_launch", lambda one, device: pytest.fail("there is none")
    )
    says(ALL)
    waited()
    _mark(demand(5), CARD).write_bytes(b"")
    assert waited() == Counts()


def test_a_process_that_waits_already_is_taken(says):
    says(ALL)
    process = start()
    for length in (5, 6):  # with the first it has ended
        with Compilation(demand(length), CARD, None, process) as ahead:
            assert ahead.wait(lambda counts: None) == Counts(**ALL)
            assert (ahead._process is process) == (length == 5)


@pytest.mark.parametrize("driver", [True, False])
def test_it_is_started_early_where_a_gpu_may_be(driver, says, monkeypatch, tmp_path):
    monkeypatch.setattr("dsv4cli.engine.compiling.process.DRIVER", tmp_path if driver else tmp_path / "none")
    says(ALL)
    process = start_early()
    assert (process is not None) == driver
    if process is not None:
        process.communicate("")


def test_the_process_runs_this_program_whatever_folder_the_user_is_in(says, tmp_path):
    says(ALL)
    waited()
    arguments = (tmp_path / "arguments").read_text()
    assert f"sys.path[0] = {str(Path(dsv4cli.__file__).parents[1])!r}" in arguments
    assert arguments.split()[-2:] == ["compile-ahead", str(os.getpid())]


def test_another_prompt_is_waited_for(says, tmp_path):
    """Also where all of its kernels are there: that is not known before."""
    says(ALL)
    waited()
    says({"found": 3, "present": 2}, {"found": 3, "present": 3, "searching": False}, seconds=0.3)
    assert waited(6).present == 3
    assert (tmp_path / "done").exists()


def test_the_oldest_marks_go(says, monkeypatch, tmp_path):
    monkeypatch.setattr("dsv4cli.engine.compiling.compile_ahead.MOST_MARKS", 2)
    says(ALL)
    for length in (5, 6, 7):
        waited(length)
    assert [_mark(demand(length), CARD).exists() for length in (5, 6, 7)] == [False, True, True]


def test_nobody_waits_for_its_end(says):
    says(ALL, ending=100)
    with Compilation(demand(5), CARD, 0) as ahead:
        assert ahead.wait(lambda counts: None) == Counts(**ALL)
        assert ahead._process is not None
        assert ahead._process.poll() is None
    assert _mark(demand(5), CARD).exists()


@pytest.mark.parametrize(("lines", "code"), [([{"found": 2, "compiled": 1}], 1), ([{**ALL, "failed": ["up: no"]}], 0)])
def test_what_failed_is_tried_again(says, lines, code):
    says(*lines, code=code)
    waited()
    says(ALL)
    assert waited() == Counts(**ALL)


def test_it_ends_with_whoever_waits(says):
    says({"found": 2}, seconds=100)
    with pytest.raises(KeyboardInterrupt), Compilation(demand(5), CARD, 0) as ahead:  # noqa: PT012

        def interrupt(counts: Counts) -> None:
            raise KeyboardInterrupt

        ahead.wait(interrupt)
    assert ahead._process is not None
    assert ahead._process.returncode == -9


def test_a_card_and_a_model_have_their_own(says):
    says(ALL)
    waited()
    says({"found": 1, "compiled": 1, "searching": False})
    for one, card in ((demand(5), CARDS["a100"]), (replace(demand(5), exact=True), CARD)):
        with Compilation(one, card, 0) as ahead:
            assert ahead.wait(lambda counts: None).found == 1


@pytest.mark.slow
def test_the_real_process_gets_ready_and_ends_where_nothing_is_asked():
    process = start()
    assert process.communicate("", timeout=60)[0] == ""
    assert process.returncode == 0
