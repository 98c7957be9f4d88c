"""A GGUF model as tensors to load: matrices as blocks, everything else as values; no numpy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity, seen_specs
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.identify import Identity
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, block_dtype, row_bytes

# types of matrices that the engine multiplies by as they are
PLAIN = ("F32", "BF16")
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

    Matrices keep their blocks, with a dtype of BLOCK_DTYPES and rows of bytes; experts in MXFP4 become FP4.

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
        if weight.form is None or as_fp4 or kind in PLAIN:
            found |= {spec.name: spec for spec in roles.values()}
        else:
            found[weight.name] = blocks_of(weight, kind)
    return found


def _kinds_of_layer(types: Mapping[str, str], weight: TensorSpec) -> Iterator[str]:
    """Yield the types of the three matrices of an expert."""
    stem = gguf_name(weight).rsplit(".", 2)[0]
    for name in ("gate", "up", "down"):
        yield types.get(f"{stem}.ffn_{name}_exps.weight", "")


def blocks_of(weight: TensorSpec, kind: str) -> TensorSpec:
    """Return a matrix as rows of blocks of a type."""
    shape = (weight.shape[0], row_bytes(kind, weight.columns))
    return replace(weight, dtype=block_dtype(kind), shape=shape, form=None)


def byte_checkpoint(identity: GgufIdentity) -> Checkpoint:
    """Return the headers with each tensor as rows of bytes."""
    return replace(identity.checkpoint, tensors={name: _bytes(i) for name, i in identity.checkpoint.tensors.items()})


def _bytes(info: TensorInfo) -> TensorInfo:
    width = row_bytes(info.dtype, info.shape[-1] if info.shape else 1)
    return replace(info, dtype=BYTES, shape=(*info.shape[:-1], width))


@dataclass(frozen=True)
class ByteNaming:
    """The naming of `byte_checkpoint` for matrices kept as blocks."""

    naming: GgufNaming

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return where the rows of a matrix are stored."""
        assert spec.dtype in BLOCK_DTYPES, spec.name
        *stack, rows, _ = self.naming.shape(replace(spec, columns=spec.columns))
        begin = 0 if spec.expert is None else spec.expert * rows * spec.shape[1]
        return (Location(gguf_name(spec), BYTES, (*stack, rows, spec.shape[1]), begin),)
