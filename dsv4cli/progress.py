"""Progress of long-running work on stderr: a bar on a terminal, otherwise a line every 30 seconds."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from dsv4cli.harmless import brief_line

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

# short enough to show progress in a log, long enough for work that takes days
SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def bar(label: str, coloured: bool, *columns: "ProgressColumn") -> Iterator[Callable[..., None]]:
    """Yield a function that updates a bar on stderr's terminal: `completed`, `total`, `description`, `rate`."""
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn, Task, TextColumn

    class OnceKnown(ProgressColumn):
        """A column that is empty until the amount of work is known."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__(column.get_table_column())
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return "" if task.total is None else self._column(task)

    console = Console(stderr=True, no_color=not coloured)
    if console.is_dumb_terminal:  # Rich would leave an empty line there
        yield lambda **changes: None
        return
    words = TextColumn("{task.description}", markup=False)
    # if stdout is a terminal, its output appears above the bar
    both = sys.stdout.isatty()
    with Progress(words, *map(OnceKnown, columns), console=console, transient=True, redirect_stdout=both) as progress:
        task = progress.add_task(brief_line(label), total=None, rate="")
        yield lambda **changes: progress.update(task, **changes)


class WorkProgress:
    """Progress of some work: its amount, its speed and the remaining time.

    Args:
        label: What is processed, such as "questions".
        amount: Formats a number of units (bytes or items).
        duration: Formats seconds.
    """

    def __init__(self, label: str, amount: Callable[[float], str], duration: Callable[[float], str]) -> None:
        self._label, self._amount, self._duration = label, amount, duration
        self._first = self._done = self._total = 0
        self._start: float | None = None
        self._rate: str | None = None

    def update(self, done: int, total: int, rate: str | None = None) -> None:
        """Set the units that are done and the total. rate: Text to show instead of units per second."""
        if self._start is None:
            self._start, self._first = monotonic(), done
        self._done, self._total, self._rate = done, total, rate

    def sentence(self) -> str:
        """Return the state on one line: `questions: 12 of 200, 35 tokens/s, 4 min 10 s left`."""
        if self._start is None or not self._total:
            return f"{self._label} …"
        parts = [f"{self._label}: {self._amount(self._done)} of {self._amount(self._total)}"]
        speed = (self._done - self._first) / max(monotonic() - self._start, 1e-9)
        if self._rate or (self._rate is None and speed > 0):
            parts.append(self._rate or f"{self._amount(speed)}/s")
        if speed > 0:
            parts.append(f"{self._duration((self._total - self._done) / speed)} left")
        return ", ".join(parts)


@contextmanager
def reported_regularly(progress: WorkProgress, report: Callable[[str], bool]) -> Iterator[None]:
    """Report progress every 30 seconds from another thread, until the block ends or `report` returns False."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES) and report(progress.sentence()):
            pass

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class LineClock:
    """Timer that decides when to report a wait again."""

    def __init__(self) -> None:
        self._last: float | None = None

    def due(self, waiting: bool) -> bool:
        """Return True if 30 seconds have passed since the wait began or was last reported. `waiting=False` ends it."""
        now = monotonic()
        if waiting and self._last is not None and now - self._last < SECONDS_BETWEEN_LINES:
            return False
        due = waiting and self._last is not None
        self._last = now if waiting else None
        return due
