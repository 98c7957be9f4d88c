"""Counts what a step launches on a GPU, by part of the model, and how long the GPU is busy or idle."""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from dsv4cli.engine.profiling.clock import Call, wait
from dsv4cli.engine.profiling.layers import LayerTime, Owner, layer_times
from dsv4cli.engine.profiling.ranges import BLOCK, CONNECTIONS, OTHER, PREFIX
from dsv4cli.errors import NotEnoughDisk, UnsoundResult

# name prefix of calls of CUDA's runtime (cudaLaunchKernel, cudaMemcpyAsync) and driver (cuLaunchKernelEx, by Triton)
CALLS = "cu"
# the time of a call that the profiler lost: in no range
NEVER = float("-inf")


@dataclass(frozen=True)
class Launches:
    """Kernels and copies of one step.

    Attributes:
        count: kernels and copies of the step.
        busy: seconds in which at least one of them ran.
        by_class: kernels and copies of each class, and of `OTHER`; their sum is `count`.
        seconds: `busy` split by class. Where several run at once, the time counts for the first.
        layers: one layer of each kind, kernel by kernel.
    """

    count: int
    busy: float
    by_class: dict[str, int]
    seconds: dict[str, float]
    layers: list[LayerTime]

    def record(self, seconds: float, tokens: int) -> dict[str, Any]:
        """Return a JSON object.

        Args:
            seconds: time of the step outside the profiler.
            tokens: tokens of the step.
        """
        gaps = max(seconds - self.busy, 0.0)
        return {
            "count": self.count,
            "busy_seconds": self.busy,
            "gap_seconds": gaps,
            "per_token": {"count": self.count / tokens, "gap_seconds": gaps / tokens},
            "by_class": self.by_class,
            "layers": [layer.record() for layer in self.layers],
        }


def trace_step(step: Call, device: torch.device, file: Path | None, replay: Call | None = None) -> Launches | None:
    """Run a step with ranges under torch's profiler. Return None on a CPU.

    Args:
        file: where to write a Chrome trace, if given.
        replay: the same step as a captured graph, if there is one. Then the replay is timed and written, and its
            kernels get the classes of those that `step` launches.

    Raises:
        UnsoundResult: the replay and `step` launch different numbers of kernels.
    """
    ranged = _trace(step, device, file if replay is None else None)
    if device.type != "cuda":
        return None
    owners = owners_of(ranged)
    return count_launches(ranged if replay is None else _trace(replay, device, file), owners)


def _trace(step: Call, device: torch.device, file: Path | None) -> list[FunctionEvent]:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with _quiet(), torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
        wait(device)
    if file is not None:
        _write(profiler, file)
    return list(profiler.events() or ())


def _write(profiler: torch.profiler.profile, file: Path) -> None:
    """Write a Chrome trace.

    torch renames a file of its own to the name that it is given, which would replace a device, and only logs that the
    disk is full. It therefore writes to a temporary folder, from which a complete trace is copied.

    Raises:
        NotEnoughDisk: the temporary folder is full.
        OSError: the trace cannot be written; names the file.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4-profile-") as folder:
        written = Path(folder) / file.name
        with _quiet():
            profiler.export_chrome_trace(str(written))
        try:
            with gzip.open(written) if written.suffix == ".gz" else open(written, "rb") as trace:
                json.load(trace)
        except (OSError, EOFError, ValueError):
            raise NotEnoughDisk(
                f"the trace does not fit in {Path(folder).parent}", "set TMPDIR to another folder"
            ) from None
        try:
            file.write_bytes(written.read_bytes())
        except OSError as error:
            error.filename = str(file)
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the profiler's C++ library prints to stderr. It has no setting for that."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def owners_of(events: list[FunctionEvent]) -> list[Owner]:
    """Return the owner of each kernel and copy, in launch order."""
    host = [event for event in events if event.device_type.name == "CPU"]
    ranges = [(*_span(event), _class(event)) for event in host if event.name.startswith(PREFIX)]
    blocks = sorted(_span(event) for event in host if event.name == PREFIX + BLOCK)
    # a kernel has the id of the call that launched it; torch's operators have ids from a separate counter
    calls = {event.id: event.time_range.start for event in host if event.name.startswith(CALLS)}
    moments = [calls.get(event.id, NEVER) for event in _work(events)]
    return [Owner(_innermost(ranges, moment), _number(blocks, moment)) for moment in moments]


def count_launches(events: list[FunctionEvent], owners: list[Owner]) -> Launches:
    """Sum up the profiler's events by owner. `owners` has one for each kernel and copy, in the same order."""
    work = _work(events)
    spans, classes = [_span(event) for event in work], [owner.name for owner in owners]
    if len(spans) != len(owners):
        raise UnsoundResult(
            f"the captured step runs {len(spans)} kernels and copies, but {len(owners)} without a graph",
            "report this as a bug: kernels cannot be assigned to parts of the model",
        )
    seconds = dict.fromkeys(classes, 0.0)
    until = float("-inf")
    for (start, end), name in zip(spans, classes, strict=True):
        seconds[name] += max(end - max(start, until), 0.0) / 1e6
        until = max(until, end)
    layers = layer_times([event.name for event in work], spans, owners)
    return Launches(len(spans), sum(seconds.values()), dict(Counter(classes)), seconds, layers)


def _work(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Return kernels and copies in the order in which they ran, without ranges, which are device events too."""
    found = [event for event in events if event.device_type.name == "CUDA" and not event.name.startswith(PREFIX)]
    return sorted(found, key=_span)


def _span(event: FunctionEvent) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _class(event: FunctionEvent) -> str:
    """Return the class of work that runs in a range but in none of its nested ranges."""
    name = event.name.removeprefix(PREFIX)
    return CONNECTIONS if name == BLOCK else name


def _innermost(ranges: list[tuple[float, float, str]], moment: float) -> str:
    """Return the class of the shortest range (start, end, class) that contains the moment."""
    return min(((end - start, name) for start, end, name in ranges if start <= moment < end), default=(0.0, OTHER))[1]


def _number(ranges: list[tuple[float, float]], moment: float) -> int | None:
    """Return the index of the range that contains the moment."""
    return next((number for number, (start, end) in enumerate(ranges) if start <= moment < end), None)
