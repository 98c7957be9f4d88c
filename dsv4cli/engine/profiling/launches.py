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
from dsv4cli.engine.profiling.ranges import ATTENTION, BLOCK, CONNECTIONS, MIXTURE, PREFIX


@dataclass(frozen=True)
class Launches:
    """count: kernels and copies of a step; busy: seconds in which at least one ran; by_class: kernels of each class."""

    count: int
    busy: float
    by_class: dict[str, int]

    def record(self, seconds: float, tokens: int) -> dict[str, Any]:
        """For JSON: `seconds` is what the step takes outside the profiler, for `tokens` tokens."""
        gaps = max(seconds - self.busy, 0.0)
        return {
            "count": self.count,
            "busy_seconds": self.busy,
            "gap_seconds": gaps,
            "per_token": {"count": self.count / tokens, "gap_seconds": gaps / tokens},
            "by_class": self.by_class,
        }


def trace_step(step: Call, device: torch.device, file: Path | None) -> Launches | None:
    """Runs a step under torch's profiler and, where a file is named, writes a Chrome trace; None on a CPU."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with _quiet(), torch.profiler.profile(activities=activities) as profiler:
        step()
        wait(device)
    if file is not None:
        profiler.export_chrome_trace(str(file))
    return count_launches(list(profiler.events() or ())) if device.type == "cuda" else None


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


def count_launches(events: list[FunctionEvent]) -> Launches:
    """Adds up what the profiler saw. Ranges also appear among the device's events; they are no kernels."""
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.name.startswith(PREFIX)
    ]
    by_class: Counter[str] = Counter()
    for event in events:
        if event.device_type.name == "CPU" and event.name.startswith(PREFIX):
            by_class[event.name.removeprefix(PREFIX)] += _kernels(event)
    inner = sum(by_class[name] for name in (*ATTENTION.values(), *MIXTURE.values()))
    by_class[CONNECTIONS] = by_class.pop(BLOCK, 0) - inner
    return Launches(len(spans), _covered(spans) / 1e6, dict(by_class))


def _kernels(event: FunctionEvent) -> int:
    """Kernels that the event or anything inside it has launched."""
    return len(event.kernels) + sum(map(_kernels, event.cpu_children))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of some spans of time."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
