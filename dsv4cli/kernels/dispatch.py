"""Which implementation computes: Triton for a CUDA tensor, plain PyTorch for every other, unless one is demanded."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch

from dsv4cli.errors import Dsv4Error

Backend = Literal["auto", "triton", "torch"]


class KernelUnsupported(Dsv4Error):
    """A tensor that the Triton kernel does not take; nothing else is tried instead."""

    exit_code = 4

    def __init__(self, message: str, remedy: str = "use --backend torch") -> None:
        super().__init__(message, remedy)


# what `use` has set, in each thread for itself: a new thread begins with "auto"
_chosen: ContextVar[Backend] = ContextVar("backend", default="auto")


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Every call inside, of this thread, computes with this backend: "auto" decides by the tensor."""
    before = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(before)


def chosen() -> Backend:
    """What `use` has set."""
    return _chosen.get()


def choose(x: torch.Tensor, reference: ModuleType) -> ModuleType:
    """The module that computes on x: a family's `ref`, or the `kernel` beside it, which has the same functions.

    Triton is imported when a kernel is first chosen. Raises KernelUnsupported where "triton" is demanded of a tensor
    that is not on a GPU, and for a tensor whose gradient is recorded: the kernels have none.
    """
    backend = _chosen.get()
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return reference
    if x.requires_grad and torch.is_grad_enabled():
        raise KernelUnsupported("the Triton kernels have no gradients, and one is recorded here")
    if x.device.type != "cuda" and not _interpreted():
        raise KernelUnsupported(f"the Triton kernels need a GPU, and a tensor is on {x.device}", "use --backend auto")
    return _kernels(reference.__package__)


@cache
def _kernels(family: str | None) -> ModuleType:
    """To ask Python's import takes several microseconds each time."""
    return import_module(".kernel", family)


def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes tensors of the CPU: for tests."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
