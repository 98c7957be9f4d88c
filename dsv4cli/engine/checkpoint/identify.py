"""Identification of the model in a folder by its configuration and headers, and refusal of foreign ones; no torch."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.census import alias_notes, dtype_aliases, stored_formats
from dsv4cli.engine.checkpoint.foreign import (
    CONVERT,
    FOREIGN_TENSORS,
    GGUF,
    MLX,
    OTHER_MODELS,
    QUANTIZERS,
    Foreign,
    refusal,
)
from dsv4cli.engine.checkpoint.headers import UNFINISHED, Checkpoint, open_checkpoint, scan_checkpoint
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.naming import (
    SAVED_SIGN,
    CompressedNaming,
    MpNaming,
    NamedTensors,
    Naming,
    OfficialNaming,
    SavedNaming,
    TransformersNaming,
    stored_table,
)
from dsv4cli.engine.config.checks import check_blocks
from dsv4cli.engine.config.dialects import names_drafter
from dsv4cli.engine.config.formats import FormatName
from dsv4cli.engine.config.keys import MODEL_TYPE
from dsv4cli.engine.config.model_config import Drafter, ModelConfig
from dsv4cli.engine.config.presets import ASSUMED_RELEASE, PRESETS, Release
from dsv4cli.engine.config.read import parse_config, read_config, read_json
from dsv4cli.engine.config.storage import Formats, contradictions
from dsv4cli.errors import CheckpointError

# tensors that identify the drafter
DRAFTER_SIGNS: dict[str, Drafter] = {"mtp.0.e_proj.weight": "mtp", "mtp.0.main_proj.weight": "dspark"}
MIXED = "mixed-precision"
# formats of compressed-tensors that are supported; in the last one, each group has its own format
COMPRESSED_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", MIXED)
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
    """The identity of a model. size: the preset with the same dimensions, or 'custom'."""

    size: str
    config: ModelConfig
    formats: Formats

    @property
    def release(self) -> Release:
        """The release whose prompt format is used: the model's, or the assumed one if the checkpoint states none."""
        return self.config.release or ASSUMED_RELEASE

    @property
    def gguf_types(self) -> Mapping[str, str]:
        """The types of a GGUF file's tensors by their names in it; empty for all other models."""
        return {}


@dataclass(frozen=True)
class FolderIdentity(Identity):
    """The identity of a checkpoint folder, with its headers and tensor naming.

    contradictions: statements of its config.json about storage that its tensors contradict.
    """

    checkpoint: Checkpoint
    naming: Naming
    contradictions: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table of the checkpoint, by official names.

        Weight-only NVFP4 has no input_scale. Unquantized tensors of transformers' files have the dtype stored there.
        """
        specs = expected_tensors(self.config, self.formats)
        if not any(name.endswith((".input_scale", ".input_global_scale")) for name in self.checkpoint.tensors):
            specs = {name: spec for name, spec in specs.items() if spec.role != "input_scale"}
        if isinstance(self.naming, TransformersNaming):
            for name, spec in specs.items():
                found = self.checkpoint.tensors.get(self.naming.locations(spec)[0].name)
                if not spec.columns and found is not None and {found.dtype, spec.dtype} == {"BF16", "F32"}:
                    specs[name] = replace(spec, dtype=found.dtype)
        return specs

    @property
    def stored_table(self) -> Mapping[str, TensorSpec]:
        """The tensor table by stored names. Raises UsageError for per-rank files that cannot split the model."""
        return self.specs if self.naming == OfficialNaming() else stored_table(self.naming, self.specs.values())

    @property
    def aliases(self) -> tuple[str, ...]:
        """Sentences on unusual dtypes with the same bytes as the usual ones, in files with official names."""
        return tuple(alias_notes(self.naming.aliases, self.formats)) if isinstance(self.naming, OfficialNaming) else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what dsv4 can load but may mislead another program."""
        return (*self.contradictions, *self.aliases)

    @property
    def layout(self) -> str:
        """The layout's name: official, bf16, fp8, nvfp4, base, transformers, compressed-tensors, mp4, or mixed."""
        if isinstance(self.naming, MpNaming):
            return f"mp{self.naming.ranks}"
        if isinstance(self.naming, TransformersNaming):
            return "transformers"
        if isinstance(self.naming, CompressedNaming):
            return "compressed-tensors"
        return LAYOUTS.get((self.formats.linear, self.formats.experts), "mixed")


def describe(config: ModelConfig, formats: Formats) -> Identity:
    """Return the identity of a model with a known configuration and formats."""
    return Identity(_size(config), config, formats)


def identify(folder: Path, read: Callable[[Path], Checkpoint] = open_checkpoint) -> FolderIdentity:
    """Open a checkpoint folder that the engine can run and identify its model.

    read: returns the headers that belong to the folder's configuration, local or remote. Raises UnsupportedCheckpoint,
    naming it, for a foreign model or an export that the engine does not run; CheckpointError for a folder that is
    damaged or contradicts itself.
    """
    found = recognise(folder, read)
    check_blocks(found.config, found.formats.linear, found.formats.experts, str(folder))
    return found


def recognise(folder: Path, read: Callable[[Path], Checkpoint] = scan_checkpoint) -> FolderIdentity:
    """Open a checkpoint folder in any known layout; files may be missing and widths unusual.

    read: as in `identify`. Raises as `identify`.
    """
    _refuse_foreign(folder)
    checkpoint = read(folder)
    _refuse_tensors(checkpoint)
    return identity_of(checkpoint, read_config(folder, may_have_drafter(checkpoint)), _root_config(folder))


def identity_of(checkpoint: Checkpoint, config: ModelConfig, given: Mapping[str, Any]) -> FolderIdentity:
    """Return the identity for headers and a configuration that belong together.

    given: content of config.json. Raises what `recognise` raises for them.
    """
    _check_drafter(checkpoint, config)
    formats, naming = stored_formats(checkpoint), _naming(checkpoint, config)
    naming = replace(naming, aliases=dtype_aliases(checkpoint, formats))
    notes = (*contradictions(given, formats), *drafter_notes(checkpoint, given))
    return FolderIdentity(_size(config), config, formats, checkpoint, naming, notes)


def _naming(checkpoint: Checkpoint, config: ModelConfig) -> NamedTensors:
    cut = re.match(r"model\d+-mp([1-9]\d{0,3})/", next(iter(checkpoint.tensors), ""), re.ASCII)
    if cut:
        return MpNaming(int(cut[1]), config.n_routed_experts)
    # a part of a checkpoint may have no such name itself
    names = (*checkpoint.tensors, *checkpoint.index)
    if any(map(SAVED_SIGN.match, names)):
        return SavedNaming(config)
    if any(name.startswith("model.") for name in names):
        return TransformersNaming(config)
    if any(name.endswith(".weight_packed") for name in checkpoint.tensors):
        return compressed_naming(checkpoint)
    return OfficialNaming()


def compressed_naming(checkpoint: Checkpoint) -> CompressedNaming:
    """Return the compressed-tensors naming with the scale shape and dtype of most scales."""
    shapes, dtypes = Counter[tuple[int, ...]](), Counter[str]()
    for name, info in checkpoint.tensors.items():
        if name.endswith(".weight_global_scale"):
            shapes[info.shape] += 1
        elif name.endswith(".weight_scale"):
            dtypes[info.dtype] += 1
    whole = (1,) if shapes[(1,)] > shapes[()] else ()
    return CompressedNaming(whole, "F8_E8M0" if dtypes["F8_E8M0"] > dtypes["U8"] else "U8")


def _refuse_foreign(folder: Path) -> None:
    """Refuse other models and other tools' exports by file names and the root config.json."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise refusal(folder, GGUF, "by its name")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", "use the folder that contains config.json and the weights")
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
    kind = values.get("model_type", MODEL_TYPE)
    if kind != MODEL_TYPE:
        what = OTHER_MODELS.get(kind, "another model") if isinstance(kind, str) else "another model"
        remedy = "run it with vLLM or SGLang, or use a DeepSeek-V4 checkpoint"
        raise refusal(folder, Foreign(what, remedy), f"model_type {kind!r}")
    _refuse_quantizer(folder, values)


def _refuse_quantizer(folder: Path, values: Mapping[str, Any]) -> None:
    """Refuse exports of quantization tools by the root config.json."""
    own = values.get("quantization")
    if isinstance(own, Mapping) and "bits" in own:
        raise refusal(folder, MLX, f"quantization.bits {own['bits']!r}"[:80])
    quantization = _quantization(values)
    for key, value in quantization.items():
        if isinstance(value, str) and value in QUANTIZERS:
            raise refusal(folder, QUANTIZERS[value], f"quantization_config.{key} {value!r}")
    given = quantization.get("format")
    if quantization.get("quant_method") == "compressed-tensors" and given not in COMPRESSED_FORMATS:
        sign = f"quantization_config.format {given!r}"[:80]
        raise refusal(
            folder, Foreign("a compressed-tensors export in a format other than NVFP4 and MXFP4", CONVERT), sign
        )


def _root_config(folder: Path) -> dict[str, Any]:
    """Return the root config.json, {} if it cannot be read; `read_config` validates it."""
    try:
        return read_json(folder / "config.json")
    except CheckpointError:
        return {}


def _quantization(values: Mapping[str, Any]) -> Mapping[str, Any]:
    quantization = values.get("quantization_config")
    return quantization if isinstance(quantization, Mapping) else {}


def _refuse_tensors(checkpoint: Checkpoint) -> None:
    every = re.compile("|".join(f"({pattern})" for pattern in FOREIGN_TENSORS), re.MULTILINE)
    if not every.search("\n".join(checkpoint.tensors)):
        return  # usually: one search over 70,000 names
    names = [name for name in checkpoint.tensors if every.search(name)]
    for pattern, foreign in FOREIGN_TENSORS.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found:
            raise refusal(checkpoint.folder, foreign, found)


def may_have_drafter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has tensors of a drafter, or lacks files that may hold some."""
    if checkpoint.missing_files and not checkpoint.index:
        return True
    return any("mtp." in name for name in (*checkpoint.tensors, *checkpoint.index))


def drafter_notes(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if config.json, whose values are `given`, describes a drafter that is not stored."""
    if names_drafter(given) and not may_have_drafter(checkpoint):
        yield "config.json describes a drafter, and no tensor is named mtp.*"


def _check_drafter(checkpoint: Checkpoint, config: ModelConfig) -> None:
    names = {name.rpartition("/")[2] for name in (*checkpoint.tensors, *checkpoint.index)}
    found: list[Drafter] = [drafter for sign, drafter in DRAFTER_SIGNS.items() if sign in names]
    for drafter in found:
        if drafter != config.drafter:
            raise CheckpointError(
                f"{checkpoint.folder}: drafter is {drafter} by its tensors and {config.drafter} by its config.json",
                "download config.json and the weights from one revision",
            )


def _size(config: ModelConfig) -> str:
    for name, values in PRESETS.items():
        preset = parse_config(values, name)
        if _dimensions(config) == _dimensions(preset):
            return name
    return "custom"


def _dimensions(config: ModelConfig) -> list[object]:
    names = {field.name for field in fields(config)} - {"compress_ratios", "dspark", "release"}
    return [config.layer_ratios, *(getattr(config, name) for name in sorted(names))]
