"""Which model a folder holds, from its configuration and headers, and what it is not: refusals by name; no torch."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint import Checkpoint, open_checkpoint
from dsv4cli.engine.config import Drafter, ModelConfig, parse_config, read_config
from dsv4cli.engine.layout import DTYPES, Formats
from dsv4cli.engine.presets import PRESETS
from dsv4cli.engine.prompt import Release
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

OFFICIAL = "use the official checkpoint: `hf download deepseek-ai/DeepSeek-V4-Flash`"
OTHER_MODELS = {
    "deepseek_v41": "DeepSeek-V4.1, another architecture",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v2": "DeepSeek-V2",
}
# what only the weights of a conversion or of a relative have: pattern of a tensor name -> (what it is, next step)
FOREIGN_TENSORS = {
    r"\.kv_(a_proj_with_mqa|b_proj)\.": ("a DeepSeek-V2 or V3 model", "run it with vLLM or SGLang"),
    r"(^|\.)engram|\.bias_vl$": ("a DeepSeek-V4.1 or vision model", "run it with vLLM or SGLang"),
    r"\.weight_packed$": ("a compressed-tensors export", OFFICIAL),
    r"\.weight_scale_2$": ("an NVFP4 export", OFFICIAL),
    r"^model\.(layers|embed_tokens)\.": ("a checkpoint with transformers' tensor names", OFFICIAL),
    r"\.weight_scale(_inv)?$": ("a checkpoint of another quantisation tool", OFFICIAL),
}
# the tensor that tells a drafter
DRAFTER_SIGNS: dict[str, Drafter] = {"mtp.0.e_proj.weight": "mtp", "mtp.0.main_proj.weight": "dspark"}
# patterns of the weights that tell a storage format, one for each field of Formats
FORMAT_SIGNS = {
    "linear": r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$",
    "experts": r"\.ffn\.experts\.\d+\.w[123]\.weight$",
    "dense": r"_norm\.weight$",
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
    """What a folder holds, with its headers."""

    checkpoint: Checkpoint


def describe(config: ModelConfig, formats: Formats) -> Identity:
    """The identity of a model whose configuration and formats are known."""
    return Identity(_size(config), config, formats)


def identify(folder: Path) -> FolderIdentity:
    """Opens a checkpoint folder and tells what it holds.

    Raises UnsupportedCheckpoint, naming what it is, for a relative or an export that the engine does not run, before
    any complaint about details that follow from that; CheckpointError for a folder that is damaged or contradicts
    itself.
    """
    _refuse_files(folder)
    _refuse_config(folder)
    checkpoint = open_checkpoint(folder)
    _refuse_tensors(checkpoint)
    config = read_config(folder)
    _check_drafter(checkpoint, config)
    return FolderIdentity(_size(config), config, _formats(checkpoint), checkpoint)


def _refuse(folder: Path, what: str, sign: str, remedy: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{folder} is {what} ({sign}), which this engine does not run", remedy)


def _refuse_files(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", "name the folder that holds config.json and the weights")
    names = sorted(path.name for path in folder.iterdir())
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf and not any(name.endswith(".safetensors") for name in names):
        raise _refuse(folder, "a GGUF model", gguf[0], "run it with llama.cpp or ds4, or " + OFFICIAL)
    shards = [name for name in names if re.fullmatch(r"model\d+-mp\d+\.safetensors", name)]
    if shards:
        raise _refuse(folder, "a checkpoint cut for one number of GPUs by the official convert.py", shards[0], OFFICIAL)


def _refuse_config(folder: Path) -> None:
    """Refuses by the root config.json, if it can be read; whether it is correct is read_config's question."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    kind = values.get("model_type", "deepseek_v4")
    if kind != "deepseek_v4":
        what = OTHER_MODELS.get(kind, "another model") if isinstance(kind, str) else "another model"
        remedy = "run it with vLLM or SGLang, or name a DeepSeek-V4 checkpoint"
        raise _refuse(folder, what, f"model_type {kind!r}", remedy)
    quantization = values.get("quantization_config")
    for key, value in quantization.items() if isinstance(quantization, Mapping) else ():
        named = {"compressed-tensors": "a compressed-tensors export", "quark": "a Quark export"}
        what = "an NVFP4 export" if "NVFP4" in str(value) else named.get(str(value), "")
        if what:
            raise _refuse(folder, what, f"quantization_config.{key} {value!r}"[:80], OFFICIAL)


def _refuse_tensors(checkpoint: Checkpoint) -> None:
    every = re.compile("|".join(f"({pattern})" for pattern in FOREIGN_TENSORS))
    names = [name for name in checkpoint.tensors if every.search(name)]
    for pattern, (what, remedy) in FOREIGN_TENSORS.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found:
            raise _refuse(checkpoint.folder, what, found, remedy)
    scales = [info for name, info in checkpoint.tensors.items() if name.endswith(".scale")]
    wide = [info.name for info in scales if info.dtype == "F32"]
    if 2 * len(wide) > len(scales):
        experts = [name for name in wide if ".ffn.experts." in name]
        what = "a DeepSeek-V4 Base checkpoint with FP8 experts" if experts else "a checkpoint of another FP8 layout"
        raise _refuse(checkpoint.folder, what, f"F32 block scales: {[*experts, *wide][0]}", OFFICIAL)


def _check_drafter(checkpoint: Checkpoint, config: ModelConfig) -> None:
    has_stages = any(name.startswith("mtp.") for name in checkpoint.tensors)
    found: list[Drafter] = [drafter for sign, drafter in DRAFTER_SIGNS.items() if sign in checkpoint.tensors]
    if not has_stages:
        found = ["none"]
    for drafter in found:
        if drafter != config.drafter:
            raise CheckpointError(
                f"{checkpoint.folder}: drafter is {drafter} by its tensors and {config.drafter} by its config.json",
                "download config.json and the weights from one revision",
            )


def _formats(checkpoint: Checkpoint) -> Formats:
    """The storage format of most weights of each kind; the others count as mistyped (see coverage)."""
    names = {dtype: form for form, dtype in DTYPES.items()}
    found: dict[str, Any] = {}
    for field, pattern in FORMAT_SIGNS.items():
        sign = re.compile(pattern)
        census = Counter(info.dtype for name, info in checkpoint.tensors.items() if sign.search(name))
        if census:
            dtype = census.most_common(1)[0][0]
            allowed = {"linear": ("fp8", "bf16", "f32"), "dense": ("bf16", "f32")}.get(field, tuple(DTYPES))
            if names.get(dtype) not in allowed:
                what = f"a checkpoint whose {field} weights are stored as {dtype}"
                raise _refuse(checkpoint.folder, what, f"known are {', '.join(allowed)}", OFFICIAL)
            found[field] = names[dtype]
    return Formats(**found)


def _size(config: ModelConfig) -> str:
    for name, values in PRESETS.items():
        preset = parse_config(values, name)
        if _dimensions(config) == _dimensions(preset):
            return name
    return "custom"


def _dimensions(config: ModelConfig) -> list[object]:
    names = {field.name for field in fields(config)} - {"compress_ratios", "dspark"}
    return [config.layer_ratios, *(getattr(config, name) for name in sorted(names))]
