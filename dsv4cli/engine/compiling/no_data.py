"""Tensors without data: lets the engine's code run without a GPU, with correct shapes and address alignment."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA, META = torch.device("cuda", 0), torch.device("meta")
# value of every element that is read, and the methods that read one
READ = 1
READS = {"item": READ, "__int__": READ, "__index__": READ, "__float__": float(READ), "__bool__": bool(READ)}


class NoData(TorchFunctionMode):
    """Creates tensors on "cuda" without data in the block, in this thread.

    They are on the meta device, but report cuda:0 as their device, and addresses as if their memory began at 0. Every
    value that is read from them is 1. Tensors on the CPU are real.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and _is_meta(first):
            answer = _ANSWERS.get(func)
            if answer is not None:
                return answer(first)
            name = getattr(func, "__name__", "")
            if name in READS:
                return READS[name]
            if name in ("tolist", "cpu") or (name == "to" and _goes_to_cpu(args, kwargs or {})):
                read = torch.full(first.shape, READ, dtype=first.dtype, device="cpu")
                return read.tolist() if name == "tolist" else read
        elif func is torch.Tensor.pin_memory:
            return first
        given = {name: _placed(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_placed, args), **given)


def _is_meta(x: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return x.is_meta


def _address(x: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(x.storage_offset()) * x.itemsize


def _is_unfilled(x: torch.Tensor) -> bool:
    """Return whether a parameter has no elements yet: model/linear.py creates those on the meta device."""
    with torch._C.DisableTorchFunction():
        return x.numel() == 0


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    vars(torch._C.TensorBase)["device"].__get__: lambda x: CUDA,
    vars(torch._C.TensorBase)["is_cuda"].__get__: lambda x: True,
    vars(torch._C.TensorBase)["is_meta"].__get__: _is_unfilled,
    torch.Tensor.data_ptr: _address,
}


def _placed(value: Any) -> Any:
    """Replace a CUDA device by the meta device. Other values are unchanged."""
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return META if isinstance(value, str) and value.startswith("cuda") else value


def _goes_to_cpu(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    device = given.get("device", args[1] if len(args) > 1 else None)
    return (isinstance(device, torch.device) and device.type == "cpu") or device == "cpu"
