"""Staging buffers in host memory for copies to a device: one buffer is filled while others are copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch


class Buffer:
    """Host memory with a CUDA stream of its own; pinned for a GPU, so that copies from it are asynchronous.

    `bytes` is uint8 [size]. Call `wait` before writing it again after `send`.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self.stream = torch.cuda.Stream(device) if is_cuda else None
        if self.stream is not None:
            # the destination may be memory that pending work in the current stream still uses
            self.stream.wait_stream(torch.cuda.current_stream(device))
        # memory is pinned for the current device: make it the stream's
        with torch.cuda.stream(self.stream):
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        self.bytes = self._memory.numpy()

    def send(self, start: int, destination: torch.Tensor) -> None:
        """Copy bytes from offset `start` to destination, uint8 [...], asynchronously in the current stream."""
        given = self._memory[start : start + destination.numel()]
        destination.copy_(given.view(destination.shape), non_blocking=True)

    def join(self) -> None:
        """Make the device's current stream wait for all copies sent so far; the caller does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def wait(self) -> None:
        """Wait until all copies from this buffer are done; other threads run in the meantime."""
        if self.stream is not None:
            self.stream.synchronize()


class Staging:
    """`count` buffers of `size` bytes each, for the threads that fill a device."""

    def __init__(self, device: torch.device, count: int, size: int) -> None:
        self._buffers = [Buffer(device, size) for _ in range(count)]
        # FIFO: the buffer sent first is free first
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for buffer in self._buffers:
            self._free.put(buffer)

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Wait for a free buffer, and yield it with its stream as the current one."""
        buffer = self._free.get()
        try:
            buffer.wait()
            with torch.cuda.stream(buffer.stream):
                yield buffer
        finally:
            self._free.put(buffer)

    def wait(self) -> None:
        """Wait until the copies from all buffers are done."""
        for buffer in self._buffers:
            buffer.wait()
