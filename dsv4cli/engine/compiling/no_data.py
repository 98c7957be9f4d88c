"""Tensors without data: the engine's own code runs on a GPU that is not there, as far as shapes and addresses go."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA, META = torch.device("cuda", 0), torch.device("meta")
# what one without data gives for each of its elements, and what reads it
READ = 1
READS = {"item": READ, "__int__": READ, "__index__": READ, "__float__": float(READ), "__bool__": bool(READ)}


class NoData(TorchFunctionMode):
    """Inside, in this thread, tensors on "cuda" are on the meta device, say they are on cuda:0, and lie where the first
    byte of their memory would be at address 0. What is read of them is 1; tensors of the CPU are real."""

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
    """Of a parameter that has no elements yet: that one is where model/linear.py has put it."""
    with torch._C.DisableTorchFunction():
        return x.numel() == 0


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    vars(torch._C.TensorBase)["device"].__get__: lambda x: CUDA,
    vars(torch._C.TensorBase)["is_cuda"].__get__: lambda x: True,
    vars(torch._C.TensorBase)["is_meta"].__get__: _is_unfilled,
    torch.Tensor.data_ptr: _address,
}


def _placed(value: Any) -> Any:
    """A device as it is asked for -> where its tensors are."""
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return META if isinstance(value, str) and value.startswith("cuda") else value


def _goes_to_cpu(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    device = given.get("device", args[1] if len(args) > 1 else None)
    return (isinstance(device, torch.device) and device.type == "cpu") or device == "cpu"
