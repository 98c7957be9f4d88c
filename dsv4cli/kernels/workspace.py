"""Words of device memory that launches share. Each launch finds them 0 and leaves them 0.

The programs of a launch exchange sums or counts there (cross_program.py), so two launches that run at the same time
must not share them. An engine runs one step at a time: it owns a workspace and makes it current for each step. A CUDA
graph captured in a step stores the addresses of the workspace, so its owner must keep both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dsv4cli.kernels.card import is_there


class Workspace:
    """Zeroed int32 words in device memory that the launches of one engine share.

    A step that raises may leave words that are not 0: the next step clears all of them.
    """

    def __init__(self) -> None:
        self._words: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        self._unfinished = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make launches of this thread inside the block use this workspace: wraps a step. Can be nested."""
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
        """Clear the words in place, so that captured graphs stay valid."""
        for words in self._words.values():
            words.zero_()

    def words(self, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
        """Return int32 words of this shape, the same tensor at each call; all 0 if every launch so far has finished."""
        found = self._words.get((device, shape))
        if found is None:
            # a fill that is captured has not run when a step outside the graph reads the words
            assert not is_there(device) or not torch.cuda.is_current_stream_capturing(), "capture what has run before"
            found = self._words[device, shape] = _zeros(device, shape)
        return found


_current: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


def words(device: torch.device, *shape: int) -> torch.Tensor:
    """Return int32 zeros for one launch, which must leave them 0: the current workspace's, or new ones if there is
    none.
    """
    workspace = _current.get()
    return _zeros(device, shape) if workspace is None else workspace.words(device, shape)


def _zeros(device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
