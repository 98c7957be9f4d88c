"""A staging buffer on a CPU that copies as late as a GPU may."""

from collections import deque
from threading import Lock

import torch

from dsv4cli.engine.weights import staging


class LateBuffer(staging.Buffer):
    """Copies nothing before somebody waits for it."""

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__(device, size)
        self.lock = Lock()
        self.sent: deque[tuple[int, torch.Tensor]] = deque()

    def send(self, start: int, destination: torch.Tensor) -> None:
        self.sent.append((start, destination))

    def join(self) -> None:
        self.wait()

    def wait(self) -> None:
        # the thread that fills the buffer next may wait while another one joins
        with self.lock:
            while self.sent:
                super().send(*self.sent.popleft())
