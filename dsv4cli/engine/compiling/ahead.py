"""Kernels that are compiled while something else happens: in a process of its own, which has others beside it."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch

from dsv4cli.engine.compiling.demand import Demand
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.launches import Launch, builds_launchers, load_launch
from dsv4cli.engine.compiling.pool import CompilerPool, Counts
from dsv4cli.engine.settings import NO_DRAFTS
from dsv4cli.engine.system.atomic import write_file
from dsv4cli.engine.system.device import free_memory
from dsv4cli.engine.system.host_memory import host_memory
from dsv4cli.engine.weights.placement import FreeMemory, MemoryLimits
from dsv4cli.kernels.card import Card

# what a process takes while it compiles a large kernel
BYTES_EACH = 10**9
# seconds until those that it has started are gone too
GRACE = 2.0
PACKAGE = Path(__file__).parents[2]
# `python -m dsv4cli` would take what the folder has where the user is
PROGRAM = f"import sys; sys.path[0] = {str(PACKAGE.parent)!r}; from dsv4cli.cli import main; main()"


class Compilation:
    """Compiles in the background what a demand launches on a card, until it is closed. counts: how far it is."""

    def __init__(self, demand: Demand, card: Card, device: int | None = None) -> None:
        """device: where the kernels are loaded as they are compiled, with CUDA running; None: they are not, and all are
        looked for again where they were compiled before. Raises OSError where no process can be started."""
        self.counts, self._device, self._changed = Counts(), device, Condition()
        self._marks, self._launches = _marks(demand, card), list[Launch]()
        exactly, model = (mark.exists() for mark in self._marks)
        self._ended, self._for_all = exactly and device is not None, device is None or not model
        self._closed = False
        self._process: subprocess.Popen[str] | None = None
        if self._ended:
            work = self._load_marked
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "compile-ahead", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # it sees no Ctrl-C: it ends with this process
                text=True,
            )
            work = partial(self._follow, self._process, pickle.dumps((demand, card)).hex())
        self._worker = Thread(target=work, daemon=True)
        self._worker.start()

    def __enter__(self) -> "Compilation":
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._worker.join(GRACE)

    def wait(self, on_progress: Callable[[Counts], None]) -> Counts:
        """Until all is compiled; where a like demand of the same model was compiled before, until nothing is being
        compiled as far as is known."""
        with self._changed:
            while not self._ended and (self._for_all or self.counts.done < self.counts.found):
                on_progress(self.counts)
                self._changed.wait()
            return self.counts

    def _follow(self, process: "subprocess.Popen[str]", job: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # where it ends early, what is not compiled yet is compiled where it is launched
        with process.stdout, suppress(OSError, ValueError):
            with process.stdin:
                process.stdin.write(job)
            for line in process.stdout:
                self._take(json.loads(line))
        code = process.wait()
        if code == 0 and not self.counts.failed:
            _leave(self._marks, self._launches)
        with self._changed:
            if code and not self._closed:
                self.counts.failed.append(f"the process that compiles has ended with code {code}")
            self._ended = True
            self._changed.notify_all()

    def _take(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            self._launches.append(pickle.loads(bytes.fromhex(said["ready"])))
            self._load(self._launches[-1])
            return
        with self._changed:
            self.counts = Counts(**said)
            self._changed.notify_all()

    def _load_marked(self) -> None:
        with suppress(Exception):  # a file that was not written to the end raises anything
            for launch in pickle.loads(self._marks[0].read_bytes()):
                self._load(launch)

    def _load(self, launch: Launch) -> None:
        if self._device is not None and not self._closed:
            with suppress(Exception):  # the launch itself says it again
                load_launch(launch, self._device)


def compile_all(demand: Demand, card: Card, report: Callable[[Counts], None], ready: Callable[[Launch], None]) -> None:
    """Compiles everything that a demand launches on a card, in processes that are forked from this one; report, ready:
    as of `CompilerPool`."""
    with DryRun(demand, card) as dry:
        CompilerPool(dry, workers(), report, ready).run()


def workers() -> int:
    """Processes that compile at once."""
    memory = host_memory()
    room = memory.free // BYTES_EACH if memory else 1
    return max(1, min(len(os.sched_getaffinity(0)), room))


def found_memory(device: torch.device, limits: MemoryLimits, ranks: int = 1) -> FreeMemory:
    """The memory that each of so many ranks finds."""
    return FreeMemory(free_memory(device), free_memory(torch.device("cpu")), ranks, limits)


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _marks(demand: Demand, card: Card) -> tuple[Path, Path]:
    """Files of Triton's cache that say: this demand was compiled into it, and one of this model."""
    from triton import __version__

    sources = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        sources.update(file.read_bytes())
    # what is free is never the same; how weights are divided seldom changes with it
    memory = demand.memory and replace(demand.memory, gpu=None, host=None)
    demand = replace(demand, memory=memory)
    model = replace(demand, sequences=1, length=None, longest=(), context=1, chunk=1, samplings=(), drafting=NO_DRAFTS)
    versions = f"{torch.__version__} {__version__} {sources.hexdigest()} {builds_launchers()}"
    named = [hashlib.sha256(f"{versions} {card} {one}".encode()).hexdigest() for one in (demand, model)]
    return cache_folder() / f"dsv4-{named[0]}", cache_folder() / f"dsv4-{named[1]}"


def _leave(marks: tuple[Path, Path], launches: list[Launch]) -> None:
    """The first mark has the kernels, for the next run to load."""
    with suppress(OSError):  # a cache that cannot be written: everything is compiled anew
        marks[0].parent.mkdir(parents=True, exist_ok=True)
        write_file(marks[0], pickle.dumps(launches), marks[0].with_suffix(f".{os.getpid()}"))
        marks[1].touch()
