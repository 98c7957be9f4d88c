"""Whether this machine rounds as the CPU of the golden recordings does.

A matmul, a sum or an exponential rounds differently on another CPU, with another vector width, BLAS or thread count.
`tests/golden/arithmetic.json` lists the operations that each golden case runs, with shapes and strides, and for each
operation a CRC-32 of its results for fixed inputs on the kind of CPU of the recordings (AMD with AVX-512, one thread).
Tests assert equality only where this machine computes the same bits for all operations of the case.

After a change to the operations of the reference: `python -m tests.support.record_arithmetic`, on such a CPU.
"""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FILE = Path(__file__).parents[1] / "golden" / "arithmetic.json"
aten = torch.ops.aten
# operations whose rounding IEEE 754 leaves open; all others (+, -, *, /, sqrt, casts, moves) are exact or round once
ROUNDED = {
    *(aten.addmm, aten.baddbmm, aten.bmm, aten.dot, aten.mm, aten.mv),
    *(aten.cumsum, aten.mean, aten.norm, aten.prod, aten.sum, aten._softmax, aten._log_softmax, aten.logsumexp),
    *(aten.cos, aten.exp, aten.expm1, aten.log, aten.log1p, aten.polar, aten.pow, aten.rsqrt, aten.sigmoid, aten.silu),
    *(aten.sin, aten.softplus, aten.tanh),
}
# two CPUs round few values differently: a small tensor is computed for several inputs, up to so many values or inputs
PROBE_VALUES, MOST_PROBES = 4096, 64


class Operations(TorchDispatchMode):
    """Collects the signatures of the operations in ROUNDED that run inside the context, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.signatures: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it imports the compiler: 1.5 s

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        complex_product = function is aten.mul.Tensor and any(x.is_complex() for x in inputs)
        rounded = complex_product or (function.overloadpacket in ROUNDED and inputs[0].is_floating_point())
        if rounded and inputs[0].numel():
            self.signatures.add(json.dumps([str(function), _encoded(args), _encoded(kwargs)]))
        return function(*args, **kwargs)


@cache
def same_arithmetic(case: str) -> bool:
    """Return whether this machine computes the bits of the recordings' CPU for all operations of a golden case."""
    return all(checksum(signature) == crc for signature, crc in recorded_operations(case).items())


def recorded_operations(case: str) -> dict[str, int]:
    """Return the operations of a golden case, with their checksums on the CPU of the recordings."""
    operations = _recorded()["operations"]
    return {operations[number][0]: operations[number][1] for number in _recorded()["cases"][case]}


@cache
def _recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@cache
def checksum(signature: str) -> int:
    """Return the CRC-32 of an operation's results on this machine for fixed inputs."""
    name, args, kwargs = json.loads(signature)
    _, packet, overload = name.split(".")
    function = getattr(getattr(aten, packet), overload)
    crc, values, probe = 0, 0, 0
    while values < PROBE_VALUES and probe < MOST_PROBES:
        result = function(*_decoded(args, probe * 16), **_decoded(kwargs, probe * 16))
        crc = zlib.crc32(result.contiguous().flatten().view(torch.uint8).numpy().tobytes(), crc)
        values, probe = values + result.numel(), probe + 1
    return crc


def _encoded(value: Any) -> Any:
    """An argument as JSON; a tensor as its dtype, shape and strides."""
    if isinstance(value, torch.Tensor):
        return {"tensor": _name(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(one) for one in value]
    return {key: _encoded(one) for key, one in value.items()} if isinstance(value, dict) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decoded(value: Any, probe: int) -> Any:
    """The argument that `_encoded` describes, with the values of a probe in each tensor."""
    if isinstance(value, list):
        return [_decoded(one, probe + number) for number, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "tensor" not in value:
        return {key: _decoded(one, probe) for key, one in value.items()}
    dtype, shape, stride = getattr(torch, value["tensor"]), value["shape"], value["stride"]
    span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return _values(max(span, 1), probe, dtype).as_strided(shape, stride)


def _values(count: int, probe: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` positive values below 16, most of them small: their roots, exponentials and products are finite."""
    # integers modulo a prime: the same on every machine, which sines need not be
    numbers = (torch.arange(count * (2 if dtype.is_complex else 1)) * 7919 + probe * 104729) % 65521
    values = (numbers.double() / 65521 * 4.0 ** (numbers % 4 - 1)).float()
    return torch.view_as_complex(values.view(-1, 2)) if dtype.is_complex else values.to(dtype)
