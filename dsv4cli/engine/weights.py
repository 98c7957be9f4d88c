"""Filling a model: every tensor consumed, every parameter filled, one tensor of a shard in memory at a time."""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
from safetensors import safe_open
from torch import nn

from dsv4cli.engine.checkpoint import Checkpoint
from dsv4cli.engine.device import check_room
from dsv4cli.engine.layout import TensorSpec
from dsv4cli.engine.parallel import World
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.formats import E8M0_NAN, FP8_BLOCK

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}
# bytes that have arrived, bytes in all
Progress = Callable[[int, int], None]


def local_shape(spec: TensorSpec, world: World) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor. Raises CheckpointError when the ranks do not divide it."""
    if spec.shard is None:
        return spec.shape
    size, rest = divmod(spec.shape[spec.shard], world.size)
    inside_a_block = spec.dtype == "F8_E4M3" and world.size > 1 and size % FP8_BLOCK
    if rest or inside_a_block:
        raise CheckpointError(f"{spec.name} {list(spec.shape)} cannot be cut for {world.size} ranks", "use fewer ranks")
    return (*spec.shape[: spec.shard], size, *spec.shape[spec.shard + 1 :])


def local_slice(spec: TensorSpec, world: World) -> tuple[slice, ...]:
    """This rank's part of a tensor as an index; whole dimensions are full slices."""
    cut = [slice(None)] * len(spec.shape)
    if spec.shard is not None:
        size = local_shape(spec, world)[spec.shard]
        cut[spec.shard] = slice(world.rank * size, (world.rank + 1) * size)
    return tuple(cut)


def read_tensors(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], world: World
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """This rank's part of each tensor, file by file; a file is mapped only while its tensors are read."""
    by_file: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        by_file.setdefault(str(checkpoint.tensors[spec.name].file), []).append(spec)
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as file:
            for spec in sorted(wanted, key=lambda spec: checkpoint.tensors[spec.name].begin):
                yield spec, file.get_slice(spec.name)[local_slice(spec, world)]


def fill(
    model: nn.Module,
    specs: dict[str, TensorSpec],
    tensors: Iterable[tuple[TensorSpec, torch.Tensor]],
    *,
    device: torch.device | str,
    world: World,
    progress: Progress | None = None,
) -> None:
    """Puts tensors into the parameters that the table names; each arrives once and none is left over.

    tensors: pairs of spec and this rank's part in the stored dtype. progress is called at the start and after each.

    Raises NotEnoughMemory before anything is read, CheckpointError for a tensor of another shape or dtype, a scale byte
    255, a tensor that comes twice or not at all; nothing else fills a parameter.
    """
    waiting, done, total = set(specs), 0, total_bytes(specs, world)
    check_room(total, torch.device(device))
    if progress is not None:
        progress(0, total)
    places = _allocate(model, specs, torch.device(device), world)
    for spec, tensor in tensors:
        if spec.name not in waiting:
            how = "came twice" if spec.name in specs else "is no tensor of this model"
            raise CheckpointError(f"tensor {spec.name} {how}")
        place = places[spec.parameter] if spec.expert is None else places[spec.parameter][spec.expert]
        _check(spec, tensor, place)
        place.copy_(tensor)
        waiting.remove(spec.name)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    if waiting:
        raise CheckpointError(f"{len(waiting)} tensors never came, the first is {min(waiting)}")


def total_bytes(specs: dict[str, TensorSpec], world: World) -> int:
    """The bytes of this rank's part of all tensors."""
    return sum(prod(local_shape(spec, world)) * TORCH_DTYPES[spec.dtype].itemsize for spec in specs.values())


def _allocate(
    model: nn.Module, specs: dict[str, TensorSpec], device: torch.device, world: World
) -> dict[str, torch.Tensor]:
    """An empty parameter for every name in the table. Raises when the model has a parameter that the table lacks."""
    experts: dict[str, int] = {}
    for spec in specs.values():
        experts[spec.parameter] = experts.get(spec.parameter, 0) + (spec.expert is not None)
    places: dict[str, torch.Tensor] = {}
    for spec in specs.values():
        if spec.parameter not in places:
            shape, count = local_shape(spec, world), experts[spec.parameter]
            data = torch.empty((count, *shape) if count else shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            module, _, name = spec.parameter.rpartition(".")
            owner = model.get_submodule(module)
            if name not in owner._parameters:
                raise CheckpointError(f"the model has no parameter {spec.parameter}")
            owner.register_parameter(name, nn.Parameter(data, requires_grad=False))
            places[spec.parameter] = data
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled:
        raise CheckpointError(f"no tensor fills the parameter {unfilled[0]}")
    return places


def _check(spec: TensorSpec, tensor: torch.Tensor, place: torch.Tensor) -> None:
    if tensor.shape != place.shape or tensor.dtype != place.dtype:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"{spec.name} is {found}, expected {place.dtype} {list(place.shape)}")
    if spec.is_scale and bool((tensor.view(torch.uint8) == E8M0_NAN).any()):
        raise CheckpointError(
            f"{spec.name} holds the scale byte 255 (not a number)", "the tensor is damaged: fetch its shard again"
        )
