"""Chooses the implementation: Triton for CUDA tensors and plain PyTorch for all others, unless a backend is set."""

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
    """A tensor that the Triton kernel does not support. There is no fallback."""

    exit_code = 4

    def __init__(self, message: str, remedy: str = "use --backend torch") -> None:
        super().__init__(message, remedy)


# set by `use`, per thread: a new thread starts with "auto"
_chosen: ContextVar[Backend] = ContextVar("backend", default="auto")


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Use this backend for every call of this thread inside the block. "auto" decides by the tensor's device."""
    before = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(before)


def chosen() -> Backend:
    """Return the backend set by `use`."""
    return _chosen.get()


def choose(x: torch.Tensor, reference: ModuleType) -> ModuleType:
    """Return the module that computes on x: a family's `ref`, or its `kernel`, which has the same functions.

    Triton is imported when a kernel is first chosen. Raises KernelUnsupported if "triton" is set and the tensor is not
    on a GPU, or if autograd records x: the kernels have no gradients.
    """
    backend = _chosen.get()
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return reference
    if x.requires_grad and torch.is_grad_enabled():
        raise KernelUnsupported("the Triton kernels have no gradients, and autograd records this call")
    if x.device.type != "cuda" and not _interpreted():
        raise KernelUnsupported(f"the Triton kernels need a GPU, and a tensor is on {x.device}", "use --backend auto")
    return _kernels(reference.__package__)


@cache
def _kernels(family: str | None) -> ModuleType:
    """Import a family's kernel. Cached: even a repeated import takes several microseconds."""
    return import_module(".kernel", family)


def _interpreted() -> bool:
    """Return whether Triton uses its interpreter, which runs kernels on CPU tensors, for tests."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
