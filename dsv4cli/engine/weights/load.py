"""Load a model from a checkpoint or random weights, ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.gguf.loading import loaded_specs
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec, loaded_tensors
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, check_drafter
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.system.device import free_memory, step_threads
from dsv4cli.engine.system.threads import Progress
from dsv4cli.engine.weights.dequantize import dequantize_weights
from dsv4cli.engine.weights.fill import Supply, fill, local_slice, made, total_bytes
from dsv4cli.engine.weights.gguf import stored_gguf
from dsv4cli.engine.weights.offload import ExpertOffload, plan_of
from dsv4cli.engine.weights.placement import FreeMemory, MemoryLimits, Placement, decide
from dsv4cli.engine.weights.random_weights import random_tensors
from dsv4cli.engine.weights.read import stored
from dsv4cli.engine.weights.reserve import Workload, reserves
from dsv4cli.engine.weights.sizes import measure
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.dispatch import chosen


def load_model(
    source: FolderSource | RandomSource,
    numerics: Numerics,
    *,
    device: torch.device | str = "cpu",
    world: World = SINGLE,
    progress: Progress | None = None,
    limits: MemoryLimits | None = None,
    drafting: Drafting = AUTO_DRAFTING,
    load: Workload = Workload(),  # noqa: B008 - frozen
) -> Transformer:
    """Load a model on a device.

    `decide` chooses where weights go, whether the drafter is loaded, and the prefill chunk size. On a GPU without
    memory for all weights, routed experts stay in host memory. On a CPU, weights become fp32 if memory allows.

    Args:
        progress: called as weights arrive, with bytes done and total bytes.
        load: the workload for which a GPU keeps memory free.

    Raises:
        UsageError: `drafting` requires drafts and there is no drafter.
        UnsupportedCheckpoint: the engine does not support the model.
        CheckpointError: the checkpoint's tensors do not match the model.
        NotEnoughMemory: the weights do not fit on the device.
    """
    # reference kernels multiply in full fp32, without TF32
    torch.set_float32_matmul_precision("highest")
    check_drafter(source, drafting)
    target = _Target(torch.device(device), world, limits or MemoryLimits(), progress, drafting, load)
    try:
        if isinstance(source, RandomSource):
            return _build(source.config, numerics, Formats(), source.seed, target)
        return _load_folder(source, numerics, target)
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
    limits: MemoryLimits | None = None,
) -> Transformer:
    """Build a model with random weights in the given formats. If all formats are `bf16` or `f32`, it can be trained."""
    target = _Target(torch.device(device), world, limits or MemoryLimits(), progress, as_stored=True)
    return _build(config, numerics, formats, seed, target)


def _build(config: ModelConfig, numerics: Numerics, formats: Formats, seed: int, target: "_Target") -> Transformer:
    config, specs, placement = _placed(config, formats, target)
    whole = random_tensors(specs.values(), seed, config.n_routed_experts, target.device)
    tensors = map(partial(_part, target.world), whole)  # lazy: one whole tensor at a time
    return _filled(config, numerics, specs, made(tensors), placement, target)


def _part(world: World, whole: tuple[TensorSpec, torch.Tensor]) -> tuple[TensorSpec, torch.Tensor]:
    """Return this rank's shard of a tensor."""
    spec, tensor = whole
    return spec, tensor[local_slice(spec, world)]


@dataclass(frozen=True)
class _Target:
    """Where to load a model: device, ranks, memory limits, expected workload, and the progress callback."""

    device: torch.device
    world: World
    limits: MemoryLimits
    progress: Progress | None
    drafting: Drafting = AUTO_DRAFTING
    load: Workload = Workload()  # noqa: RUF009 - frozen
    as_stored: bool = False

    def least_free_memory(self) -> FreeMemory:
        """Return the least free memory over all ranks, so that all ranks decide the same."""
        on_gpu = self.device.type == "cuda"
        found = [free_memory(self.device) if on_gpu else None, free_memory(torch.device("cpu"))]
        gpu, host = self.world.least(found)
        # Triton's interpreter (used by tests on a CPU) reads storage formats
        as_stored = self.as_stored or chosen() == "triton"
        return FreeMemory(gpu, host, self.world.ranks_here, self.limits, as_stored)


def _load_folder(source: FolderSource, numerics: Numerics, target: _Target) -> Transformer:
    identity = source.identity
    check_coverage(identity.checkpoint, identity.stored_table).raise_if_incomplete()
    if isinstance(identity, GgufIdentity):
        return _load_gguf(identity, numerics, target)
    config, table, placement = _placed(identity.config, identity.formats, target)
    # some layouts store plain tensors in another dtype than the model uses
    specs = {name: identity.specs[name] for name in table}
    supply = stored(identity.checkpoint, specs.values(), target.world, naming=identity.naming)
    model = _filled(config, numerics, specs, supply, placement, target)
    for name, spec in table.items():
        if spec.dtype == "F32" and specs[name].dtype == "BF16":
            # earlier versions of transformers saved tensors in bf16 that are multiplied in fp32
            parameter = model.get_parameter(spec.parameter)
            parameter.data = parameter.data.float()
    return model


def _load_gguf(identity: GgufIdentity, numerics: Numerics, target: _Target) -> Transformer:
    """Load a GGUF model, whose blocks keep their bytes."""
    identity.check_readable()
    table = partial(loaded_specs, types=identity.gguf_types)
    config, specs, placement = _placed(identity.config, identity.formats, target, table)
    supply = stored_gguf(identity, specs.values(), target.world)
    return _filled(config, numerics, specs, supply, placement, target)


def _placed(
    config: ModelConfig,
    formats: Formats,
    target: _Target,
    table: Callable[[ModelConfig], dict[str, TensorSpec]] | None = None,
) -> tuple[ModelConfig, dict[str, TensorSpec], Placement]:
    """Return the config, the tensors to load and their placement, without the drafter if the placement omits it.

    table: returns the tensors to load of a configuration; by default those of the formats.
    """
    table = partial(loaded_tensors, formats=formats) if table is None else table
    specs = table(config)
    sizes = measure(specs.values(), config.num_experts_per_tok, target.world.size)
    # only rank 0 knows the workload
    load, on_gpu = target.world.broadcast_object(target.load), target.device.type == "cuda"
    ranks, divides = target.world.size, target.world.divides_from is not None
    triton = chosen() != "torch"
    reserved = reserves(config, formats, load, ranks, on_gpu=on_gpu, triton=triton, divides=divides, gguf=sizes.gguf)
    placement = decide(sizes, target.least_free_memory(), reserved, target.drafting)
    if placement.drafter or config.drafter == "none":
        return config, specs, placement
    config = config.without_drafter()
    return config, table(config), placement


def _filled(
    config: ModelConfig,
    numerics: Numerics,
    specs: dict[str, TensorSpec],
    supply: Supply,
    placement: Placement,
    target: _Target,
) -> Transformer:
    model, device, world = Transformer(config, numerics, target.world), target.device, target.world
    model.prefill_chunk, model.stored_bytes = placement.chunk, total_bytes(specs, world)
    if placement.division is None:
        fill(model, specs, supply, device=device, world=world, progress=target.progress)
        if placement.dequantized:
            with step_threads(0, model.stored_bytes):
                dequantize_weights(model)
        return model.eval()
    plan = plan_of(specs.values(), placement.division, world.size)
    offload = ExpertOffload(plan, device)
    offload.install(model)
    destinations = dict(offload.destinations(specs.values()))
    fill(model, specs, supply, device=device, world=world, progress=target.progress, elsewhere=destinations)
    offload.finish_loading()
    return model.eval()
