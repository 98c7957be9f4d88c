"""Fill a model's parameters from tensors: every tensor is used once, and every parameter is filled."""

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
from dsv4cli.engine.model.linear import MatrixParameters
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.formats import E4M3_NAN, E8M0_NAN
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, tile_height, to_tiles

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
    **dict.fromkeys(BLOCK_DTYPES, torch.uint8),
}
# destination of each tensor, by name
Destinations = Mapping[str, torch.Tensor]
# the name of a tensor, and how many of its bytes were just loaded
Arrived = tuple[str, int]
# fills the destinations and yields progress; all copies are complete when it ends
Supply = Callable[[Destinations], Generator[Arrived, None, None]]


def local_slice(spec: TensorSpec, world: World) -> tuple[slice, ...]:
    """Return this rank's shard of a tensor as an index; dimensions that are not sharded are full slices."""
    cut = [slice(None)] * len(spec.shape)
    if spec.shard is not None:
        size = part_shape(spec, world.size)[spec.shard]
        cut[spec.shard] = slice(world.rank * size, (world.rank + 1) * size)
    return tuple(cut)


def made(tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> Supply:
    """Return a supply of tensors already in memory: pairs of spec and this rank's shard in the stored dtype."""
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
        destination.copy_(in_tiles(spec, tensor) if spec.dtype in BLOCK_DTYPES else tensor)
        if spec.is_scale:
            scales.append((spec, no_scales(spec.dtype, tensor.reshape(-1).view(torch.uint8)).any()))
        nbytes = tensor.nbytes
        del tensor  # before the next one is made
        yield spec.name, nbytes
    # synchronize with the device once, not once per scale
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
    """Fill the parameters that `specs` names. Each tensor arrives exactly once.

    Args:
        supply: `made`, or `read.stored`.
        progress: called in this thread, at the start and whenever bytes arrive.
        elsewhere: destinations, by name, of tensors that are not part of a parameter.

    Raises CheckpointError if a tensor has another shape or dtype, arrives twice or never, or is unknown; if a scale is
    invalid; if a table names an expert that does not exist.
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
                raise CheckpointError(f"tensor {name} was loaded twice")
            done += nbytes
            if progress is not None:
                progress(done, total)
    if torch.device(device).type == "cuda":
        # return temporary memory that the allocator keeps: CUDA graphs do not allocate from it
        torch.cuda.empty_cache()
    missing = [name for name, left in waiting.items() if left]
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing; the first is {min(missing)}")
    experts = 1 + max((spec.expert for spec in specs.values() if spec.expert is not None), default=-1)
    for spec in (spec for spec in own.values() if spec.dtype == "I64"):
        check_table(spec, destinations[spec.name], experts)


def total_bytes(specs: dict[str, TensorSpec], world: World) -> int:
    """Return the bytes of this rank's shard of all tensors."""
    return sum(prod(part_shape(spec, world.size)) * TORCH_DTYPES[spec.dtype].itemsize for spec in specs.values())


def no_scales(dtype: str, stored: Any) -> Any:
    """Return a mask of the invalid scales: NaN, infinite, negative, and zero in fp32.

    Args:
        stored: bytes of the scales, uint8 [..., n], a torch tensor or NumPy array; the result has the same type.
    """
    if dtype == "F32":
        numbers = stored.view(torch.float32 if isinstance(stored, torch.Tensor) else np.float32)
        return ~((numbers > 0) & (numbers < inf))
    # e4m3: NaN and negative numbers
    return stored == E8M0_NAN if dtype == "F8_E8M0" else stored >= E4M3_NAN


def in_tiles(spec: TensorSpec, rows: Any) -> Any:
    """Return this rank's rows of GGUF blocks, uint8 [N, bytes], as parameters hold them: in tiles."""
    kind = BLOCK_DTYPES[spec.dtype]
    return to_tiles(kind, rows, tile_height(kind, rows.shape[0]))


def check_table(spec: TensorSpec, chosen: torch.Tensor, experts: int) -> None:
    """Raise CheckpointError unless a table of expert numbers, int64 [V, k], has only experts of the layer.

    Kernels use the numbers as an index without a check.
    """
    outside = ((chosen < 0) | (chosen >= experts)).any(1)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{spec.name}: row {row}, {chosen[row].tolist()}, names an expert that does not exist",
            "the tensor is damaged: download its shard again",
        )


def damaged_block(spec: TensorSpec) -> CheckpointError:
    """Return the error for a GGUF block with an invalid scale."""
    return CheckpointError(
        f"{spec.name} ({BLOCK_DTYPES[spec.dtype]}) holds a block whose scale is NaN or infinite",
        "the tensor is damaged: download its file again",
    )


def damaged_scale(spec: TensorSpec) -> CheckpointError:
    """Return the error for an invalid scale."""
    what = {
        "F8_E8M0": "the scale byte 255 (not a number)",
        "F8_E4M3": "a scale that is negative or not a number",
    }.get(spec.dtype, "a scale that is not a positive number")
    return CheckpointError(f"{spec.name} holds {what}", "the tensor is damaged: download its shard again")


def allocate(
    model: nn.Module, specs: dict[str, TensorSpec], device: torch.device, world: World
) -> dict[str, torch.Tensor]:
    """Allocate the parameters. Return the destination of each tensor by name: a parameter or an expert's row.

    Raises CheckpointError if the model lacks a parameter that `specs` names, or has one that `specs` does not fill.
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
            if spec.dtype in BLOCK_DTYPES:
                assert isinstance(owner, MatrixParameters), spec.parameter
                owner.block_type = BLOCK_DTYPES[spec.dtype]
            parameters[spec.parameter] = data
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled:
        raise CheckpointError(f"no tensor fills the parameter {unfilled[0]}")
    return {
        spec.name: parameters[spec.parameter] if spec.expert is None else parameters[spec.parameter][spec.expert]
        for spec in specs.values()
    }
