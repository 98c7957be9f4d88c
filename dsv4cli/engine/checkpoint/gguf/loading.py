"""A GGUF model as tensors to load: matrices as blocks, everything else as values; no numpy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dsv4cli.engine.checkpoint.gguf.drafter import HalfInfo
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity, seen_specs
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.identify import Identity
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, DECODED, block_dtype, row_bytes

# types of matrices that `seen_specs` has as dtypes
VIEWED = ("F32", "BF16")
# families of matrices that have no fp16 kernels except those of blocks
EXPERTS = ("experts", "shared experts")
BYTES = "U8"


def split_tensors(identity: Identity) -> dict[str, TensorSpec]:
    """Return the tensors of any model that ranks split. Raises UnsupportedCheckpoint and what `loaded_specs` raises."""
    if isinstance(identity, GgufIdentity):
        identity.check_readable()
        return loaded_table(identity)
    return expected_tensors(identity.config, identity.formats)


def loaded_table(identity: GgufIdentity) -> dict[str, TensorSpec]:
    """Return the tensors that fill the model's parameters: `loaded_specs` of its configuration and types."""
    return loaded_specs(identity.config, identity.gguf_types)


def loaded_specs(config: ModelConfig, types: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the tensors that fill the parameters of a GGUF model.

    Matrices and the embedding keep their blocks, with a dtype of BLOCK_DTYPES and rows of bytes, or their dtype;
    experts in MXFP4 become FP4.

    Args:
        types: types of the file's tensors by name.

    Raises:
        CheckpointError: a matrix is missing.
    """
    specs = {name: spec for name, spec in seen_specs(config, types).items() if spec.parameter}
    found: dict[str, TensorSpec] = {}
    for roles in matrices(specs.values()).values():
        weight, name = roles["weight"], gguf_name(roles["weight"])
        if weight.form is not None and name not in types:
            raise CheckpointError(f"tensor {name} is missing", "download the GGUF file again")
        kind = types.get(name, "")
        # the scale of FP4 tells that inputs are rounded: all matrices of a layer's experts have one, or none
        as_fp4 = weight.form == "fp4" and set(_kinds_of_layer(types, weight)) == {"MXFP4"}
        if not _is_matrix(weight) or as_fp4:
            found |= {spec.name: spec for spec in roles.values()}
        else:
            found[weight.name] = _as_stored(weight, kind)
    return found


def _is_matrix(weight: TensorSpec) -> bool:
    """Return whether a tensor is the embedding or a matrix of a linear, the router included."""
    return weight.form is not None or (len(weight.shape) == 2 and weight.name.endswith(".weight"))


def _as_stored(weight: TensorSpec, kind: str) -> TensorSpec:
    """Return a matrix in the type of the file, or as values where no kernel multiplies that."""
    if kind == "F16" and weight.family not in EXPERTS:
        return replace(weight, dtype=kind)
    # the kernels of routers take no blocks, and writers do not quantize routers
    is_value = kind in VIEWED or kind not in DECODED or weight.family == "router"
    return weight if is_value else blocks_of(weight, kind)


def _kinds_of_layer(types: Mapping[str, str], weight: TensorSpec) -> Iterator[str]:
    """Yield the types of the three matrices of an expert."""
    stem = gguf_name(weight).rsplit(".", 2)[0]
    for name in ("gate", "up", "down"):
        yield types.get(f"{stem}.ffn_{name}_exps.weight", "")


def blocks_of(weight: TensorSpec, kind: str) -> TensorSpec:
    """Return a matrix as rows of blocks of a type."""
    shape = (weight.shape[0], row_bytes(kind, weight.columns or weight.shape[1]))
    return replace(weight, dtype=block_dtype(kind), shape=shape, form=None)


def byte_checkpoint(identity: GgufIdentity) -> Checkpoint:
    """Return the headers with each tensor as rows of bytes."""
    return replace(identity.checkpoint, tensors={name: _bytes(i) for name, i in identity.checkpoint.tensors.items()})


def _bytes(info: TensorInfo) -> TensorInfo:
    width = row_bytes(info.dtype, info.shape[-1] if info.shape else 1)
    return replace(info, dtype=BYTES, shape=(*info.shape[:-1], width))


def is_stored(spec: TensorSpec, stored: TensorInfo | None) -> bool:
    """Return whether a matrix is loaded with the bytes that are stored, in any order, and not decoded."""
    # the rows of a half of a matrix are not contiguous in the file
    if stored is None or isinstance(stored, HalfInfo) or len(spec.shape) != 2:
        return False
    return BLOCK_DTYPES.get(spec.dtype, spec.dtype) == stored.dtype


@dataclass(frozen=True)
class ByteNaming:
    """The naming of `byte_checkpoint` for the tensors that are loaded as stored."""

    naming: GgufNaming

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return where the rows of a tensor are stored."""
        *stack, rows, _ = self.naming.shape(spec)
        kind = BLOCK_DTYPES.get(spec.dtype)
        width = spec.shape[1] if kind else row_bytes(spec.dtype, spec.shape[1])
        begin = 0 if spec.expert is None else spec.expert * rows * width
        return (Location(gguf_name(spec), BYTES, (*stack, rows, width), begin),)
