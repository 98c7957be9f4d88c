"""Detects that a step compiles kernels or captures graphs, which later steps do not."""

from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch

# called with True where a preparation begins, and with False after its step
OnPreparing = Callable[[bool], None]


def do_nothing(preparing: bool) -> None:
    """Ignore the report."""


class CompileWatch:
    """A reusable context that detects whether Triton compiles or loads a kernel inside. On a CPU nothing happens.

    Attributes:
        happened: whether anything was prepared since it was last set to False.
        compiled: the number of kernels compiled so far, because Triton's cache did not have them.
        on_preparing: called with True when preparation starts and False after the step. May be set.
    """

    def __init__(self, device: torch.device, on_preparing: OnPreparing = do_nothing) -> None:
        self.happened = False
        self.compiled = 0
        self.on_preparing = on_preparing
        self._watches = device.type == "cuda"
        self._reported = False

    @property
    def under_way(self) -> bool:
        """Whether the current step is compiling a kernel or capturing a graph."""
        return self._reported

    def begin(self) -> None:
        """Report that preparation starts, before a kernel or a capture shows it."""
        self.happened = True
        if not self._reported:
            self._reported = True
            self.on_preparing(True)

    def __enter__(self) -> "CompileWatch":
        if self._watches:
            _watch_compilers()
        self._outer = _running.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.reset(self._outer)
        if self._reported:
            self._reported = False
            self.on_preparing(False)


# the watch of this thread's step
_running: ContextVar[CompileWatch | None] = ContextVar("preparing", default=None)


class _Hook:
    """Triton's process-wide hook, called before a kernel is looked up in its cache.

    It reports to the watch of this thread's step, then calls the earlier hook.
    """

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._before = before

    def __call__(self, *arguments: Any, **details: Any) -> Any:
        """Return what the earlier hook returns. A hook that returns True keeps Triton from compiling."""
        running = _running.get()
        if running is not None:
            running.begin()
        return self._before(*arguments, **details) if self._before is not None else None


class _Listener:
    """Triton's process-wide listener, called after a kernel was compiled or found in its cache. See `_Hook`."""

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._before = before

    def __call__(self, *, cache_hit: bool, **details: Any) -> None:
        running = _running.get()
        if running is not None and not cache_hit:
            running.compiled += 1
        if self._before is not None:
            self._before(cache_hit=cache_hit, **details)


def _watch_compilers() -> None:
    """Install the hook and the listener, once."""
    from triton import knobs

    runtime, compilation = knobs.runtime, knobs.compilation
    if not isinstance(runtime.jit_cache_hook, _Hook):
        runtime.jit_cache_hook = _Hook(runtime.jit_cache_hook)
    if not isinstance(compilation.listener, _Listener):
        compilation.listener = _Listener(compilation.listener)
