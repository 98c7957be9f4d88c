"""Progress of long work where stderr is not a terminal: a line every 30 seconds, from the first half minute on."""

import io
import os
import threading
from contextlib import redirect_stderr

import pytest

from dsv4cli import output as output_module
from dsv4cli import progress
from dsv4cli.commands import reading
from dsv4cli.output import Colours, Output, duration_text, size_text
from dsv4cli.progress import LineClock, WorkProgress

# seconds after which a line that does not come is missing
PATIENCE = 30


class Log(io.StringIO):
    """A stderr that is no terminal; `wait` waits for a line that has a text."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text):
        with self.changed:
            count = super().write(text)
            self.changed.notify_all()
        return count

    def wait(self, text):
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), PATIENCE)


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    return Log()


def test_counted_work_is_told_in_lines(log):
    with redirect_stderr(log), Output(Colours()).counting("questions") as show:
        log.wait("questions …\n")
        show(0, 200, "reading")
        log.wait("questions: 0 of 200, reading\n")
        show(50, 200, "35 tokens/s")
        log.wait("questions: 50 of 200, 35 tokens/s, ")
        log.wait(" left\n")
    assert [one.name for one in threading.enumerate() if one.name == "progress"] == []


def test_bytes_are_told_with_a_rate(log):
    with redirect_stderr(log), Output(Colours()).progress("downloading flash") as show:
        show(0, 159_000_000_000)
        show(10**9, 159_000_000_000)
        log.wait("downloading flash: 1.00 GB of 159.00 GB, ")
        log.wait("/s, ")


@pytest.mark.parametrize("given", [{"as_json": True}, {"quiet": True}])
def test_a_silent_command_tells_nothing(log, given):
    out = Output(Colours(), **given)
    with redirect_stderr(log), out.counting("questions") as show, out.progress("loading") as load:
        show(1, 2, "")
        load(1, 2)
        assert [one for one in threading.enumerate() if one.name == "progress"] == []
    assert log.getvalue() == ""


def test_a_reader_that_has_left_ends_the_lines_not_the_work(log, monkeypatch):
    tried = threading.Event()

    def refuse(text):
        tried.set()
        raise output_module.ReaderGone

    out = Output(Colours())
    monkeypatch.setattr(out, "status", refuse)
    with out.counting("questions") as show:
        assert tried.wait(PATIENCE)
        show(1, 2, "")


def test_the_rest_is_estimated_from_what_this_run_did(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    work = WorkProgress("converting", lambda count: size_text(round(count)), duration_text)
    work.update(50 * 10**9, 100 * 10**9)  # what an earlier run did
    now[0] = 110.0
    work.update(60 * 10**9, 100 * 10**9)
    assert work.sentence() == "converting: 60.00 GB of 100.00 GB, 1.00 GB/s, 40 s left"


def test_a_wait_is_told_every_thirty_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    clock, told = LineClock(), []
    for second in range(95):
        now[0] = 100.0 + second
        if clock.due(waiting=True):
            told.append(second)
    assert told == [30, 60, 90]
    assert not clock.due(waiting=False)
    assert not clock.due(waiting=True)
    assert progress.SECONDS_BETWEEN_LINES == 30


class Screen(io.StringIO):
    """A stderr that is a terminal, of 50 columns."""

    def isatty(self):
        return True

    def fileno(self):
        return 0


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output_module.os, "get_terminal_size", lambda *descriptor: os.terminal_size((50, 20)))
    return Screen()


@pytest.mark.parametrize("shown", ["progress", "counting"])
def test_an_unknown_amount_is_not_shown_as_a_question_mark(screen, shown):
    with redirect_stderr(screen), getattr(Output(Colours()), shown)("loading") as show:
        assert "loading" in screen.getvalue()
        assert "/?" not in screen.getvalue()
        assert "%" not in screen.getvalue()
        show(1, 2) if shown == "progress" else show(1, 2, "7 tokens/s")
    assert "1/2" in screen.getvalue()


def test_many_prompts_that_are_read_are_counted(screen, monkeypatch):
    monkeypatch.setattr(reading, "ITEMS_BETWEEN", 2)
    with redirect_stderr(screen):
        assert [*reading.each(Output(Colours()), "abcde", "reading prompts")] == [*"abcde"]
        shown = screen.getvalue()
        assert [one for one in shown.split("\r") if one.strip()] == [
            "reading prompts: 2 of 5 …",
            "reading prompts: 4 of 5 …",
        ]
        assert shown.endswith("\r")  # and removed


@pytest.mark.parametrize("quantity", ["0.16 s", "12 min 20 s", "3.2 GB,", "95 %", "27.2 tokens/s"])
def test_a_number_stays_on_the_line_of_its_unit(screen, quantity):
    for length in range(30, 50):
        with redirect_stderr(screen):
            Output(Colours()).status(f"{'x' * length} {quantity}")
    assert not [line for line in screen.getvalue().splitlines() if line.strip() in ("s", "GB,", "%", "tokens/s")]
    assert "\0" not in screen.getvalue()
