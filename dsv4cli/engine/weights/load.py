"""From a source of a model to a model ready to run."""

from dataclasses import dataclass
from functools import partial

import torch

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.layout import TensorSpec, loaded_tensors
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, check_drafter
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.system.device import free_memory, step_threads
from dsv4cli.engine.weights.dequantize import dequantize_weights
from dsv4cli.engine.weights.fill import Progress, Supply, fill, local_slice, made, total_bytes
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
    """The model of a source on a device. progress is called as weights arrive, with bytes done and in all. load: what
    will be asked of it, for which a GPU leaves room. Where that has no room for all weights, routed experts stay in
    host memory. On a CPU the weights become fp32 where memory allows. `decide` says so, and whether the drafter is
    loaded and how large chunks of prompts are.

    Raises UsageError where `drafting` asks for a number of drafts and there is no drafter, UnsupportedCheckpoint for
    what the engine does not run, CheckpointError for a checkpoint that does not match the table tensor by tensor,
    NotEnoughMemory when the weights do not fit on the device.
    """
    # the fp32 products of the reference are fp32
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
    """A model of random weights in the given formats; with `bf16` or `f32` throughout, one that can be trained."""
    target = _Target(torch.device(device), world, limits or MemoryLimits(), progress, as_stored=True)
    return _build(config, numerics, formats, seed, target)


def _build(config: ModelConfig, numerics: Numerics, formats: Formats, seed: int, target: "_Target") -> Transformer:
    config, specs, placement = _placed(config, formats, target)
    whole = random_tensors(specs.values(), seed, config.n_routed_experts, target.device)
    tensors = map(partial(_part, target.world), whole)  # of which nothing stays
    return _filled(config, numerics, specs, made(tensors), placement, target)


def _part(world: World, whole: tuple[TensorSpec, torch.Tensor]) -> tuple[TensorSpec, torch.Tensor]:
    """This rank's part of a tensor."""
    spec, tensor = whole
    return spec, tensor[local_slice(spec, world)]


@dataclass(frozen=True)
class _Target:
    """Where a model goes, what it may take there, what is asked of it, and who gets its progress."""

    device: torch.device
    world: World
    limits: MemoryLimits
    progress: Progress | None
    drafting: Drafting = AUTO_DRAFTING
    load: Workload = Workload()  # noqa: RUF009 - frozen
    as_stored: bool = False

    def room(self) -> FreeMemory:
        """What there is, as the ranks find it together: the same on each, so that all decide the same."""
        on_gpu = self.device.type == "cuda"
        found = [free_memory(self.device) if on_gpu else None, free_memory(torch.device("cpu"))]
        gpu, host = self.world.least(found)
        # Triton's interpreter, which tests use on a CPU, reads storage formats
        as_stored = self.as_stored or chosen() == "triton"
        return FreeMemory(gpu, host, self.world.ranks_here, self.limits, as_stored)


def _load_folder(source: FolderSource, numerics: Numerics, target: _Target) -> Transformer:
    identity = source.identity
    check_coverage(identity.checkpoint, identity.stored_table).raise_if_incomplete()
    config, table, placement = _placed(identity.config, identity.formats, target)
    # some layouts have plain tensors in another width
    specs = {name: identity.specs[name] for name in table}
    supply = stored(identity.checkpoint, specs.values(), target.world, naming=identity.naming)
    model = _filled(config, numerics, specs, supply, placement, target)
    for name, spec in table.items():
        if spec.dtype == "F32" and specs[name].dtype == "BF16":
            # earlier versions of transformers saved so what the products take in fp32
            parameter = model.get_parameter(spec.parameter)
            parameter.data = parameter.data.float()
    return model


def _placed(
    config: ModelConfig, formats: Formats, target: _Target
) -> tuple[ModelConfig, dict[str, TensorSpec], Placement]:
    """The model and its table, without the drafter where the plan leaves it out, and where its weights lie."""
    specs = loaded_tensors(config, formats)
    sizes = measure(specs.values(), config.num_experts_per_tok, target.world.size)
    # rank 0 knows what is asked
    load, on_gpu = target.world.broadcast_object(target.load), target.device.type == "cuda"
    ranks, divides = target.world.size, target.world.divides_from is not None
    triton = chosen() != "torch"
    beside = reserves(config, formats, load, ranks, on_gpu=on_gpu, triton=triton, divides=divides)
    placement = decide(sizes, target.room(), beside, target.drafting)
    if placement.drafter or config.drafter == "none":
        return config, specs, placement
    config = config.without_drafter()
    return config, loaded_tensors(config, formats), placement


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
