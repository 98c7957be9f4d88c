"""Times the parts of a step on the device that computes them, without waiting for it."""

from time import perf_counter

import torch

from dsv4cli.kernels.card import is_there


class Stopwatch:
    """Records marks between launches. Call `seconds` once the device has passed the last mark."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = is_there(device)
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def start(self) -> None:
        """Drop earlier marks and set the first."""
        self._marks, self._times = [], []
        self.mark()

    def mark(self) -> None:
        """Set a mark."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._times.append(perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive marks."""
        if self._on_gpu:
            return [one.elapsed_time(other) / 1e3 for one, other in zip(self._marks, self._marks[1:], strict=False)]
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
