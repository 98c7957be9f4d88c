"""The exports of compressed-tensors: packed weights beside their scales, under official names; no numpy.

mxfp4-pack-quantized: FP4 with other names. nvfp4-pack-quantized: NVFP4 whose global scale is 1 / weight_scale_2.
pack-quantized: integers of 4 or 8 bits with scales of groups (W4A16, W8A16). float-quantized: e4m3 with scales of
blocks, channels or the tensor. The last two are seen as their values in fp32. Source: compressed-tensors 0.20.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.foreign import OFFICIAL
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo, scan_checkpoint
from dsv4cli.engine.checkpoint.identify import FolderIdentity, describe
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.config.model_config import parse_config, read_json
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

CONFIG, METHOD = "config.json", "compressed-tensors"
PACKED, SCALE = "weight_packed", "weight_scale"
# of a matrix that an export has left as the release has it
OFFICIAL_SCALE = "scale"
# role in the table -> last part of the name, dtype in a header where it is another
FP4_PARTS: Mapping[Role, tuple[str, str]] = {"weight": (PACKED, "U8"), "scale": (SCALE, "U8")}
NVFP4_PARTS: Mapping[Role, tuple[str, str]] = {
    "weight": (PACKED, "U8"),
    "weight_scale": (SCALE, "F8_E4M3"),
    "weight_scale_2": ("weight_global_scale", "F32"),
    "input_scale": ("input_global_scale", "F32"),
}
# numbers that are stored as 1 / the table's
INVERTED: tuple[Role, ...] = ("weight_scale_2", "input_scale")
# what stands beside packed integers and e4m3
COMPANIONS = (SCALE, "weight_shape", "weight_zero_point")
REORDERED = "weight_g_idx"
# the engine runs these: see CompressedNaming
PACKED_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
VIEWS = {
    "mxfp4": Formats("f32", "fp4", "bf16"),
    "nvfp4": Formats("f32", "nvfp4", "bf16"),
    "fp8": Formats("fp8", "fp8", "bf16"),
    "bf16": Formats("bf16", "bf16", "bf16"),
    "values": Formats("f32", "f32", "f32"),
}


@dataclass(frozen=True)
class PackedNaming:
    """The names of compressed-tensors. found: the tensors of a checkpoint, none of one that is to be written."""

    found: Mapping[str, TensorInfo] = field(default_factory=dict)

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """The stored tensor, of packed integers and e4m3 with what stands beside it."""
        own = (Location(spec.name, spec.dtype, spec.shape),)
        if not spec.columns or f"{spec.matrix}.{OFFICIAL_SCALE}" in self.found:
            return own
        parts = FP4_PARTS if spec.dtype == "I8" or spec.role == "scale" else NVFP4_PARTS
        if spec.is_scale or spec.dtype in ("I8", "U8"):
            last, dtype = parts[spec.role]
            name = f"{spec.matrix}.{last}"
            # one number is stored as [] or [1]
            scalar = self.found[name].shape if name in self.found else (1,)
            shape = spec.shape or (scalar if prod(scalar) == 1 else (1,))
            return (Location(name, dtype, shape, reciprocal=spec.role in INVERTED),)
        names = [f"{spec.matrix}.{last}" for last in (PACKED, *COMPANIONS)]
        there = [self.found[name] for name in names if name in self.found]
        if names[0] in self.found and names[1] not in self.found:
            return (_as_found(self.found[names[0]]), Location(names[1], "BF16", (spec.shape[0], 1)))
        if there and there[0].name == names[1]:
            there = [self.found.get(spec.name, there[0]), *there]
        return tuple(map(_as_found, there)) or own


def _as_found(info: TensorInfo) -> Location:
    return Location(info.name, info.dtype, info.shape)


@dataclass(frozen=True)
class PackedIdentity(FolderIdentity):
    """What a folder of compressed-tensors holds."""

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The table of the model, by official names: FP4 and NVFP4 as they are, integers and e4m3 as fp32."""
        tables = {kind: matrices(expected_tensors(self.config, view).values()) for kind, view in VIEWS.items()}
        stored, found = self.checkpoint.tensors, dict[str, TensorSpec]()
        for name, roles in tables["bf16"].items():
            kind = _kind(stored, name, roles["weight"])
            seen = tables[kind].get(name, roles)
            if f"{name}.input_global_scale" not in stored:
                # an export without quantised activations has no scale for them
                seen = {role: spec for role, spec in seen.items() if role != "input_scale"}
            found |= {spec.name: spec for spec in seen.values()}
        return found

    @property
    def layout(self) -> str:
        """compressed-tensors."""
        return METHOD


def _kind(stored: Mapping[str, TensorInfo], matrix: str, weight: TensorSpec) -> str:
    """How a matrix or plain tensor is seen."""
    packed = stored.get(f"{matrix}.{PACKED}") if weight.columns else None
    if packed is not None:
        if packed.dtype != "U8":
            return "values"
        return "nvfp4" if f"{matrix}.weight_global_scale" in stored else "mxfp4"
    plain = stored.get(weight.name)
    if plain is not None and f"{matrix}.{OFFICIAL_SCALE}" in stored:
        return "fp8" if plain.dtype == "F8_E4M3" else "mxfp4"
    return "bf16" if plain is None or plain.dtype == "BF16" else "values"


def is_packed(folder: Path) -> bool:
    """Whether a folder's config.json says that it is an export of compressed-tensors in other formats than the engine
    runs."""
    quantization = _values(folder).get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != METHOD:
        return False
    return quantization.get("format") not in PACKED_FORMATS


def recognise_packed(folder: Path) -> PackedIdentity:
    """What a folder of compressed-tensors holds, of which files may be missing.

    Raises UnsupportedCheckpoint for other names than the official ones and for weights in another order, else as
    `recognise` does.
    """
    return packed_identity(scan_checkpoint(folder), _values(folder), str(folder / CONFIG))


def packed_identity(checkpoint: Checkpoint, values: Mapping[str, Any], where: str) -> PackedIdentity:
    """What headers and a configuration that belong together are. values: of config.json, which `where` names in errors.
    Raises what `recognise_packed` raises of the two."""
    names = checkpoint.tensors.keys() | checkpoint.index.keys()
    odd = next((name for name in sorted(names) if name.startswith("model.") or name.endswith(REORDERED)), None)
    if odd:
        what = "transformers' names" if odd.startswith("model.") else "weights in another order than their scales"
        raise UnsupportedCheckpoint(
            f"{checkpoint.folder} is a compressed-tensors export with {what} ({odd}), which is not read",
            OFFICIAL,
        )
    if names and not any(name.endswith((f".{PACKED}", f".{SCALE}")) for name in names):
        form = values["quantization_config"].get("format")
        raise UnsupportedCheckpoint(
            f"{where} is that of a compressed-tensors export in another format than NVFP4 or MXFP4 "
            f"(quantization_config.format {form!r}"[:400]
            + f"), and no tensor has a {PACKED} or {SCALE}",
            OFFICIAL,
        )
    model = {key: value for key, value in values.items() if key != "quantization_config"}
    config = parse_config(model, where, any("mtp." in name for name in names))
    identity = describe(config, _formats(checkpoint))
    return PackedIdentity(identity.size, config, identity.formats, checkpoint, PackedNaming(checkpoint.tensors))


def _values(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except CheckpointError:
        return {}


def _formats(checkpoint: Checkpoint) -> Formats:
    """How most matrices are seen, by the first of each kind."""
    stored = checkpoint.tensors
    expert = next((name for name in stored if ".ffn.experts." in name and name.endswith(PACKED)), "")
    kind = "values"
    if expert and stored[expert].dtype == "U8":
        kind = "nvfp4" if expert.replace(PACKED, "weight_global_scale") in stored else "mxfp4"
    plain = next((info for name, info in stored.items() if name.endswith(".attn.wq_a.weight")), None)
    linear = {"BF16": "bf16", "F8_E4M3": "fp8"}.get(plain.dtype, "values") if plain else "values"
    return Formats(VIEWS[linear].linear, VIEWS[kind].experts, "bf16")
