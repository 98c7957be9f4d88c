"""A pool of processes that find launches and compile them. What fails is compiled at launch instead."""

import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

from dsv4cli.engine.compiling.demand import Span
from dsv4cli.engine.compiling.dry_run import DryRun, Task
from dsv4cli.engine.compiling.launches import Launch, build_launcher, builds_launchers, compile_launch, work_of
from dsv4cli.engine.system.ending import end_with_parent

# niceness of the processes, so that they yield to the process that loads the model
NICE = 5


@dataclass
class Counts:
    """Progress of a pool.

    Attributes:
        found: kernels that launches need.
        compiled: kernels that were missing in Triton's cache.
        present: kernels that were in Triton's cache.
        failed: what failed, and why.
        searching: whether more kernels may be found.
    """

    found: int = 0
    compiled: int = 0
    present: int = 0
    failed: list[str] = field(default_factory=list)
    searching: bool = True

    @property
    def done(self) -> int:
        """Kernels that are finished, including failed ones."""
        return self.compiled + self.present + len(self.failed)


@dataclass(frozen=True)
class Launcher:
    """The task of building the C launcher for a kernel and all others with its signature."""

    launch: Launch


Work = Task | Launch | Launcher


class CompilerPool:
    """Runs a dry run and its compilations on `workers` processes forked from this one.

    This process must have a single thread and no CUDA context.

    Attributes:
        counts: progress.
    """

    def __init__(
        self, dry: DryRun, workers: int, report: Callable[[Counts], None], ready: Callable[[Launch], None]
    ) -> None:
        """Run the first task, then fork the workers.

        Args:
            report: called with the counts after they have changed.
            ready: called with each kernel that is in Triton's cache.
        """
        self.counts, self._dry, self._report, self._ready = Counts(), dry, report, ready
        # steps first, then the widest spans, so that all kernels are found before the last ones are compiled
        self._tasks = deque(sorted(dry.tasks(), key=_width, reverse=True))
        self._launches: list[Launch] = []  # sorted by estimated compile time; taken from the end, longest first
        self._known = set[tuple[str, str, str]]()
        self._launchers = deque[Launcher]()
        # signature -> kernels that wait for their launcher; None if it is built
        self._waiting: dict[str, list[Launch] | None] = {}
        self._builds = builds_launchers()
        if self._tasks:  # imports during this first task are inherited by the forks
            self._found(dry.launches(self._tasks.popleft()))
        self._work: dict[Connection, Work | None] = dict.fromkeys(self._fork() for _ in range(workers))

    def run(self) -> None:
        """Hand out work until all kernels are compiled, or no worker process is left."""
        while self._work:
            self._hand_out()
            busy = {one: work for one, work in self._work.items() if work is not None}
            self.counts.searching = bool(self._tasks) or any(isinstance(work, Task) for work in busy.values())
            self._report(self.counts)
            if not busy:
                break
            for one in connection.wait([*busy]):
                self._take(one)  # type: ignore[arg-type]  # wait returns the type of its arguments

    def _hand_out(self) -> None:
        for one, work in self._work.items():
            if work is None and (self._tasks or self._launchers or self._launches):
                self._work[one] = self._next()
                one.send(self._work[one])

    def _next(self) -> Work:
        if self._tasks:
            return self._tasks.popleft()
        return self._launchers.popleft() if self._launchers else self._launches.pop()

    def _take(self, one: Connection) -> None:
        work, self._work[one] = self._work[one], None
        try:
            result = one.recv()
        except (EOFError, OSError):
            del self._work[one]
            result = "its process exited"
        if isinstance(work, Launcher):
            self._built(work.launch)  # if it failed, it is built when the kernel is launched
        if isinstance(result, str):
            launch = work.launch if isinstance(work, Launcher) else work
            name = f"{launch.module}.{launch.name}" if isinstance(launch, Launch) else str(launch)
            self.counts.failed.append(f"{name}: {result}")
        elif isinstance(work, Launch):
            self.counts.compiled += result
            self.counts.present += not result
            self._compiled(work)
        elif isinstance(work, Task):
            self._found(result)

    def _found(self, launches: list[Launch]) -> None:
        new = [launch for launch in launches if launch.identity not in self._known]
        self._known.update(launch.identity for launch in new)
        self._launches = sorted([*self._launches, *new], key=work_of)
        self.counts.found += len(new)

    def _compiled(self, launch: Launch) -> None:
        signature = str([*launch.signature.values()])
        waiting = self._waiting.get(signature, [])
        if not self._builds or waiting is None:
            self._ready(launch)
            return
        if not waiting:
            self._launchers.append(Launcher(launch))
        self._waiting[signature] = [*waiting, launch]

    def _built(self, launch: Launch) -> None:
        signature = str([*launch.signature.values()])
        for waiting in self._waiting[signature] or ():
            self._ready(waiting)
        self._waiting[signature] = None

    def _fork(self) -> Connection:
        context = get_context("fork")
        here, there = context.Pipe()
        context.Process(target=_serve, args=(self._dry, there, os.getpid()), daemon=True).start()
        there.close()
        return here


def _width(task: Task) -> float:
    return task.last - task.first if isinstance(task, Span) else math.inf


def _serve(dry: DryRun, jobs: Connection, parent: int) -> None:
    """Execute jobs until the parent ends. Reply with launches, whether a kernel was compiled, or an error text."""
    end_with_parent(parent)
    os.nice(NICE)
    while True:
        job = jobs.recv()
        jobs.send(_done(dry, job))


def _done(dry: DryRun, job: Work) -> Any:
    try:
        if isinstance(job, Launcher):
            return build_launcher(job.launch)
        return compile_launch(job) if isinstance(job, Launch) else dry.launches(job)
    except Exception as error:  # noqa: BLE001 - compilers can raise any exception; the launch itself raises it again
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
