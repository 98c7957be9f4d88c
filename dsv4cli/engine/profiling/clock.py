"""Times calls on a device."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch

Call = Callable[[], object]
Method = Literal["host", "graph", "events"]
WARM, SAMPLES = 3, 15
# CPU: seconds of sampling, then the minimum and maximum number of samples
CPU_SECONDS, CPU_FEWEST, CPU_MOST = 0.04, 3, 200
# CUDA graph: seconds of calls in it, so that its two events add little; then the maximum number of calls
GRAPH_SECONDS, GRAPH_CALLS = 2e-3, 16
# calls longer than this many seconds are timed one by one, with fewer samples
LONG_SECONDS, LONG_SAMPLES = 20e-3, 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 10th and 90th percentile of `samples` measurements.

    Attributes:
        low: 10th percentile.
        high: 90th percentile.
        method: "host": wall clock, for a CPU. "graph": consecutive calls in a CUDA graph. "events": single calls
            between two CUDA events after a cache flush; used for long calls and for calls that wait for the host, whose
            gaps are included. Parts of a step are timed between the events around each.
    """

    median: float
    low: float
    high: float
    samples: int
    method: Method

    @classmethod
    def of(cls, seconds: Sequence[float], method: Method) -> "Timing":
        """Summarize measurements."""
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return cls(median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered), method)

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """Time one call. The calls do the same work on different memory and are used in turn.

    Each call must have run once before, so that no compilation is timed.
    """
    if device.type != "cuda":
        return Timing.of(_on_host(calls), "host")
    with torch.cuda.device(device):
        if _waits_for_host(calls[0]):
            return Timing.of(_by_events(calls, device, WARM, SAMPLES), "events")
        (once,) = _between_events(calls[:1])
        if once > LONG_SECONDS:
            return Timing.of(_by_events(calls, device, 0, LONG_SAMPLES), "events")
        return Timing.of(_by_graph(calls, once), "graph")


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 0 for a CPU, whose caches are not flushed."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _on_host(calls: Sequence[Call]) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < CPU_FEWEST or (sum(seconds) < CPU_SECONDS and len(seconds) < CPU_MOST):
        start = time.perf_counter()
        calls[len(seconds) % len(calls)]()
        seconds.append(time.perf_counter() - start)
    return seconds


def _waits_for_host(call: Call) -> bool:
    """Return whether a call copies to the host or waits for it, so that a CUDA graph cannot capture it."""
    torch.cuda.synchronize()
    _complain_of_waits("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        _complain_of_waits("default")
    return False


def _complain_of_waits(mode: Literal["default", "error"]) -> None:
    """Set how torch reacts if an operation waits for the host."""
    with warnings.catch_warnings():
        # torch warns once per process; a wait that this mode misses makes the graph capture fail
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def _by_graph(calls: Sequence[Call], once: float) -> list[float]:
    rounds = -(-min(GRAPH_CALLS, int(GRAPH_SECONDS / once) + 1) // len(calls))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(WARM):
        graph.replay()
    return [seconds / (rounds * len(calls)) for seconds in _between_events([graph.replay] * SAMPLES)]


def _by_events(calls: Sequence[Call], device: torch.device, warm: int, samples: int) -> list[float]:
    # twice the cache size, to evict what the previous call left there
    flush = torch.empty(2 * cache_bytes(device), dtype=torch.uint8, device=device)
    turns = [calls[number % len(calls)] for number in range(warm + samples)]
    return _between_events(turns, before=flush.zero_)[warm:]


def _between_events(calls: Sequence[Call], before: Call | None = None) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
    for call, (start, end) in zip(calls, pairs, strict=True):
        if before is not None:
            before()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]
