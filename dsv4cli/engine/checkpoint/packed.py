"""compressed-tensors exports that the engine does not run, seen under official names; no numpy.

pack-quantized: 4- or 8-bit integers with group scales (W4A16, W8A16). float-quantized: e4m3 with block, channel or
tensor scales. Both are seen as fp32 values. FP4 and NVFP4 matrices in the same export (mixed-precision) are named as
in `CompressedNaming`. Source: compressed-tensors 0.20.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.foreign import OFFICIAL
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo, scan_checkpoint
from dsv4cli.engine.checkpoint.identify import (
    COMPRESSED_FORMATS,
    MIXED,
    FolderIdentity,
    compressed_naming,
    describe,
    drafter_notes,
    may_have_drafter,
)
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import COMPRESSED_NAMES, CompressedNaming, Location
from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.config.read import parse_config, read_json
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

CONFIG, METHOD = "config.json", "compressed-tensors"
PACKED, SCALE = COMPRESSED_NAMES["weight"], COMPRESSED_NAMES["scale"]
# scale name of a matrix that an export left in the release's format
OFFICIAL_SCALE = "scale"
# names of the tensors that accompany packed integers and e4m3 codes
COMPANIONS = (SCALE, "weight_shape", "weight_zero_point")
REORDERED = "weight_g_idx"
# dtypes in a header: two e2m1 codes a byte, which integers are not, and e4m3
CODES, E4M3 = STORAGE["nvfp4"].dtype, STORAGE["fp8"].dtype
VIEWS = {
    "mxfp4": Formats("fp4", "fp4", "bf16"),
    "nvfp4": Formats("nvfp4", "nvfp4", "bf16"),
    "fp8": Formats("fp8", "fp8", "bf16"),
    "bf16": Formats("bf16", "bf16", "bf16"),
    "values": Formats("f32", "f32", "f32"),
}


@dataclass(frozen=True)
class PackedNaming:
    """The names of compressed-tensors exports.

    found: the tensors of a checkpoint. compressed: naming of its FP4 and NVFP4 matrices.
    """

    found: Mapping[str, TensorInfo]
    compressed: CompressedNaming

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the stored tensor; for packed integers and e4m3 also its scale, shape and zero point."""
        own = (Location(spec.name, spec.dtype, spec.shape),)
        if spec.form is None or f"{spec.matrix}.{OFFICIAL_SCALE}" in self.found:
            return own
        if STORAGE[spec.form].codes > 1:
            return self.compressed.locations(spec)
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
    """The identity of a compressed-tensors folder."""

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by official names: FP4 and NVFP4 as stored, integers and e4m3 as fp32."""
        tables = {kind: matrices(expected_tensors(self.config, view).values()) for kind, view in VIEWS.items()}
        stored, found = self.checkpoint.tensors, dict[str, TensorSpec]()
        for name, roles in tables["bf16"].items():
            kind = _kind(stored, name)
            seen = tables[kind].get(name, roles)
            if f"{name}.input_global_scale" not in stored:
                # an export without quantised activations has no scale for them
                seen = {role: spec for role, spec in seen.items() if role != "input_scale"}
            found |= {spec.name: spec for spec in seen.values()}
        return found

    @property
    def layout(self) -> str:
        """The layout's name: compressed-tensors."""
        return METHOD


def _kind(stored: Mapping[str, TensorInfo], matrix: str) -> str:
    """Return the key of VIEWS for a matrix or other tensor."""
    packed = stored.get(f"{matrix}.{PACKED}")
    if packed is not None:
        if packed.dtype != CODES:
            return "values"
        return "nvfp4" if f"{matrix}.weight_global_scale" in stored else "mxfp4"
    plain = stored.get(f"{matrix}.weight") or stored.get(matrix)
    if plain is not None and f"{matrix}.{OFFICIAL_SCALE}" in stored:
        return "fp8" if plain.dtype == E4M3 else "mxfp4"
    return "bf16" if plain is None or plain.dtype == STORAGE["bf16"].dtype else "values"


def is_packed(folder: Path) -> bool:
    """Return whether a folder is a compressed-tensors export in formats that the engine does not run.

    config.json states the format; if it leaves it to groups of tensors, the stored tensors decide. Raises
    CheckpointError
    for damaged headers.
    """
    quantization = _values(folder).get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != METHOD:
        return False
    if quantization.get("format") != MIXED:
        return quantization.get("format") not in COMPRESSED_FORMATS
    stored = scan_checkpoint(folder).tensors
    return any(_has_values(stored, info) for info in stored.values())


def _has_values(stored: Mapping[str, TensorInfo], info: TensorInfo) -> bool:
    """Return whether a weight has integers, or e4m3 codes with scales that no release uses."""
    matrix, _, last = info.name.rpartition(".")
    if last == PACKED:
        return info.dtype != CODES
    return last == "weight" and info.dtype == E4M3 and f"{matrix}.{SCALE}" in stored


def recognise_packed(folder: Path) -> PackedIdentity:
    """Identify a compressed-tensors folder; files may be missing.

    Raises UnsupportedCheckpoint for names other than the official ones and for reordered weights, else as `recognise`.
    """
    return packed_identity(scan_checkpoint(folder), _values(folder), str(folder / CONFIG))


def packed_identity(checkpoint: Checkpoint, values: Mapping[str, Any], where: str) -> PackedIdentity:
    """Return the identity for headers and a configuration that belong together.

    values: content of config.json. where: its name in errors. Raises what `recognise_packed` raises for them.
    """
    names = checkpoint.tensors.keys() | checkpoint.index.keys()
    odd = next((name for name in sorted(names) if name.startswith("model.") or name.endswith(REORDERED)), None)
    if odd:
        what = "transformers' names" if odd.startswith("model.") else "weights in another order than their scales"
        raise UnsupportedCheckpoint(
            f"{checkpoint.folder} is a compressed-tensors export with {what} ({odd}), which dsv4 does not read",
            OFFICIAL,
        )
    if names and not any(name.endswith((f".{PACKED}", f".{SCALE}")) for name in names):
        form = values["quantization_config"].get("format")
        raise UnsupportedCheckpoint(
            f"{where} describes a compressed-tensors export in a format other than NVFP4 and MXFP4 "
            f"(quantization_config.format {form!r}"[:400]
            + f"), and no tensor has a {PACKED} or {SCALE}",
            OFFICIAL,
        )
    model = {key: value for key, value in values.items() if key != "quantization_config"}
    config = parse_config(model, where, may_have_drafter(checkpoint))
    identity = describe(config, _formats(checkpoint))
    naming = PackedNaming(checkpoint.tensors, compressed_naming(checkpoint))
    notes = tuple(drafter_notes(checkpoint, values))
    return PackedIdentity(identity.size, config, identity.formats, checkpoint, naming, notes)


def _values(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except CheckpointError:
        return {}


def _formats(checkpoint: Checkpoint) -> Formats:
    """Return the formats in which most matrices are read, determined from the first matrix of each kind."""

    def first(part: str) -> Formats:
        name = next((name for name in checkpoint.tensors if part in name), "")
        return VIEWS[_kind(checkpoint.tensors, name.rpartition(".")[0])]

    return Formats(first(".attn.wq_a.").linear, first(".ffn.experts.").experts, "bf16")
