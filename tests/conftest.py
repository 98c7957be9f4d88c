"""What holds for every test: a fixed seed, one thread, and memory that is never zero by luck."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

PACKAGE = "dsv4cli"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Fix torch to one thread: a sum's order must not vary, and threads that wait for a busy core cost minutes."""
    import torch

    torch.set_num_threads(1)
    # torch lists its constructors at their first use under a device: let it list the real ones, not the poisoned
    with torch.device("cpu"):
        torch.empty(0)


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed torch, and poison the uninitialised memory that the package asks for."""
    import torch

    torch.manual_seed(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (caller == PACKAGE or caller.startswith(f"{PACKAGE}.")) and not tensor.is_meta:
            tensor.untyped_storage().fill_(_poison_byte(tensor.dtype))
        return tensor

    return call


def _poison_byte(dtype: Any) -> int:
    """0xFF in every byte is NaN in each float format, e8m0 included; integers get a value far out of range."""
    import torch

    if dtype is torch.bool:
        return 1
    # not -1 for integers, which may stand for "none" or index the last row
    return 0xFF if dtype.is_floating_point or dtype.is_complex or dtype is torch.uint8 else 0x7F
