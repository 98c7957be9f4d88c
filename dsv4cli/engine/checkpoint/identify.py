"""Which model a folder holds, from its configuration and headers, and what it is not: refusals by name; no torch."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.foreign import FOREIGN_TENSORS, GGUF, OTHER_MODELS, Foreign
from dsv4cli.engine.checkpoint.headers import UNFINISHED, Checkpoint, open_checkpoint, scan_checkpoint
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.naming import (
    SAVED_SIGN,
    MpNaming,
    Naming,
    OfficialNaming,
    SavedNaming,
    TransformersNaming,
    stored_table,
)
from dsv4cli.engine.config.checks import check_blocks
from dsv4cli.engine.config.formats import STORAGE, FormatName
from dsv4cli.engine.config.model_config import (
    Drafter,
    ModelConfig,
    parse_config,
    read_config,
    read_json,
)
from dsv4cli.engine.config.presets import PRESETS, Release
from dsv4cli.engine.config.storage import Formats, contradictions
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint
from dsv4cli.harmless import shell_word

# the tensor that tells a drafter
DRAFTER_SIGNS: dict[str, Drafter] = {"mtp.0.e_proj.weight": "mtp", "mtp.0.main_proj.weight": "dspark"}
# patterns of the weights that tell a storage format, one for each field of Formats
FORMAT_SIGNS = {
    "linear": r"\.attn\.(wq_a|wq_b|wkv|wo_b)\.weight$|\.self_attn\.(q_a|q_b|kv|o_b)_proj\.weight$",
    "experts": r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.weight$|\.mlp\.experts\.(gate_up|down)_proj$",
    "dense": r"norm\.weight$",
    "wo_a": r"\.attn\.wo_a\.weight$|\.self_attn\.o_a_proj\.weight$",
    "draft_experts": r"mtp\.\d+\.ffn\.experts\.\d+\.w[123]\.weight$",
}
ALLOWED_FORMATS = {"experts": tuple(STORAGE), "draft_experts": tuple(STORAGE), "dense": ("bf16", "f32")}
ALLOWED_FORMATS |= {"wo_a": ("fp8", "fp8_f32", "bf16", "f32")}
MATRIX_FORMATS: tuple[FormatName, ...] = ("fp8", "fp8_f32", "nvfp4", "bf16", "f32")
# linear and experts -> a word for the layout
LAYOUTS: Mapping[tuple[FormatName, FormatName], str] = {
    ("fp8", "fp4"): "official",
    ("fp8", "fp8"): "fp8",
    ("fp8", "nvfp4"): "nvfp4",
    ("fp8_f32", "fp8_f32"): "base",
    ("bf16", "bf16"): "bf16",
}


@dataclass(frozen=True)
class Identity:
    """What a model is. `size`: the preset of the same dimensions, or 'custom'."""

    size: str
    config: ModelConfig
    formats: Formats

    @property
    def release(self) -> Release:
        """Which prompt format the model was trained with, as its drafter tells: MTP came in April, DSpark with 0731."""
        return "0731" if self.config.drafter == "dspark" else "v4"


@dataclass(frozen=True)
class FolderIdentity(Identity):
    """What a folder holds, with its headers and the way its tensors are named. contradictions: what its config.json
    says of the storage that the tensors do not bear out."""

    checkpoint: Checkpoint
    naming: Naming
    contradictions: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The table of the checkpoint, by official names. NVFP4 for weights alone has no input_scale. What transformers
        has saved has each plain tensor in the width that it has there: its bf16 models keep the norms in fp32, its
        earlier versions made bf16 of what the releases have in fp32."""
        specs = expected_tensors(self.config, self.formats)
        if not any(name.endswith(".input_scale") for name in self.checkpoint.tensors):
            specs = {name: spec for name, spec in specs.items() if spec.role != "input_scale"}
        if isinstance(self.naming, TransformersNaming):
            for name, spec in specs.items():
                found = self.checkpoint.tensors.get(self.naming.locations(spec)[0].name)
                if not spec.columns and found is not None and {found.dtype, spec.dtype} == {"BF16", "F32"}:
                    specs[name] = replace(spec, dtype=found.dtype)
        return specs

    @property
    def stored_table(self) -> Mapping[str, TensorSpec]:
        """The table by the names under which the files have the tensors. Raises UsageError for files for ranks that the
        model cannot be cut for."""
        return self.specs if self.naming == OfficialNaming() else stored_table(self.naming, self.specs.values())

    @property
    def layout(self) -> str:
        """The layout in a word: official, bf16, fp8, nvfp4, base, transformers, mp4, or mixed."""
        if isinstance(self.naming, MpNaming):
            return f"mp{self.naming.ranks}"
        if isinstance(self.naming, TransformersNaming):
            return "transformers"
        return LAYOUTS.get((self.formats.linear, self.formats.experts), "mixed")


def describe(config: ModelConfig, formats: Formats) -> Identity:
    """The identity of a model whose configuration and formats are known."""
    return Identity(_size(config), config, formats)


def identify(folder: Path, read: Callable[[Path], Checkpoint] = open_checkpoint) -> FolderIdentity:
    """Opens a checkpoint folder that the engine runs and tells what it holds.

    read: gives the headers that belong to the folder's configuration, wherever they are. Raises UnsupportedCheckpoint,
    naming what it is, for a foreign model or an export that the engine does not run, before any complaint about details
    that follow from it; CheckpointError for a folder that is damaged or contradicts itself.
    """
    found = recognise(folder, read)
    check_blocks(found.config, found.formats.linear, found.formats.experts, str(folder))
    return found


def recognise(folder: Path, read: Callable[[Path], Checkpoint] = scan_checkpoint) -> FolderIdentity:
    """Opens a checkpoint folder in any known layout, of which files may be missing and widths odd.

    read: as for `identify`. Raises as `identify` does.
    """
    _refuse_foreign(folder)
    checkpoint = read(folder)
    _refuse_tensors(checkpoint)
    return identity_of(checkpoint, read_config(folder, _has_drafter(checkpoint)), _root_config(folder))


def identity_of(checkpoint: Checkpoint, config: ModelConfig, given: Mapping[str, Any]) -> FolderIdentity:
    """What headers and a configuration that belong together are; given: what config.json says. Raises what `recognise`
    raises of the two."""
    _check_drafter(checkpoint, config)
    formats, naming = _formats(checkpoint), _naming(checkpoint, config)
    notes = tuple(contradictions(given, formats))
    return FolderIdentity(_size(config), config, formats, checkpoint, naming, notes)


def _naming(checkpoint: Checkpoint, config: ModelConfig) -> Naming:
    cut = re.match(r"model\d+-mp([1-9]\d{0,3})/", next(iter(checkpoint.tensors), ""), re.ASCII)
    if cut:
        return MpNaming(int(cut[1]), config.n_routed_experts)
    # a part of a checkpoint may have no such name itself
    names = (*checkpoint.tensors, *checkpoint.index)
    if any(map(SAVED_SIGN.match, names)):
        return SavedNaming(config)
    if any(name.startswith("model.") for name in names):
        return TransformersNaming(config)
    return OfficialNaming()


def refusal(folder: Path, foreign: Foreign, sign: str) -> UnsupportedCheckpoint:
    """The refusal of what a folder holds by its name. sign: what tells it."""
    remedy = foreign.remedy.format(folder=shell_word(folder))
    return UnsupportedCheckpoint(f"{folder} is {foreign.what} ({sign}), which this engine does not run", remedy)


def _refuse_foreign(folder: Path) -> None:
    """Refuses other models and other tools' exports by file names and the root config.json."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", "name the folder that holds config.json and the weights")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}", "check its permissions") from None
    if UNFINISHED in names:
        remedy = "run the same `dsv4 convert` again, or --finish where the parts of a shared job are done"
        raise CheckpointError(f"{folder} is the output of an unfinished conversion", remedy)
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf and not any(name.endswith(".safetensors") for name in names):
        raise refusal(folder, GGUF, gguf[0])
    values = _root_config(folder)
    kind = values.get("model_type", "deepseek_v4")
    if kind != "deepseek_v4":
        what = OTHER_MODELS.get(kind, "another model") if isinstance(kind, str) else "another model"
        remedy = "run it with vLLM or SGLang, or name a DeepSeek-V4 checkpoint"
        raise refusal(folder, Foreign(what, remedy), f"model_type {kind!r}")
    named = {"compressed-tensors": "a compressed-tensors export", "quark": "a Quark export"}
    for key, value in _quantization(values).items():
        if str(value) in named:
            raise refusal(folder, Foreign(named[str(value)]), f"quantization_config.{key} {value!r}"[:80])


def _root_config(folder: Path) -> dict[str, Any]:
    """The root config.json, if it can be read; whether it is correct is read_config's question."""
    try:
        return read_json(folder / "config.json")
    except CheckpointError:
        return {}


def _quantization(values: Mapping[str, Any]) -> Mapping[str, Any]:
    quantization = values.get("quantization_config")
    return quantization if isinstance(quantization, Mapping) else {}


def _refuse_tensors(checkpoint: Checkpoint) -> None:
    every = re.compile("|".join(f"({pattern})" for pattern in FOREIGN_TENSORS))
    names = [name for name in checkpoint.tensors if every.search(name)]
    for pattern, foreign in FOREIGN_TENSORS.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found:
            raise refusal(checkpoint.folder, foreign, found)


def _has_drafter(checkpoint: Checkpoint) -> bool:
    return any("mtp." in name for name in (*checkpoint.tensors, *checkpoint.index))


def _check_drafter(checkpoint: Checkpoint, config: ModelConfig) -> None:
    names = {name.rpartition("/")[2] for name in (*checkpoint.tensors, *checkpoint.index)}
    found: list[Drafter] = [drafter for sign, drafter in DRAFTER_SIGNS.items() if sign in names]
    if not _has_drafter(checkpoint):
        # the other files may have it
        found = [] if checkpoint.missing_files else ["none"]
    for drafter in found:
        if drafter != config.drafter:
            raise CheckpointError(
                f"{checkpoint.folder}: drafter is {drafter} by its tensors and {config.drafter} by its config.json",
                "download config.json and the weights from one revision",
            )


def _formats(checkpoint: Checkpoint) -> Formats:
    """The storage format of most weights of each kind; the others count as mistyped (see coverage)."""
    found: dict[str, Any] = {}
    for field, pattern in FORMAT_SIGNS.items():
        sign = re.compile(pattern)
        weights = [name for name in checkpoint.tensors if sign.search(name)]
        if weights:
            found[field] = _format(checkpoint, field, weights)
    for field, usual in (("wo_a", "linear"), ("draft_experts", "experts")):
        if found.get(field) == found.get(usual):
            found.pop(field, None)
    return Formats(**found)


def _format(checkpoint: Checkpoint, field: str, weights: list[str]) -> FormatName:
    """The storage format of most of these weights: by their dtype and, where several have it, that of their scales."""
    dtype = Counter(checkpoint.tensors[name].dtype for name in weights).most_common(1)[0][0]
    allowed = ALLOWED_FORMATS.get(field, MATRIX_FORMATS)
    forms = [form for form in allowed if STORAGE[form].dtype == ("I8" if dtype == "F4" else dtype)]
    if not forms:
        known = ", ".join(STORAGE[form].words for form in allowed)
        what = f"a checkpoint whose {field} weights are stored as {dtype}"
        raise refusal(checkpoint.folder, Foreign(what), f"known are {known}")
    if len(forms) == 1:
        return forms[0]
    scales = (checkpoint.tensors.get(name.removesuffix("weight") + "scale") for name in weights)
    census = Counter(info.dtype for info in scales if info is not None)
    if not census:
        return forms[0]
    scale = census.most_common(1)[0][0]
    fitting = [form for form in forms if STORAGE[form].scale("scale").dtype == scale]
    if not fitting:
        what = f"a checkpoint whose {field} weights are {dtype} with block scales stored as {scale}"
        known = " or ".join(STORAGE[form].scale("scale").dtype for form in forms)
        raise refusal(checkpoint.folder, Foreign(what), f"known are {known}")
    return fitting[0]


def _size(config: ModelConfig) -> str:
    for name, values in PRESETS.items():
        preset = parse_config(values, name)
        if _dimensions(config) == _dimensions(preset):
            return name
    return "custom"


def _dimensions(config: ModelConfig) -> list[object]:
    names = {field.name for field in fields(config)} - {"compress_ratios", "dspark"}
    return [config.layer_ratios, *(getattr(config, name) for name in sorted(names))]
