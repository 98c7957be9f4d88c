"""Compiles kernels in the background: in a separate process with its own pool of compiler processes."""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from threading import Condition, Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from dsv4cli import kernels
from dsv4cli.engine.compiling.demand import Demand
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.launches import Launch, builds_launchers, load_launch
from dsv4cli.engine.compiling.no_data import NoData
from dsv4cli.engine.compiling.pool import CompilerPool, Counts
from dsv4cli.engine.compiling.process import PACKAGE, cache_folder, start
from dsv4cli.engine.system.atomic import write_file
from dsv4cli.engine.system.device import free_memory
from dsv4cli.engine.system.host_memory import host_memory
from dsv4cli.engine.weights.placement import FreeMemory, MemoryLimits
from dsv4cli.kernels.card import Card

if TYPE_CHECKING:
    import subprocess

# memory of a process while it compiles a large kernel
BYTES_EACH = 10**9
# seconds to wait for the thread after the process was killed
GRACE = 2.0
# name prefix of marker files, and how many to keep: each prompt length has its own
MARK, MOST_MARKS = "dsv4-", 64


class Compilation:
    """Compiles the kernels of a demand for a card in the background, until it is closed.

    Attributes:
        counts: progress.
    """

    def __init__(
        self,
        demand: Demand,
        card: Card,
        device: int | None = None,
        process: "subprocess.Popen[str] | None" = None,
    ) -> None:
        """Start compiling.

        Args:
            device: loads each kernel there once it is compiled; CUDA must be initialized. None loads no kernels, and
                checks all of them even if this demand was compiled before.
            process: a waiting process from `start`.

        Raises:
            OSError: the process cannot be started.
        """
        self.counts, self._device, self._changed = Counts(), device, Condition()
        self._mark, self._launches = _mark(demand, card), list[Launch]()
        self._ended = device is not None and self._mark.exists()
        self._closed = False
        self._process = process
        if self._ended:
            work = self._load_marked
        else:
            self._process = start() if process is None or process.poll() is not None else process
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
        """Wait until all kernels are compiled, and return the final counts."""
        with self._changed:
            while not self._ended:
                on_progress(self.counts)
                self._changed.wait()
            return self.counts

    def _follow(self, process: "subprocess.Popen[str]", job: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        done = False
        # if it ends early, the remaining kernels are compiled at launch
        with process.stdout, suppress(OSError, ValueError):
            with process.stdin:
                process.stdin.write(job)
            for line in process.stdout:
                done = self._take(json.loads(line))
                if done:  # do not wait for its exit, which takes a second
                    break
        if not done:
            process.wait()
        elif not self.counts.failed:
            _leave(self._mark, self._launches)
        with self._changed:
            if not done and not self._closed:
                self.counts.failed.append(f"the compiling process exited with code {process.returncode}")
            self._ended = True
            self._changed.notify_all()
        process.wait()

    def _take(self, said: dict[str, Any]) -> bool:
        """Process a message. Return True if it is the last one."""
        if "ready" in said:
            self._launches.append(pickle.loads(bytes.fromhex(said["ready"])))
            self._load(self._launches[-1])
        elif "counts" in said:
            with self._changed:
                self.counts = Counts(**said["counts"])
                self._changed.notify_all()
        return "done" in said

    def _load_marked(self) -> None:
        with suppress(Exception):  # an incomplete file can raise any exception
            for launch in pickle.loads(self._mark.read_bytes()):
                self._load(launch)

    def _load(self, launch: Launch) -> None:
        if self._device is not None and not self._closed:
            with suppress(Exception):  # the launch itself raises it again
                load_launch(launch, self._device)


def prepare() -> None:
    """Import what `compile_all` needs, before the demand is known."""
    # torch.cat on the meta device would import the real torch._dynamo and SymPy, which takes 2 s and is not needed
    without = ModuleType("torch._dynamo")
    vars(without)["disable"] = lambda function, *given, **named: function
    sys.modules["torch._dynamo"] = vars(torch)["_dynamo"] = without
    with NoData():
        torch.cat([torch.empty(1, device="cuda")])
    for found in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(found.name)


def compile_all(demand: Demand, card: Card, report: Callable[[Counts], None], ready: Callable[[Launch], None]) -> None:
    """Compile everything that a demand launches on a card, in processes forked from this one.

    report, ready: as in `CompilerPool`.
    """
    with DryRun(demand, card) as dry:
        CompilerPool(dry, workers(), report, ready).run()


def workers() -> int:
    """Return the number of processes that compile at the same time."""
    memory = host_memory()
    processes = memory.free // BYTES_EACH if memory else 1
    return max(1, min(len(os.sched_getaffinity(0)), processes))


def found_memory(device: torch.device, limits: MemoryLimits, ranks: int = 1) -> FreeMemory:
    """Return the free memory of each rank."""
    return FreeMemory(free_memory(device), free_memory(torch.device("cpu")), ranks, limits)


def _mark(demand: Demand, card: Card) -> Path:
    """Return the marker file in Triton's cache. It exists if this demand was compiled into the cache."""
    from triton import __version__

    sources = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        sources.update(file.read_bytes())
    # free memory always differs a little, but rarely changes how weights are divided
    demand = replace(demand, memory=demand.memory and replace(demand.memory, gpu=None, host=None))
    versions = f"{torch.__version__} {__version__} {sources.hexdigest()} {builds_launchers()}"
    return cache_folder() / f"{MARK}{hashlib.sha256(f'{versions} {card} {demand}'.encode()).hexdigest()}"


def _leave(mark: Path, launches: list[Launch]) -> None:
    """Write a marker file with the launches, for the next run to load. Delete the oldest markers."""
    with suppress(OSError):  # the cache is not writable: the next run searches again
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_file(mark, pickle.dumps(launches), mark.with_suffix(f".{os.getpid()}"))
        for old in sorted(mark.parent.glob(f"{MARK}*"), key=lambda one: one.stat().st_mtime)[:-MOST_MARKS]:
            old.unlink()
