"""Filling a model: every tensor consumed, every parameter filled."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from math import inf, prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.parallel.world import World
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.formats import E4M3_NAN, E8M0_NAN

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
}
# bytes that have arrived, bytes in all
Progress = Callable[[int, int], None]
# where each tensor belongs, by its name
Destinations = Mapping[str, torch.Tensor]
# the name of a tensor, and how many more of its bytes have arrived
Arrived = tuple[str, int]
# fills the destinations and says what has arrived; when it ends, all of it is there
Supply = Callable[[Destinations], Generator[Arrived, None, None]]


def local_slice(spec: TensorSpec, world: World) -> tuple[slice, ...]:
    """This rank's part of a tensor as an index; whole dimensions are full slices."""
    cut = [slice(None)] * len(spec.shape)
    if spec.shard is not None:
        size = part_shape(spec, world.size)[spec.shard]
        cut[spec.shard] = slice(world.rank * size, (world.rank + 1) * size)
    return tuple(cut)


def made(tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> Supply:
    """Tensors that are already in memory, for `fill`: pairs of spec and this rank's part in the stored dtype."""
    return partial(_copy, tensors)


def _copy(
    tensors: Iterable[tuple[TensorSpec, torch.Tensor]], destinations: Destinations
) -> Generator[Arrived, None, None]:
    scales: list[tuple[TensorSpec, torch.Tensor]] = []
    for spec, tensor in tensors:
        destination = destinations.get(spec.name)
        if destination is None:
            raise CheckpointError(f"tensor {spec.name} is not a tensor of this model")
        if tensor.shape != destination.shape or tensor.dtype != destination.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(f"{spec.name} is {found}, expected {destination.dtype} {list(destination.shape)}")
        destination.copy_(tensor)
        if spec.is_scale:
            scales.append((spec, no_scales(spec.dtype, tensor.reshape(-1).view(torch.uint8)).any()))
        nbytes = tensor.nbytes
        del tensor  # before the next one is made
        yield spec.name, nbytes
    # one wait for the device instead of one a scale
    damaged = torch.stack([found for _, found in scales]).tolist() if scales else []
    for (spec, _), is_damaged in zip(scales, damaged, strict=True):
        if is_damaged:
            raise damaged_scale(spec)


def fill(
    model: nn.Module,
    specs: dict[str, TensorSpec],
    supply: Supply,
    *,
    device: torch.device | str,
    world: World,
    progress: Progress | None = None,
    elsewhere: Destinations = MappingProxyType({}),
) -> None:
    """Puts tensors into the parameters that the table names; each arrives once and none is left over.

    supply: `made` or `reading.stored`. progress is called at the start and with all that arrives, in this thread.
    elsewhere: the destinations of tensors that are no part of a parameter, by name.

    Raises CheckpointError for a tensor of another shape or dtype, a scale byte 255, a table that names an expert that
    is not there, a tensor that comes twice or not at all; nothing else fills a parameter.
    """
    done, total = 0, total_bytes(specs, world)
    own = {name: spec for name, spec in specs.items() if name not in elsewhere}
    if progress is not None:
        progress(0, total)
    destinations = {**allocate(model, own, torch.device(device), world), **elsewhere}
    waiting = {name: destination.nbytes for name, destination in destinations.items()}
    with closing(supply(destinations)) as arrivals:
        for name, nbytes in arrivals:
            waiting[name] -= nbytes
            if waiting[name] < 0:
                raise CheckpointError(f"tensor {name} came twice")
            done += nbytes
            if progress is not None:
                progress(done, total)
    missing = [name for name, left in waiting.items() if left]
    if missing:
        raise CheckpointError(f"{len(missing)} tensors never came, the first is {min(missing)}")
    experts = 1 + max((spec.expert for spec in specs.values() if spec.expert is not None), default=-1)
    for spec in (spec for spec in own.values() if spec.dtype == "I64"):
        check_table(spec, destinations[spec.name], experts)


def total_bytes(specs: dict[str, TensorSpec], world: World) -> int:
    """The bytes of this rank's part of all tensors."""
    return sum(prod(part_shape(spec, world.size)) * TORCH_DTYPES[spec.dtype].itemsize for spec in specs.values())


def no_scales(dtype: str, stored: Any) -> Any:
    """Which bytes or numbers of a scale are none; stored: uint8 [..., n], of torch or of numpy, as the result."""
    if dtype == "F32":
        numbers = stored.view(torch.float32 if isinstance(stored, torch.Tensor) else np.float32)
        return ~((numbers > 0) & (numbers < inf))
    # e4m3: NaN, and the numbers below 0
    return stored == E8M0_NAN if dtype == "F8_E8M0" else stored >= E4M3_NAN


def check_table(spec: TensorSpec, chosen: torch.Tensor, experts: int) -> None:
    """Raises CheckpointError unless a table of chosen experts, int64 [V, k], names those of a layer only: kernels read
    where it says."""
    outside = ((chosen < 0) | (chosen >= experts)).any(1)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{spec.name}: row {row}, {chosen[row].tolist()}, names an expert that is not there",
            "the tensor is damaged: fetch its shard again",
        )


def damaged_scale(spec: TensorSpec) -> CheckpointError:
    """What a number that is no scale is answered with."""
    what = {
        "F8_E8M0": "the scale byte 255 (not a number)",
        "F8_E4M3": "a scale that is negative or not a number",
    }.get(spec.dtype, "a scale that is not a positive number")
    return CheckpointError(f"{spec.name} holds {what}", "the tensor is damaged: fetch its shard again")


def allocate(
    model: nn.Module, specs: dict[str, TensorSpec], device: torch.device, world: World
) -> dict[str, torch.Tensor]:
    """The empty destination of every tensor, by its name: a parameter, or an expert's row of one.

    Raises CheckpointError when the model has a parameter that the table lacks.
    """
    experts: dict[str, int] = {}
    for spec in specs.values():
        experts[spec.parameter] = experts.get(spec.parameter, 0) + (spec.expert is not None)
    parameters: dict[str, torch.Tensor] = {}
    for spec in specs.values():
        if spec.parameter not in parameters:
            shape, count = part_shape(spec, world.size), experts[spec.parameter]
            data = torch.empty((count, *shape) if count else shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            module, _, name = spec.parameter.rpartition(".")
            owner = model.get_submodule(module)
            if name not in owner._parameters:
                raise CheckpointError(f"the model has no parameter {spec.parameter}")
            owner.register_parameter(name, nn.Parameter(data, requires_grad=False))
            parameters[spec.parameter] = data
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled:
        raise CheckpointError(f"no tensor fills the parameter {unfilled[0]}")
    return {
        spec.name: parameters[spec.parameter] if spec.expert is None else parameters[spec.parameter][spec.expert]
        for spec in specs.values()
    }
