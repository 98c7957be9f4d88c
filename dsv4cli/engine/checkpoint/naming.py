"""Tensor naming schemes: official, transformers, compressed-tensors, and the official files for N ranks; no torch.

Sources: the official convert.py (ranks), transformers 5.23 conversion_mapping.py (names, stacked experts),
compressed-tensors 0.20 (nvfp4/base.py, mxfp4/base.py).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.formats import CODE_DTYPES, E8M0_DTYPES, STORAGE, Role
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import UsageError

# pattern of an official name -> transformers' name, applied in this order
TRANSFORMERS_NAMES = {
    r"^embed\.": "model.embed_tokens.",
    r"^head\.": "lm_head.",
    r"^norm\.": "model.norm.",
    r"^hc_head_": "model.hc_head.hc_",
    r"^layers\.": "model.layers.",
    r"\.hc_(attn|ffn)_": r".\1_hc.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.attn\.attn_sink$": ".self_attn.sinks",
    r"\.attn\.indexer\.compressor\.": ".self_attn.compressor.indexer.",
    r"\.attn\.indexer\.wq_b\.": ".self_attn.compressor.indexer.q_b_proj.",
    r"\.attn\.indexer\.weights_proj\.": ".self_attn.compressor.indexer.scorer.weights_proj.",
    r"\.attn\.": ".self_attn.",
    r"(\.compressor\.(?:indexer\.)?)norm\.": r"\1kv_norm.",
    r"\.ape$": ".position_bias",
    r"\.wq_a\.": ".q_a_proj.",
    r"\.wq_b\.": ".q_b_proj.",
    r"\.wkv\.": ".kv_proj.",
    r"\.wgate\.": ".gate_proj.",
    r"\.wo_([ab])\.": r".o_\1_proj.",
    r"\.q_norm\.": ".q_a_norm.",
    r"\.ffn\.gate\.bias$": ".mlp.gate.e_score_correction_bias",
    r"\.ffn\.shared_experts\.w1\.": ".mlp.shared_experts.gate_proj.",
    r"\.ffn\.shared_experts\.w2\.": ".mlp.shared_experts.down_proj.",
    r"\.ffn\.shared_experts\.w3\.": ".mlp.shared_experts.up_proj.",
    r"\.ffn\.": ".mlp.",
}
# the same for what its save_pretrained writes by default, which undoes a half of the renaming
SAVED_NAMES = {
    r"^embed\.": "model.embed_tokens.",
    r"^head\.": "lm_head.",
    r"^norm\.": "model.norm.",
    r"^hc_head_": "model.hc_head.hc_",
    r"^layers\.": "model.layers.",
    r"\.attn\.kv_norm\.": ".attn.norm.",
    r"\.attn\.indexer\.compressor\.": ".attn.compressor.indexer.",
    r"\.attn\.indexer\.wq_b\.": ".attn.compressor.indexer.q_b_proj.",
    r"\.attn\.indexer\.weights_proj\.": ".attn.compressor.indexer.scorer.weights_proj.",
    r"\.ape$": ".position_bias",
    r"\.wgate\.": ".gate_proj.",
}
# matches only this scheme, even next to a layer with transformers' names
SAVED_SIGN = re.compile(r"^model\.layers\.\d+\.attn\.")
EXPERT = re.compile(r"(layers\.\d+)\.ffn\.experts\.(\d+)\.w([123])\.weight")
# dimension that the official convert.py cuts, by the last component before .weight or .scale
MP_CUTS = {
    "embed": 0, "head": 0, "wq_b": 0, "wo_a": 0, "attn_sink": 0, "weights_proj": 0, "markov_w1": 0, "markov_w2": 0,
    "wo_b": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """One of `parts` equal slices of a tensor along `dim`."""

    dim: int
    part: int
    parts: int

    def of(self, shape: tuple[int, ...]) -> slice:
        """Return the indices of the slice along `dim`."""
        size = shape[self.dim] // self.parts
        return slice(self.part * size, (self.part + 1) * size)


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a tensor of the table, or of its slice `cut`, inside a stored tensor.

    Attributes:
        name: key of the stored tensor.
        dtype, shape: as stored.
        begin: offset, in values, of this tensor's contiguous values in the stored tensor.
        reciprocal: whether an fp32 x is stored as 1 / x.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    cut: Cut | None = None
    reciprocal: bool = False


class Naming(Protocol):
    """A naming scheme for the tensors of the table."""

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return every stored tensor that contains the tensor or a slice of it; complete ones are replicas."""


@dataclass(frozen=True)
class NamedTensors(ABC):
    """A naming scheme of safetensors files, which may store codes and scales under an unusual dtype of the same size.

    Attributes:
        aliases: header dtype of each such tensor, by its stored name.
    """

    aliases: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return every stored tensor that contains the tensor or a slice of it, with the dtype in its header."""
        defaults = self.default_locations(spec)
        return tuple(map(self._as_stored, defaults)) if self.aliases else defaults

    @abstractmethod
    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the same locations with the usual dtypes of this scheme."""

    def _as_stored(self, location: Location) -> Location:
        dtype = self.aliases.get(location.name, location.dtype)
        if {dtype, location.dtype} <= {*E8M0_DTYPES}:
            return replace(location, dtype=dtype)
        if dtype == location.dtype or not {dtype, location.dtype} <= {*CODE_DTYPES}:
            return location
        # in values that the header counts
        *rows, columns = location.shape
        columns, begin = columns * DTYPE_BITS[location.dtype], location.begin * DTYPE_BITS[location.dtype]
        bits = DTYPE_BITS[dtype]
        return replace(location, dtype=dtype, shape=(*rows, columns // bits), begin=begin // bits)


@dataclass(frozen=True)
class OfficialNaming(NamedTensors):
    """The names of the official repositories, which the table uses."""

    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the tensor itself."""
        return (Location(spec.name, spec.dtype, spec.shape),)


# compressed-tensors' names for the parts of a packed matrix, by role
COMPRESSED_NAMES: Mapping[Role, str] = {
    "weight": "weight_packed",
    "scale": "weight_scale",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}


@dataclass(frozen=True)
class CompressedNaming(NamedTensors):
    """compressed-tensors' names of packed matrices (nvfp4-pack-quantized, mxfp4-pack-quantized); else official names.

    The scale of a whole tensor is stored as a divisor. whole: its shape, () or (1,). e8m0: the dtype under which e8m0
    scales of FP4 are stored.
    """

    whole: tuple[int, ...]
    e8m0: str

    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the tensor itself."""
        if spec.form is None or STORAGE[spec.form].codes == 1:
            return (Location(spec.name, spec.dtype, spec.shape),)
        name = f"{spec.matrix}.{COMPRESSED_NAMES[spec.role]}"
        if not spec.shape:
            return (Location(name, spec.dtype, self.whole, reciprocal=True),)
        dtype = {"I8": "U8", "F8_E8M0": self.e8m0}.get(spec.dtype, spec.dtype)
        return (Location(name, dtype, spec.shape),)


@dataclass(frozen=True)
class TransformersNaming(NamedTensors):
    """The parameter names of transformers' DeepseekV4ForCausalLM; official names for `mtp.*`, which it lacks."""

    config: ModelConfig

    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the parameter, or this expert's slice of a stacked one: gate_up_proj [E, 2I, D], down_proj [E, D,
        I].
        """
        if spec.name.startswith("mtp."):
            return (Location(spec.name, spec.dtype, spec.shape),)
        match = EXPERT.fullmatch(spec.name)
        if match is None:
            return (Location(transformers_name(spec.name), spec.dtype, spec.shape),)
        layer, expert, matrix = match.groups()
        count, (rows, columns) = self.config.n_routed_experts, spec.shape
        prefix = f"model.{layer}.mlp.experts."
        if matrix == "2":
            begin = int(expert) * rows * columns
            return (Location(prefix + "down_proj", spec.dtype, (count, rows, columns), begin),)
        begin = (2 * int(expert) + (matrix == "3")) * rows * columns
        return (Location(prefix + "gate_up_proj", spec.dtype, (count, 2 * rows, columns), begin),)


@dataclass(frozen=True)
class SavedNaming(TransformersNaming):
    """The names that transformers' save_pretrained writes unless save_original_format=False: separate experts."""

    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the tensor itself, under a name between the official one and that of the parameter."""
        return (Location(_renamed(spec.name, SAVED_NAMES), spec.dtype, spec.shape),)


@dataclass(frozen=True)
class MpNaming(NamedTensors):
    """The files of the official convert.py for `ranks` processes, with keys `model{rank}-mp{ranks}/<official name>`.

    Each rank stores a contiguous range of whole routed experts. Tensors in MP_CUTS are sharded; all others are
    replicated.
    """

    ranks: int
    experts: int

    def default_locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return the shard of every rank, the rank of an expert, or the replicas.

        Raises UsageError for an uneven split.
        """
        dtype, shape = spec.dtype, spec.shape
        if spec.dtype == "I8":
            # two e2m1 codes a byte; the header counts codes
            dtype, shape = "F4", (*spec.shape[:-1], 2 * spec.shape[-1])
        if spec.expert is not None:
            self._check(spec, self.experts, 1)
            rank = spec.expert // (self.experts // self.ranks)
            return (Location(self._key(rank, spec), dtype, shape),)
        dim = MP_CUTS.get(spec.matrix.removesuffix(".weight").rpartition(".")[2])
        if dim is None:
            return tuple(Location(self._key(rank, spec), dtype, shape) for rank in range(self.ranks))
        self._check(spec, shape[dim], STORAGE[spec.form].rows if spec.form and not spec.is_scale else 1)
        cut_shape = (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])
        return tuple(
            Location(self._key(rank, spec), dtype, cut_shape, cut=Cut(dim, rank, self.ranks))
            for rank in range(self.ranks)
        )

    def _key(self, rank: int, spec: TensorSpec) -> str:
        return f"model{rank}-mp{self.ranks}/{spec.name}"

    def _check(self, spec: TensorSpec, count: int, block: int) -> None:
        size, rest = divmod(count, self.ranks)
        if rest or (self.ranks > 1 and size % block):
            what = "the experts" if spec.expert is not None else f"{spec.name} {list(spec.shape)}"
            raise UsageError(f"{what} cannot be split across {self.ranks} ranks", "use fewer ranks, a power of two")


def transformers_name(name: str) -> str:
    """Return transformers' name of a tensor outside the routed experts and `mtp.`."""
    return _renamed(name, TRANSFORMERS_NAMES)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


def stored_table(naming: Naming, specs: Collection[TensorSpec]) -> dict[str, TensorSpec]:
    """Return every stored tensor of a checkpoint with this naming, by key, with dtype and shape as stored.

    The parameter count of a stacked tensor covers all its experts; a replicated tensor counts on every rank.
    """
    table: dict[str, TensorSpec] = {}
    for spec in specs:
        for location in naming.locations(spec):
            if location.name not in table:
                count = prod(location.shape) if spec.count else 0
                table[location.name] = replace(
                    spec, name=location.name, dtype=location.dtype, shape=location.shape, count=count, parameter=""
                )
    return table
