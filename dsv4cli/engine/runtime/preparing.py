"""Whether a step takes time that the next one does not: for kernels that are compiled, and graphs that are captured."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

# called with True where such a wait begins, and with False where it has ended
Waits = Callable[[bool], None]


def ignored(waiting: bool) -> None:
    """Says nothing of a wait."""


class Preparing:
    """Notes whether Triton compiles a kernel inside; on a CPU nothing does. May be entered again and again.

    happened: whether anything was prepared the last time. waits, which may be set, hears of it.
    """

    def __init__(self, device: torch.device, waits: Waits = ignored) -> None:
        self.happened = False
        self.waits = waits
        self._runtime: Any = None
        if device.type == "cuda":
            import triton

            self._runtime = triton.knobs.runtime

    def begin(self) -> None:
        """It begins, as the caller knows."""
        if not self.happened:
            self.happened = True
            self.waits(True)

    def __enter__(self) -> "Preparing":
        self.happened = False
        if self._runtime is not None:
            self._before, self._runtime.jit_cache_hook = self._runtime.jit_cache_hook, self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runtime is not None:
            self._runtime.jit_cache_hook = self._before
        if self.happened:
            self.waits(False)

    def _note(self, *arguments: Any, **details: Any) -> Any:
        """Triton's hook before it compiles; one that returns True keeps it from doing so."""
        self.begin()
        return self._before(*arguments, **details) if self._before is not None else None
