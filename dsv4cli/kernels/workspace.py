"""Words of device memory that launches share: each launch finds them 0 and leaves them 0.

The programs of a launch leave sums or counts for each other there (cross_program.py), so two launches that run at the
same time must not share them. An engine runs one step at a time: it owns a workspace and makes it current around each
step. A CUDA graph that is captured in a step keeps the addresses of the workspace, and its owner keeps both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dsv4cli.kernels.card import is_there


class Workspace:
    """The words of one engine. A step that raises may leave some that are not 0: the next step clears all."""

    def __init__(self) -> None:
        self._words: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        self._unfinished = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Launches inside, of this thread, share the words of this workspace: around a step. May be nested."""
        if _current.get() is self:
            yield
            return
        if self._unfinished:
            self.reset()
        self._unfinished = True
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)
        self._unfinished = False

    def reset(self) -> None:
        """Clears the words where they lie: captured graphs stay valid."""
        for words in self._words.values():
            words.zero_()

    def words(self, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
        """int32 of this shape, the same at each call: zeros, if every launch so far has ended."""
        found = self._words.get((device, shape))
        if found is None:
            # a captured fill would not have run when a step outside the graph reads the words
            assert not is_there(device) or not torch.cuda.is_current_stream_capturing(), "capture what has run before"
            found = self._words[device, shape] = _zeros(device, shape)
        return found


_current: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


def words(device: torch.device, *shape: int) -> torch.Tensor:
    """int32 zeros for one launch, which leaves them 0: of the current workspace, or without one new at each call."""
    workspace = _current.get()
    return _zeros(device, shape) if workspace is None else workspace.words(device, shape)


def _zeros(device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
