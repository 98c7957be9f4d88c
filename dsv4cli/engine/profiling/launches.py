"""What a step launches on a GPU: kernels and copies by part of the model, seconds in which the GPU is busy or waits."""

import os
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
from dsv4cli.errors import UnsoundResult

# how calls of CUDA's runtime (cudaLaunchKernel, cudaMemcpyAsync) and driver (cuLaunchKernelEx, by Triton) begin
CALLS = "cu"
# the moment of a call that the profiler has lost: in no range
NEVER = float("-inf")


@dataclass(frozen=True)
class Launches:
    """count: kernels and copies of a step; busy: seconds in which at least one ran; by_class: how many of them each
    class launched, and what runs between them: `count` in all; seconds: of `busy`, those of each class, where several
    run at once those of the first; layers: of each kind one, kernel by kernel."""

    count: int
    busy: float
    by_class: dict[str, int]
    seconds: dict[str, float]
    layers: list[LayerTime]

    def record(self, seconds: float, tokens: int) -> dict[str, Any]:
        """For JSON: `seconds` is what the step takes outside the profiler, for `tokens` tokens."""
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
    """Runs a step with ranges under torch's profiler and, where a file is named, writes a Chrome trace; None on a CPU.

    replay: the same step captured, where there is one: it is what is written and timed, and its kernels belong to the
    classes of those that `step` launches. Raises UnsoundResult when they are not as many.
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
        profiler.export_chrome_trace(str(file))
    return list(profiler.events() or ())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the lines of the profiler's C++ library away from stderr; no setting of it does."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def owners_of(events: list[FunctionEvent]) -> list[Owner]:
    """Whose each kernel and copy is, in the order in which they were launched."""
    host = [event for event in events if event.device_type.name == "CPU"]
    ranges = [(*_span(event), _class(event)) for event in host if event.name.startswith(PREFIX)]
    blocks = sorted(_span(event) for event in host if event.name == PREFIX + BLOCK)
    # a kernel has the number of the call that launched it; torch's operators have numbers too, from another count
    calls = {event.id: event.time_range.start for event in host if event.name.startswith(CALLS)}
    moments = [calls.get(event.id, NEVER) for event in _work(events)]
    return [Owner(_innermost(ranges, moment), _number(blocks, moment)) for moment in moments]


def count_launches(events: list[FunctionEvent], owners: list[Owner]) -> Launches:
    """Adds up what the profiler saw, by the owner of each kernel and copy in their order."""
    work = _work(events)
    spans, classes = [_span(event) for event in work], [owner.name for owner in owners]
    if len(spans) != len(owners):
        raise UnsoundResult(
            f"the captured step runs {len(spans)} kernels and copies, the same step launched one by one {len(owners)}",
            "report it: the profile cannot tell whose they are",
        )
    seconds = dict.fromkeys(classes, 0.0)
    until = float("-inf")
    for (start, end), name in zip(spans, classes, strict=True):
        seconds[name] += max(end - max(start, until), 0.0) / 1e6
        until = max(until, end)
    layers = layer_times([event.name for event in work], spans, owners)
    return Launches(len(spans), sum(seconds.values()), dict(Counter(classes)), seconds, layers)


def _work(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Kernels and copies as they ran. Ranges also appear among the device's events; they are no kernels."""
    found = [event for event in events if event.device_type.name == "CUDA" and not event.name.startswith(PREFIX)]
    return sorted(found, key=_span)


def _span(event: FunctionEvent) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _class(event: FunctionEvent) -> str:
    """The class of what runs in a range, but not in a range inside it."""
    name = event.name.removeprefix(PREFIX)
    return CONNECTIONS if name == BLOCK else name


def _innermost(ranges: list[tuple[float, float, str]], moment: float) -> str:
    """The class of the shortest range (start, end, class) that holds the moment."""
    return min(((end - start, name) for start, end, name in ranges if start <= moment < end), default=(0.0, OTHER))[1]


def _number(ranges: list[tuple[float, float]], moment: float) -> int | None:
    """Which of the ranges holds the moment."""
    return next((number for number, (start, end) in enumerate(ranges) if start <= moment < end), None)
