"""Models that many programs of a test process ask for: loaded once, and each of their weights decoded once."""

from functools import cache
from typing import Any

import pytest
import torch

from dsv4cli.engine.checkpoint.names import IN_PACKAGE
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.weights import load
from dsv4cli.engine.weights.placement import MemoryLimits
from dsv4cli.kernels.block_scale import ref as block_scale

MOST_BYTES = 32 << 20
load_anew, decode = load.load_model, block_scale.dequantise


class SharedModels:
    """Small random models and the built-in ones; they live as long as the process."""

    def __init__(self) -> None:
        self._models: dict[tuple[Any, ...], Transformer] = {}
        self._places: set[int] = set()  # where their weights lie
        self._values: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def load(
        self,
        source: FolderSource | RandomSource,
        numerics: Numerics,
        *,
        device: torch.device | str = "cpu",
        world: World = SINGLE,
        limits: MemoryLimits | None = None,
        drafting: Drafting = AUTO_DRAFTING,
        **others: Any,
    ) -> Transformer:
        """As `load_model`."""
        options: dict[str, Any] = {"device": device, "world": world, "limits": limits, "drafting": drafting, **others}
        shared = isinstance(source, RandomSource) or source.name in IN_PACKAGE
        if not shared or world is not SINGLE or torch.device(device).type != "cpu":
            return load_anew(source, numerics, **options)
        key = source, numerics, limits, drafting
        if key in self._models:
            return self._models[key]
        model = load_anew(source, numerics, **options)
        if sum(parameter.nbytes for parameter in model.parameters()) <= MOST_BYTES:
            self._models[key] = model
            self._places.update(parameter.untyped_storage().data_ptr() for parameter in model.parameters())
        return model

    def dequantise(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """As that of block_scale."""
        key = weight.data_ptr(), weight.shape
        if key in self._values:
            return self._values[key]
        values = decode(weight, scale)
        if weight.untyped_storage().data_ptr() in self._places:
            self._values[key] = values
        return values


@cache
def _shared() -> SharedModels:
    return SharedModels()


def shared_model(name: str) -> Transformer:
    """The model of this name, which nobody changes, in the reference's numerics."""
    return _shared().load(resolve_model(name), Numerics.reference())


def share_models(patch: pytest.MonkeyPatch) -> None:
    """Programs take the models of this process."""
    patch.setattr(load, "load_model", _shared().load)


def load_models_anew(patch: pytest.MonkeyPatch) -> None:
    """Each program loads its own again."""
    patch.setattr(load, "load_model", load_anew)


def decode_once() -> None:
    """Weights of shared models are decoded once, for the rest of the process."""
    block_scale.dequantise = _shared().dequantise
