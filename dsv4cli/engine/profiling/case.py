"""What one operation needs to be measured: its inputs, the call as the engine makes it, its reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4cli.engine.profiling.bounds import Bound
from dsv4cli.engine.profiling.inputs import BenchmarkInputs

Tensors = tuple[torch.Tensor, ...]
Operation = Callable[..., Any]  # a tensor, or a tuple of tensors and None


@dataclass(frozen=True)
class Competitor:
    """A library's own operator for the same work; prepare makes its inputs of the operation's arguments, untimed."""

    name: str
    prepare: Callable[..., tuple[Any, ...]]
    run: Callable[..., object]


@dataclass(frozen=True)
class Work:
    """One operation with its inputs on the device.

    arguments: tensors, or None where a format has no scale; run and reference take them in this order. read: the bytes
    of them that the operation needs, all where None; written: the bytes that an operation on memory stores, None for
    one that leaves its arguments alone. compared: of the outputs, what must agree with the reference.
    rival: what else could be called, to be timed beside it.
    """

    arguments: tuple[torch.Tensor | None, ...]
    run: Operation
    reference: Operation
    flops: int
    read: int | None = None
    written: int | None = None
    compared: Callable[[Tensors], Tensors] = field(default=lambda outputs: outputs)
    rival: Competitor | None = None


@dataclass(frozen=True)
class Case:
    """An operation before anything is allocated.

    shape: in words. needs: bytes of its inputs; cost: FLOP, roughly, which also says whether a CPU takes it. quantised:
    weights in FP8 or FP4. exact: the reference is taken in the operation's own dtype instead of fp32.
    """

    name: str
    family: str
    shape: str
    needs: int
    cost: int
    bound: Bound
    build: Callable[[BenchmarkInputs], Work]
    quantised: bool = False
    exact: bool = False
