"""A GGUF model seen as the official tensor table: FP4 experts, the rest in fp32 or bf16; no numpy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.gguf.complete import completed
from dsv4cli.engine.checkpoint.gguf.drafter import PREFIX, StoredDrafter, split_drafter
from dsv4cli.engine.checkpoint.gguf.files import GgufModel, read_model
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.identify import FolderIdentity, describe
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.config.gguf import check_architecture, parse_gguf
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UnsupportedCheckpoint
from dsv4cli.kernels.ggml.types import DECODED, TYPES

# types whose values can be read: weights, and the token ids of hash layers
READABLE = (*DECODED, "I32")
# formats in which a tensor type is read: MXFP4 blocks as FP4, others as values
VIEWS = {"MXFP4": Formats("f32", "fp4", "bf16"), "BF16": Formats("bf16", "bf16", "bf16")}
VALUES = Formats("f32", "f32", "f32")


@dataclass(frozen=True)
class GgufIdentity(FolderIdentity):
    """The identity of GGUF files.

    metadata: the first file's metadata. assumptions: sentences on what the metadata does not state.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what the file does not state."""
        return self.assumptions

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by official names: FP4 for experts in MXFP4, bf16 for BF16, fp32 for all other types."""
        return seen_specs(self.config, self.gguf_types)

    @cached_property
    def gguf_types(self) -> dict[str, str]:
        """The types of all tensors by their names in the file."""
        return {name: info.dtype for name, info in self.checkpoint.tensors.items()}

    def stored_type(self, weight: TensorSpec) -> str:
        """Return the GGUF type of a matrix or other tensor; '' if it is missing."""
        return self.gguf_types.get(gguf_name(weight), "")

    @property
    def layout(self) -> str:
        """The layout's name: GGUF."""
        return "gguf"

    @property
    def stored_naming(self) -> GgufNaming:
        """The naming scheme, with the stored tensor types."""
        assert isinstance(self.naming, GgufNaming)
        return self.naming

    def check_readable(self) -> None:
        """Raise UnsupportedCheckpoint, naming tensor and type, for a tensor whose values cannot be read."""
        other = [info for info in self.checkpoint.tensors.values() if not _is_readable(info)]
        if other:
            more = f" (and {len(other) - 1:,} more)" if len(other) > 1 else ""
            raise UnsupportedCheckpoint(
                f"{self.checkpoint.folder}: {other[0].name} is {other[0].dtype}{more}, which dsv4 does not decode; it "
                f"decodes {', '.join(READABLE)}",
                "use a file of other types, or the release: `dsv4 download flash`",
            )


def seen_specs(config: ModelConfig, types: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return `GgufIdentity.specs` of a model whose tensors have these types, by their names in the file."""
    tables = {kind: matrices(expected_tensors(config, view).values()) for kind, view in VIEWS.items()}
    found: dict[str, TensorSpec] = {}
    for name, roles in matrices(expected_tensors(config, VALUES).values()).items():
        weight = roles["weight"]
        kind = types.get(gguf_name(weight), "")
        seen = tables.get(kind if weight.expert is not None or kind != "MXFP4" else "", {}).get(name, roles)
        found |= {spec.name: spec for spec in seen.values()}
    return found


def _is_readable(info: TensorInfo) -> bool:
    # blocks of a vector would leave no row to read by
    return info.dtype in READABLE and (len(info.shape) > 1 or TYPES[info.dtype].values == 1)


def recognise_gguf(path: Path) -> GgufIdentity:
    """Identify a GGUF file or a folder of GGUF files, with any tensor types.

    Raises CheckpointError and UnsupportedCheckpoint, naming the file, for one that is damaged or has another
    architecture.
    """
    return identify_model(read_model(path))


def identify_model(model: GgufModel) -> GgufIdentity:
    """Identify a model by its headers. Raises as `recognise_gguf`."""
    where, stored = str(model.checkpoint.files[0]), model.checkpoint.tensors
    check_architecture(model.metadata, where)
    metadata, notes = completed(model.metadata, stored, where)
    tensors, drafter = split_drafter(stored)
    config, missing = _with_drafter(metadata, where, drafter) if drafter.tensors else (parse_gguf(metadata, where), [])
    if missing:
        config = config.without_drafter()
    if missing or drafter.problem:
        notes.append(drafter.note(missing))
    else:
        tensors |= drafter.tensors
    tensors = {name: _flattened(info) for name, info in tensors.items()}
    naming = GgufNaming(config.n_routed_experts, {name: info.dtype for name, info in tensors.items()})
    identity = describe(config, _formats(tensors))
    checkpoint = replace(model.checkpoint, tensors=tensors)
    return GgufIdentity(
        identity.size,
        config,
        identity.formats,
        checkpoint,
        naming,
        metadata=model.metadata,
        assumptions=tuple(notes),
    )


def _with_drafter(metadata: Mapping[str, Any], where: str, drafter: StoredDrafter) -> tuple[ModelConfig, list[str]]:
    """Return the configuration with the drafter, and the names of the tensors that it lacks."""
    config = parse_gguf(metadata, where, stages=1)
    names = (gguf_name(spec) for spec in expected_tensors(config, VALUES).values() if spec.name.startswith(PREFIX))
    return config, [name for name in dict.fromkeys(names) if name not in drafter.tensors]


def _flattened(info: TensorInfo) -> TensorInfo:
    """Return the first output projection with its groups stacked along the rows; some files have one matrix each."""
    if info.name.endswith("attn_output_a.weight") and len(info.shape) == 3:
        return replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
    return info


def _formats(tensors: Mapping[str, TensorInfo]) -> Formats:
    """Return the formats under which most matrices are seen, judged by the first of each kind."""

    def of(name: str) -> Formats:
        info = tensors.get(name)
        return VIEWS.get(info.dtype if info else "", VALUES)

    dense = of("token_embd.weight").dense
    return Formats(of("blk.0.attn_q_a.weight").linear, of("blk.0.ffn_gate_exps.weight").experts, dense)
