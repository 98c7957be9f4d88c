"""From a source of a model to a model ready to run."""

import torch

from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.coverage import check_coverage
from dsv4cli.engine.layout import Formats, TensorSpec, expected_tensors
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import SINGLE, World
from dsv4cli.engine.random_weights import random_tensors
from dsv4cli.engine.reading import stored
from dsv4cli.engine.source import FolderSource, RandomSource
from dsv4cli.engine.weights import Progress, Supply, fill, local_slice, made
from dsv4cli.errors import NotEnoughMemory


def load_model(
    source: FolderSource | RandomSource,
    numerics: Numerics,
    *,
    device: torch.device | str = "cpu",
    world: World = SINGLE,
    progress: Progress | None = None,
) -> Transformer:
    """The model of a source on a device. progress is called as weights arrive, with bytes done and in all.

    Raises UnsupportedCheckpoint for what the engine does not run, CheckpointError for a checkpoint that does not match
    the table tensor by tensor, NotEnoughMemory when the weights do not fit on the device.
    """
    # the fp32 products of the reference are fp32
    torch.set_float32_matmul_precision("highest")
    try:
        if isinstance(source, RandomSource):
            return build_random(
                source.config, numerics, seed=source.seed, device=device, world=world, progress=progress
            )
        return _load_folder(source, numerics, device, world, progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotEnoughMemory(
            f"the weights do not fit on {device}: {error}", "use a machine with more memory"
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
) -> Transformer:
    """A model of random weights in the given formats; with `bf16` or `f32` throughout, one that can be trained."""
    specs = expected_tensors(config, formats)
    whole = random_tensors(specs.values(), seed, config.n_routed_experts, device)
    tensors = ((spec, tensor[local_slice(spec, world)]) for spec, tensor in whole)
    return _filled(config, numerics, specs, made(tensors), device, world, progress)


def _load_folder(
    source: FolderSource, numerics: Numerics, device: torch.device | str, world: World, progress: Progress | None
) -> Transformer:
    identity = source.identity
    specs = expected_tensors(identity.config, identity.formats)
    check_coverage(identity.checkpoint, specs).raise_if_incomplete()
    supply = stored(identity.checkpoint, specs.values(), world)
    return _filled(identity.config, numerics, specs, supply, device, world, progress)


def _filled(
    config: ModelConfig,
    numerics: Numerics,
    specs: dict[str, TensorSpec],
    supply: Supply,
    device: torch.device | str,
    world: World,
    progress: Progress | None,
) -> Transformer:
    model = Transformer(config, numerics, world)
    fill(model, specs, supply, device=device, world=world, progress=progress)
    return model.eval()
