"""Selects layers to keep, and maps the smaller model's tensor names to the whole model's. No torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.model_config import DSparkConfig, ModelConfig
from dsv4cli.errors import UsageError

LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerSelection:
    """The main layers to keep (None for all), and whether to keep the drafter."""

    layers: range | None = None
    drafter: bool = True

    @property
    def first(self) -> int:
        """The layer of the whole model that becomes the first."""
        return 0 if self.layers is None else self.layers.start


def parse_layers(text: str) -> range:
    """Parse `0-3` (inclusive) or `7`. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise UsageError(
            f"--layers {text!r} names no layers", "give FIRST-LAST, both included, as in 0-3, or one number"
        )
    return range(first, last + 1)


def select(config: ModelConfig, selection: LayerSelection) -> tuple[ModelConfig, Callable[[str], str]]:
    """Return the model of the selected layers, numbered from 0, and a map from its tensor names to the whole model's.

    Draft stages are kept or removed as a whole. Raises UsageError for layers that the model does not have, and for a
    cut
    that removes a layer whose output the DSpark drafter reads.
    """
    kept = config if selection.drafter else config.without_drafter()
    layers = selection.layers
    if layers is None:
        return kept, str
    count = config.num_hidden_layers
    if layers.stop > count:
        raise UsageError(f"--layers {_text(layers)}: the model has {count} layers", f"choose from 0-{count - 1}")
    chosen = replace(
        kept,
        num_hidden_layers=len(layers),
        # the hash layers come first
        num_hash_layers=max(min(config.num_hash_layers, layers.stop) - layers.start, 0),
        compress_ratios=config.layer_ratios[layers.start : layers.stop] + kept.compress_ratios[count:],
        dspark=kept.dspark and _moved(kept.dspark, layers),
    )
    return chosen, renumbered(layers.start)


def renumbered(first: int) -> Callable[[str], str]:
    """Return a map from tensor names of a cut whose first layer was `first` to those of the whole model."""
    return lambda name: LAYER.sub(lambda match: f"layers.{int(match[1]) + first}.", name)


def stored_part(model: FolderIdentity) -> str:
    """Return the options that select the layers that a folder with missing files holds completely.

    Empty if no file is missing, or too much is.
    """
    checkpoint, config = model.checkpoint, model.config
    lacking = {
        spec.name.split(".")[0] if not (match := LAYER.match(spec.name)) else int(match[1])
        for spec in expected_tensors(config, model.formats).values()
        if not all(location.name in checkpoint.tensors for location in model.naming.locations(spec))
    }
    here = [layer for layer in range(config.num_hidden_layers) if layer not in lacking]
    outside = {name for name in lacking if isinstance(name, str)} - {"mtp"}
    if not checkpoint.missing_files or not lacking or outside or not here:
        return ""
    last = next(layer for layer in here if layer + 1 not in here)
    options = f"--layers {here[0]}-{last}"
    lost = config.dspark and not {*config.dspark.target_layer_ids} <= {*range(here[0], last + 1)}
    return options + (" --no-mtp" if lost or "mtp" in lacking else "")


def _moved(dspark: DSparkConfig, layers: range) -> DSparkConfig:
    lost = [layer for layer in dspark.target_layer_ids if layer not in layers]
    if lost:
        raise UsageError(
            f"--layers {_text(layers)} removes layer {lost[0]}, whose output the DSpark drafter reads",
            "leave the drafter out with --no-mtp, or keep layers " + ", ".join(map(str, dspark.target_layer_ids)),
        )
    return replace(dspark, target_layer_ids=tuple(layer - layers.start for layer in dspark.target_layer_ids))


def _text(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start)
