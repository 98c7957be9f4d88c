"""From a source of a model to a model ready to run."""

from dataclasses import dataclass

import torch

from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.coverage import check_coverage
from dsv4cli.engine.device import free_memory
from dsv4cli.engine.host_experts import HostExperts, most_weights, plan_experts
from dsv4cli.engine.layout import Formats, TensorSpec, expected_tensors
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import SINGLE, World
from dsv4cli.engine.random_weights import random_tensors
from dsv4cli.engine.reading import stored
from dsv4cli.engine.source import FolderSource, RandomSource
from dsv4cli.engine.weights import Progress, Supply, fill, local_slice, made, total_bytes
from dsv4cli.errors import NotEnoughMemory


def load_model(
    source: FolderSource | RandomSource,
    numerics: Numerics,
    *,
    device: torch.device | str = "cpu",
    world: World = SINGLE,
    progress: Progress | None = None,
    gpu_memory: int | None = None,
) -> Transformer:
    """The model of a source on a device. progress is called as weights arrive, with bytes done and in all. gpu_memory:
    the most bytes of weights on the device; where there are more, the drafter is left out and routed experts stay in
    host memory. None: on a GPU what is free, but for a reserve.

    Raises UnsupportedCheckpoint for what the engine does not run, CheckpointError for a checkpoint that does not match
    the table tensor by tensor, NotEnoughMemory when the weights do not fit on the device.
    """
    # the fp32 products of the reference are fp32
    torch.set_float32_matmul_precision("highest")
    try:
        if isinstance(source, RandomSource):
            return build_random(
                source.config, numerics, seed=source.seed, device=device, world=world, progress=progress,
                gpu_memory=gpu_memory,
            )  # fmt: skip
        return _load_folder(source, numerics, _target(device, world, gpu_memory, progress))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotEnoughMemory(
            f"the weights do not fit on {device}: {error}", "use a machine with more memory, or a lower --gpu-memory"
        ) from None


def build_random(
    config: ModelConfig,
    numerics: Numerics,
    *,
    formats: Formats = Formats(),  # noqa: B008 - frozen
    seed: int = 0,
    device: torch.device | str = "cpu",
    world: World = SINGLE,
    progress: Progress | None = None,
    gpu_memory: int | None = None,
) -> Transformer:
    """A model of random weights in the given formats; with `bf16` or `f32` throughout, one that can be trained."""
    target = _target(device, world, gpu_memory, progress)
    config, specs = _what_fits(config, formats, target)
    whole = random_tensors(specs.values(), seed, config.n_routed_experts, device)
    tensors = ((spec, tensor[local_slice(spec, world)]) for spec, tensor in whole)
    return _filled(config, numerics, specs, made(tensors), target)


@dataclass(frozen=True)
class _Target:
    """Where a model goes, the most bytes of weights there (None: any number), and who is told."""

    device: torch.device
    world: World
    budget: int | None
    progress: Progress | None


def _target(device: torch.device | str, world: World, gpu_memory: int | None, progress: Progress | None) -> _Target:
    place = torch.device(device)
    if gpu_memory is None and place.type == "cuda":
        gpu_memory = most_weights(free_memory(place) or 0)
    return _Target(place, world, gpu_memory, progress)


def _load_folder(source: FolderSource, numerics: Numerics, target: _Target) -> Transformer:
    identity = source.identity
    check_coverage(identity.checkpoint, expected_tensors(identity.config, identity.formats)).raise_if_incomplete()
    config, specs = _what_fits(identity.config, identity.formats, target)
    supply = stored(identity.checkpoint, specs.values(), target.world)
    return _filled(config, numerics, specs, supply, target)


def _what_fits(config: ModelConfig, formats: Formats, target: _Target) -> tuple[ModelConfig, dict[str, TensorSpec]]:
    """The model and its table: without the drafter, which no command uses, where not all of it fits."""
    specs = expected_tensors(config, formats)
    if target.budget is None or total_bytes(specs, target.world) <= target.budget:
        return config, specs
    config = config.without_drafter()
    return config, expected_tensors(config, formats)


def _filled(
    config: ModelConfig,
    numerics: Numerics,
    specs: dict[str, TensorSpec],
    supply: Supply,
    target: _Target,
) -> Transformer:
    model, device, world = Transformer(config, numerics, target.world), target.device, target.world
    plan = plan_experts(specs, config, world, target.budget)
    if plan is None:
        fill(model, specs, supply, device=device, world=world, progress=target.progress)
        return model.eval()
    held = model.host_experts = HostExperts(plan, device)
    for number, module in enumerate(plan.layers):
        model.set_submodule(module, held.layer(number))
    places = dict(held.places(specs.values()))
    fill(model, specs, supply, device=device, world=world, progress=target.progress, elsewhere=places)
    held.settle()
    return model.eval()
