"""Threads that are called off."""

import threading

import pytest

from dsv4cli.engine.system import threads


def test_an_interrupt_while_threads_start_calls_off_those_that_have_started(monkeypatch):
    stop, started = threading.Event(), []
    begin = threads.begin

    def interrupted(job):
        if started:
            raise KeyboardInterrupt
        started.append(begin(job))
        return started[0]

    monkeypatch.setattr(threads, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(threads.as_done([lambda: stop.wait(60)] * 2, 2, stop))
    assert started[0].done()
