"""Concurrent jobs: threads that can be canceled, and a shared byte counter."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
# receives how much is done and the total, in the unit of the job: bytes, tensors, tokens
Progress = Callable[[int, int], None]
# seconds between two reports of the count
BEAT = 0.1
# seconds that threads get to leave after they were called off
GRACE = 2.0


class Meter:
    """A thread-safe counter of bytes per file, reported as one sum."""

    def __init__(self, total: int, report: Progress) -> None:
        self.total = total
        self._report = report
        self._at: dict[str, int] = {}
        self._done = 0
        self._next = 0.0
        self._lock = threading.Lock()

    def at(self, name: str, position: int) -> None:
        """Set the byte position of a file; it may go down when the file starts again."""
        with self._lock:
            self._done += position - self._at.get(name, 0)
            self._at[name] = position
            now = time.monotonic()
            if now >= self._next or self._done >= self.total:
                self._next = now + BEAT
                self._report(self._done, self.total)


def begin(job: Callable[[], T]) -> "Future[T]":
    """Run a job in its own daemon thread, which does not delay the exit of the program."""
    future: Future[T] = Future()
    threading.Thread(target=_fill, args=(future, job), daemon=True).start()
    return future


def _fill(future: "Future[T]", job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - it is raised again where the result is wanted
        future.set_exception(error)


def do_all(jobs: Mapping[str, Callable[[], T]], workers: int, stop: threading.Event) -> dict[str, T]:
    """Run every job and return the results by name. Ends as `as_done`."""

    def named(name: str, job: Callable[[], T]) -> tuple[str, T]:
        return name, job()

    return dict(as_done([partial(named, name, job) for name, job in jobs.items()], workers, stop))


def as_done(jobs: Sequence[Callable[[], T]], workers: int, stop: threading.Event) -> Generator[T, None, None]:
    """Yield the result of every job in the order of completion; jobs start in the order given.

    The first job that fails cancels the others through `stop`, and its exception is raised. An exception in the
    caller's thread, such as KeyboardInterrupt, does the same, and so does `close`. Threads that ignore `stop` are
    abandoned.
    """
    waiting: SimpleQueue[Callable[[], T]] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    ended: SimpleQueue[Future[T]] = SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            future: Future[T] = Future()
            _fill(future, job)
            ended.put(future)
            if future.exception() is not None:
                stop.set()

    workers_ends: list[Future[None]] = []
    try:
        for _ in range(min(workers, len(jobs))):  # an interrupt may come while they start
            workers_ends.append(begin(work))
        for _ in jobs:
            yield ended.get().result()
    finally:
        stop.set()
        wait(workers_ends, timeout=GRACE)
