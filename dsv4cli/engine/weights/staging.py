"""Host memory on the way to a device: a few buffers, each read into while others are still copied from."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch


class Buffer:
    """Host memory with a stream of its own; pinned for a GPU, so that copies from it overlap with all else.

    bytes: uint8 [size]; what was sent must have arrived before they are written again.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_cuda else None
        if self.stream is not None:
            # what gets the bytes may be memory that work in the current stream has just given up
            self.stream.wait_stream(torch.cuda.current_stream(device))
        # memory is pinned for the current device, which becomes the stream's
        with torch.cuda.stream(self.stream):
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self.bytes = self._memory.numpy()

    def send(self, start: int, destination: torch.Tensor) -> None:
        """Copies bytes from `start` on to destination, uint8 [...], in the current stream; they may arrive later."""
        given = self._memory[start : start + destination.numel()]
        destination.copy_(given.view(destination.shape), non_blocking=True)

    def wait(self) -> None:
        """Returns when everything sent is there; other threads run meanwhile."""
        if self.stream is not None:
            self.stream.synchronize()


class Staging:
    """`count` buffers of `size` bytes each, for the threads that fill a device."""

    def __init__(self, device: torch.device, count: int, size: int) -> None:
        self._buffers = [Buffer(device, size) for _ in range(count)]
        # the one that was sent first is the first to be free again
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """A buffer that nothing copies from any more, with its stream the current one; waits for one."""
        buffer = self._free.get()
        try:
            buffer.wait()
            with torch.cuda.stream(buffer.stream):
                yield buffer
        finally:
            self._free.put(buffer)

    def wait(self) -> None:
        """Returns when everything sent from any buffer is there."""
        for buffer in self._buffers:
            buffer.wait()
