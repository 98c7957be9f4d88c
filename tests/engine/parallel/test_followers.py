"""What the leader does when a rank that it has started ends by itself."""

import signal
from threading import Event
from types import SimpleNamespace

import pytest

from dsv4cli.engine.parallel import followers
from dsv4cli.engine.parallel.followers import StartedFollowers


class Started:
    """A process that ends when it is told to."""

    def __init__(self, code: int) -> None:
        self.code, self.end = code, Event()

    def wait(self, seconds: float | None = None) -> int:
        self.end.wait(10)
        return self.code

    def poll(self) -> int | None:
        return self.code if self.end.is_set() else None


@pytest.mark.parametrize(
    ("code", "exit_code", "sentence"),
    [(3, 3, None), (0, 1, "rank 1 has ended"), (-signal.SIGKILL, 1, "rank 1 was killed by SIGKILL")],
)
@pytest.mark.parametrize("state", ["busy", "resting", "dismissed"])
@pytest.mark.parametrize("polite", [False, True])
def test_a_rank_that_ends(monkeypatch, code, exit_code, sentence, state, polite):
    process, told, said, left, watched = Started(code), [], [], [], Event()
    watch = StartedFollowers._watch

    def seen(*given):
        watch(*given)
        watched.set()

    monkeypatch.setattr(StartedFollowers, "_watch", seen)
    monkeypatch.setattr(followers.os, "_exit", left.append)
    started = StartedFollowers([process], lambda error: told.append(error.message), "")
    started.world = SimpleNamespace(send_orders=lambda orders: None)
    if polite:
        started.say_farewell(lambda error: said.append((error.message, [*told], [*left])))
    if state == "resting":
        started.rest()
    elif state == "dismissed":
        started.dismiss()
    process.end.set()
    assert watched.wait(10)
    ends = state == "busy" or (state == "resting" and polite)
    assert left == ([exit_code] if ends else [])
    assert told == ([sentence] if ends and sentence else [])
    # the farewell comes before the error is printed
    assert said == ([(sentence or "rank 1 has ended", [], [])] if ends and polite else [])


def test_only_the_first_rank_that_ends_is_reported(monkeypatch):
    """The other ranks lose their connection to it and exit, too, while the server still notifies its clients."""
    first, second = Started(-signal.SIGKILL), Started(1)
    said, told, left, second_watched, exited = [], [], [], Event(), Event()
    watch = StartedFollowers._watch

    def seen(self, rank, process):
        watch(self, rank, process)
        if process is second:
            second_watched.set()

    def farewell(error):
        said.append(error.message)
        second.end.set()
        assert second_watched.wait(10)

    monkeypatch.setattr(StartedFollowers, "_watch", seen)
    monkeypatch.setattr(followers.os, "_exit", lambda code: (left.append(code), exited.set()))
    started = StartedFollowers([first, second], lambda error: told.append(error.message), "")
    started.say_farewell(farewell)
    first.end.set()
    assert exited.wait(20)
    assert (said, told, left) == (["rank 1 was killed by SIGKILL"], ["rank 1 was killed by SIGKILL"], [1])
