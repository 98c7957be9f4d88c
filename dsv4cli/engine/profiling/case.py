"""A benchmark case: the inputs of one operation, the call as the engine makes it, and its reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4cli.engine.profiling.bounds import Bound
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.kernels.stored_matrix import StoredMatrix

Tensors = tuple[torch.Tensor, ...]
Operation = Callable[..., Any]  # returns a tensor, or a tuple of tensors and None


def stored_matrices(arguments: Sequence[torch.Tensor]) -> list[StoredMatrix]:
    """Return the matrices whose parts are an operation's arguments, one matrix after another."""
    count = len(StoredMatrix._fields)
    return [StoredMatrix(*arguments[first : first + count]) for first in range(0, len(arguments), count)]


@dataclass(frozen=True)
class Competitor:
    """A library's operator for the same work. `prepare` converts the operation's arguments, untimed."""

    name: str
    prepare: Callable[..., tuple[Any, ...]]
    run: Callable[..., object]


@dataclass(frozen=True)
class Work:
    """An operation with its inputs on the device.

    Attributes:
        arguments: tensors, or None where a format has no scale. `run` and `reference` accept them in this order.
        flops: FLOP of one call.
        read: bytes of the arguments that one call reads; None for all of them.
        written: bytes that an in-place operation writes; None if it does not change its arguments.
        compared: selects the outputs that must match the reference.
        rival: another library's operator to time for comparison.
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
    """A benchmark case before anything is allocated.

    Attributes:
        shape: description of the shape for the report.
        needs: bytes of its inputs.
        cost: approximate FLOP; also decides whether it is small enough for a CPU.
        quantised: weights are FP8 or FP4.
        exact: compute the reference in the operation's own dtype instead of fp32.
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
