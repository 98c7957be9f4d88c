"""Many processes that find launches and compile them; what one of them cannot is left to the launch itself."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

from dsv4cli.engine.compiling.demand import Step
from dsv4cli.engine.compiling.dry_run import DryRun, Task
from dsv4cli.engine.compiling.launches import Launch, compile_launch, source_length
from dsv4cli.engine.system.ending import end_with_parent

# how much they give way to the process that loads a model meanwhile
NICE = 5


@dataclass
class Counts:
    """Of a pool. found: kernels that launches need. compiled: those that Triton's cache lacked; present: that it had.
    failed: what could not be done, and why. searching: whether more may be found."""

    found: int = 0
    compiled: int = 0
    present: int = 0
    failed: list[str] = field(default_factory=list)
    searching: bool = True

    @property
    def done(self) -> int:
        """Kernels that nobody has to wait for any more."""
        return self.compiled + self.present + len(self.failed)


class CompilerPool:
    """The work of a dry run on `workers` processes, which are forked from this one: it must have one thread and no
    CUDA. counts: how far it is."""

    def __init__(
        self, dry: DryRun, workers: int, report: Callable[[Counts], None], ready: Callable[[Launch], None]
    ) -> None:
        """report: called with the counts when they have changed. ready: with each kernel that is in Triton's cache."""
        self.counts, self._dry, self._report, self._ready = Counts(), dry, report, ready
        tasks = dry.tasks()
        self._steps = deque(task for task in tasks if isinstance(task, Step))
        self._spans = deque(task for task in tasks if not isinstance(task, Step))
        self._launches: list[Launch] = []  # what takes long is begun first, from the end
        self._known = set[tuple[str, str, str]]()
        if self._steps:  # what is imported on the way, forks need not import
            self._found(dry.launches(self._steps.popleft()))
        self._work: dict[Connection, Task | Launch | None] = dict.fromkeys(self._fork() for _ in range(workers))

    def run(self) -> None:
        """Until all is done, or no process is left."""
        while self._work:
            self._hand_out()
            busy = [one for one, work in self._work.items() if work is not None]
            self.counts.searching = bool(self._steps or self._spans) or any(
                not isinstance(self._work[one], Launch) for one in busy
            )
            self._report(self.counts)
            if not busy:
                break
            for one in connection.wait(busy):
                self._take(one)  # type: ignore[arg-type]  # of what was given

    def _hand_out(self) -> None:
        for one, work in self._work.items():
            if work is None and (self._steps or self._launches or self._spans):
                self._work[one] = self._next()
                one.send(self._work[one])

    def _next(self) -> Task | Launch:
        if self._steps or not self._launches:
            return (self._steps or self._spans).popleft()
        return self._launches.pop()

    def _take(self, one: Connection) -> None:
        work, self._work[one] = self._work[one], None
        try:
            result = one.recv()
        except (EOFError, OSError):
            del self._work[one]
            result = "its process has ended"
        name = f"{work.module}.{work.name}" if isinstance(work, Launch) else str(work)
        if isinstance(result, str):
            self.counts.failed.append(f"{name}: {result}")
        elif isinstance(work, Launch):
            self.counts.compiled += result
            self.counts.present += not result
            self._ready(work)
        else:
            self._found(result)

    def _found(self, launches: list[Launch]) -> None:
        new = [launch for launch in launches if launch.identity not in self._known]
        self._known.update(launch.identity for launch in new)
        self._launches = sorted([*self._launches, *new], key=source_length)
        self.counts.found += len(new)

    def _fork(self) -> Connection:
        context = get_context("fork")
        here, there = context.Pipe()
        context.Process(target=_serve, args=(self._dry, there, os.getpid()), daemon=True).start()
        there.close()
        return here


def _serve(dry: DryRun, jobs: Connection, parent: int) -> None:
    """Does what it is sent until its parent has ended; answers with launches, whether it has compiled, or why not."""
    end_with_parent(parent)
    os.nice(NICE)
    while True:
        job = jobs.recv()
        jobs.send(_done(dry, job))


def _done(dry: DryRun, job: Task | Launch) -> Any:
    try:
        return compile_launch(job) if isinstance(job, Launch) else dry.launches(job)
    except Exception as error:  # noqa: BLE001 - compilers raise anything; the launch itself says it again
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
