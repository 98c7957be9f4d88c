"""`dsv4 convert` in a process that something happens to: at a chosen call among all that change the disk.

The processes are forks of the tests' own, which has imported everything.
"""

import itertools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dsv4cli.engine.conversion import plan
from tests.support import conversions

# every call through which a conversion changes the disk
CALLS = ("mkdir", "truncate", "pwrite", "write", "fdatasync", "fsync", "replace", "unlink", "rmdir")
# syncing takes most of the time of a small conversion, and is needed only where the machine dies
SYNCS = ("fdatasync", "fsync")
# several batches in each file of a small model
BATCH = 1 << 16


def started(what: str, number: int, arguments: Sequence[object], trace: Path | None = None) -> BaseProcess:
    """A process that converts; at call `number`, from 1, happens `what`: kill, interrupt or stop.

    trace: file that gets the names of the calls, one a line.
    """
    words = [str(argument) for argument in arguments]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(what, number, words, str(trace) if trace else ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's threads sleep
        process.start()
    return process


def ended(process: BaseProcess) -> int:
    """The exit code, negative for a signal."""
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def _run(what: str, number: int, arguments: Sequence[str], trace: str) -> None:
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    plan.BATCH = BATCH
    counter, names = itertools.count(1), []
    for name in CALLS:
        setattr(os, name, _watched(name, getattr(os, name), counter, names, what, number))
    code, _, _ = conversions.run("convert", *arguments)
    if trace:
        Path(trace).write_text("\n".join(names))
    raise SystemExit(code)


def _watched(
    name: str, call: Callable[..., Any], counter: "itertools.count[int]", names: list[str], what: str, number: int
) -> Callable[..., Any]:
    def watched(*arguments: Any, **options: Any) -> Any:
        names.append(name)
        if next(counter) == number:
            _happen(what, name, call, arguments)
        return None if name in SYNCS else call(*arguments, **options)

    return watched


def _happen(what: str, name: str, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
    if what == "kill":
        if name in ("pwrite", "write"):
            # half of it arrives
            descriptor, content, *rest = arguments
            call(descriptor, bytes(content)[: len(content) // 2], *rest)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
