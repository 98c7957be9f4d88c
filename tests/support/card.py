"""A GPU that is not there: kernels are launched on fake tensors, compiled for a target and loaded by no driver.

Triton refuses what does not fit the card, as it would on one. Not for a process with TRITON_INTERPRET.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from dsv4cli.kernels import card


class Card(NamedTuple):
    """A compute capability; KiB of shared memory that a program may take; multiprocessors."""

    capability: tuple[int, int]
    shared: int
    multiprocessors: int

    @property
    def arch(self) -> int:
        """The number behind sm_."""
        return self.capability[0] * 10 + self.capability[1]


# shared memory: CUDA C++ Programming Guide, technical specifications per compute capability; multiprocessors of an
# A100, 3090, 4090, H200, B200, 5090
A100, RTX3090, RTX4090, H200, B200, RTX5090 = (
    Card((8, 0), 163, 108),
    Card((8, 6), 99, 82),
    Card((8, 9), 99, 128),
    Card((9, 0), 227, 132),
    Card((10, 0), 227, 148),
    Card((12, 0), 99, 170),
)
CARDS = {one.arch: one for one in (A100, RTX3090, RTX4090, H200, B200, RTX5090)}


class _Driver:
    """What Triton asks of a driver; a launch does nothing."""

    def __init__(self, one: Card) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", one.arch, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": one.shared << 10},
            load_binary=lambda *image: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by this number."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


class _Unread(TorchFunctionMode):
    """What would set the device for itself, which takes a PyTorch with CUDA, or read values that nobody has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            return _indexed(*args)
        if name == "__setitem__":
            return None
        if name in ("unique", "pin_memory"):
            return args[0]
        if name in ("__int__", "item"):
            return 1
        return func(*args, **(kwargs or {}))


def _indexed(x: torch.Tensor, key: Any) -> torch.Tensor:
    """x[key] by operations that leave the device to the mode."""
    parts, aten = list(key) if isinstance(key, tuple) else [key], torch.ops.aten
    if isinstance(key, torch.Tensor) and key.dtype == torch.bool:
        return x  # as many as there could be
    if ... in parts:
        place = parts.index(...)
        parts[place : place + 1] = [slice(None)] * (x.dim() - sum(part is not None for part in parts) + 1)
    dim, chosen = 0, []
    for part in parts:
        if isinstance(part, int):
            x = aten.select(x, dim, part)
            continue
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        chosen.append(part if isinstance(part, torch.Tensor) else None)
        dim += 1
    return aten.index(x, chosen) if any(part is not None for part in chosen) else x


@contextmanager
def inserted(one: Card) -> Iterator[None]:
    """Inside, tensors made on "cuda" are fake ones on this card, and kernels over them are compiled for it."""
    from triton.runtime.driver import driver

    properties = SimpleNamespace(
        name=f"sm_{one.arch}", major=one.capability[0], minor=one.capability[1], L2_cache_size=50 << 20,
        shared_memory_per_block_optin=one.shared << 10, multi_processor_count=one.multiprocessors,
    )  # fmt: skip
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    card.real_card.cache_clear()
    driver.set_active(_Driver(one))
    with (
        patch("torch.cuda.get_device_capability", lambda device=None: one.capability),
        patch("torch.cuda.get_device_properties", lambda device=None: properties),
        FakeTensorMode(allow_non_fake_inputs=True),  # constants of the engine are real
        _Unread(),
        torch.no_grad(),
    ):
        yield
