"""The table of a checkpoint's tensors: key, format, shape, model parameter and sharding of each; no torch.

Source: tensor list of the official repositories (69,187 tensors for Flash, 145,116 for Pro, 72,317 for Flash-0731).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from dsv4cli.engine.config.formats import STORAGE, FormatName, Role
from dsv4cli.engine.config.layer_kind import CSA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: its key.
        dtype: name in a safetensors header.
        shape: as stored.
        family: the part of the model it belongs to.
        count: number of parameters it stores, 0 for scales and lookup tables.
        shard: the dimension that tensor parallelism splits, None if it is replicated.
        parameter: dotted name in the Transformer.
        expert: row of the stacked parameter, or None.
        columns: unpacked columns of the matrix, also for its scales.
        role: weight or kind of scale.
        form: storage format of the matrix, None if it is not a matrix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    family: str
    count: int
    shard: int | None = None
    parameter: str = ""
    expert: int | None = None
    columns: int = 0
    role: Role = "weight"
    form: FormatName | None = None

    @property
    def is_scale(self) -> bool:
        """Whether the tensor is a scale of a matrix."""
        return self.role != "weight"

    @property
    def matrix(self) -> str:
        """The name that a weight and its scales share; for any other tensor, its own name."""
        return self.name.removesuffix("." + self.role) if self.columns else self.name


def matrices(specs: Iterable[TensorSpec]) -> dict[str, dict[Role, TensorSpec]]:
    """Group the table by matrix: each weight with its scales, by role; any other tensor alone."""
    found: dict[str, dict[Role, TensorSpec]] = {}
    for spec in specs:
        found.setdefault(spec.matrix, {})[spec.role] = spec
    return found


def expected_tensors(config: ModelConfig, formats: Formats) -> dict[str, TensorSpec]:
    """Return exactly the tensors that a checkpoint of this model must contain, by key."""
    return {spec.name: spec for spec in _specs(config, formats)}


@lru_cache(maxsize=4)  # takes 0.3 s for a release, and one command calls it several times
def _specs(config: ModelConfig, formats: Formats) -> tuple[TensorSpec, ...]:
    table = _Table(config, formats)
    specs = [*table.top()]
    for layer, ratio in enumerate(config.layer_ratios):
        specs += table.block(f"layers.{layer}.", ratio, config.is_hash_layer(layer))
    for stage in range(config.draft_stages):
        specs += table.block(f"mtp.{stage}.", 0, is_hash=False)
        specs += table.mtp(stage) if config.dspark is None else table.dspark(stage)
    return tuple(specs)


def loaded_tensors(config: ModelConfig, formats: Formats) -> dict[str, TensorSpec]:
    """Return those of `expected_tensors` that fill a parameter."""
    return {name: spec for name, spec in expected_tensors(config, formats).items() if spec.parameter}


class _Table:
    """A builder of the specs, one part of the model at a time."""

    def __init__(self, config: ModelConfig, formats: Formats) -> None:
        self.config = config
        self.formats = formats
        self.dense_dtype = STORAGE[formats.dense].dtype

    def _tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], family: str, shard: int | None = None
    ) -> TensorSpec:
        count = 0 if dtype == "I64" else prod(shape)
        return TensorSpec(name, dtype, shape, family, count, shard, parameter=name)

    def _dense(self, name: str, shape: tuple[int, ...], family: str, shard: int | None = None) -> TensorSpec:
        return self._tensor(name, self.dense_dtype, shape, family, shard)

    def _f32(self, name: str, shape: tuple[int, ...], family: str, shard: int | None = None) -> TensorSpec:
        return self._tensor(name, "F32", shape, family, shard)

    def _matrix(
        self, name: str, rows: int, columns: int, family: str, shard: int | None = None, expert: int | None = None
    ) -> Iterator[TensorSpec]:
        """Yield the weight of a matrix [rows, columns] and the scales of its storage format."""
        linear = self.formats.output if name.endswith(".wo_a") else self.formats.linear
        experts = self.formats.drafter if name.startswith("mtp.") else self.formats.experts
        form = linear if expert is None else experts
        parameter = name if expert is None else name.replace(f"experts.{expert}.", "experts.")
        storage = STORAGE[form]
        weight = TensorSpec(
            name=name + ".weight",
            dtype=storage.dtype,
            shape=(rows, columns // storage.codes),
            family=family,
            count=rows * columns,
            shard=shard,
            parameter=parameter + ".weight",
            expert=expert,
            columns=columns,
            form=form,
        )
        yield weight
        for scale in storage.scales:
            shape = scale.shape(rows, columns)
            yield replace(
                weight,
                name=f"{name}.{scale.role}",
                dtype=scale.dtype,
                shape=shape,
                count=0,
                parameter=f"{parameter}.{scale.parameter}" if scale.parameter else "",
                role=scale.role,
                # one number stands for the whole matrix, on every rank
                shard=shard if shape else None,
            )

    def top(self) -> Iterator[TensorSpec]:
        """Yield the tensors outside the blocks."""
        config = self.config
        yield self._dense("embed.weight", (config.vocab_size, config.hidden_size), "embedding")
        yield self._dense("head.weight", (config.vocab_size, config.hidden_size), "head", shard=0)
        yield self._dense("norm.weight", (config.hidden_size,), "norms")
        yield from self.hc_head("")

    def hc_head(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the hyper-head, which collapses the streams before the head."""
        streams = self.config.hc_mult
        yield self._f32(f"{prefix}hc_head_fn", (streams, streams * self.config.hidden_size), "hyper-connections")
        yield self._f32(f"{prefix}hc_head_base", (streams,), "hyper-connections")
        yield self._f32(f"{prefix}hc_head_scale", (1,), "hyper-connections")

    def block(self, prefix: str, ratio: int, is_hash: bool) -> Iterator[TensorSpec]:
        """Yield one block: hyper-connections, norms, attention, experts."""
        hidden, streams = self.config.hidden_size, self.config.hc_mult
        mixes = (2 + streams) * streams  # pre, post, comb
        for part in ("attn", "ffn"):
            yield self._f32(f"{prefix}hc_{part}_fn", (mixes, streams * hidden), "hyper-connections")
            yield self._f32(f"{prefix}hc_{part}_base", (mixes,), "hyper-connections")
            yield self._f32(f"{prefix}hc_{part}_scale", (3,), "hyper-connections")
            yield self._dense(f"{prefix}{part}_norm.weight", (hidden,), "norms")
        yield from self._attention(f"{prefix}attn.", ratio)
        yield from self._experts(f"{prefix}ffn.", is_hash)

    def _attention(self, prefix: str, ratio: int) -> Iterator[TensorSpec]:
        c = self.config
        heads, width, family = c.num_attention_heads, c.head_dim, "attention"
        yield self._f32(prefix + "attn_sink", (heads,), family, shard=0)
        yield from self._matrix(prefix + "wq_a", c.q_lora_rank, c.hidden_size, family)
        yield self._dense(prefix + "q_norm.weight", (c.q_lora_rank,), "norms")
        yield from self._matrix(prefix + "wq_b", heads * width, c.q_lora_rank, family, shard=0)
        yield from self._matrix(prefix + "wkv", width, c.hidden_size, family)
        yield self._dense(prefix + "kv_norm.weight", (width,), "norms")
        yield from self._matrix(
            prefix + "wo_a", c.o_groups * c.o_lora_rank, heads * width // c.o_groups, family, shard=0
        )
        yield from self._matrix(prefix + "wo_b", c.hidden_size, c.o_groups * c.o_lora_rank, family, shard=1)
        if ratio:
            yield from self._compressor(prefix + "compressor.", ratio, width, "compressor")
        if ratio == CSA:
            rows = c.index_n_heads * c.index_head_dim
            # whole on every rank: reading it all takes less time than adding up the scores of parts
            yield from self._matrix(prefix + "indexer.wq_b", rows, c.q_lora_rank, "indexer")
            yield self._dense(prefix + "indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), "indexer")
            yield from self._compressor(prefix + "indexer.compressor.", ratio, c.index_head_dim, "indexer")

    def _compressor(self, prefix: str, ratio: int, width: int, family: str) -> Iterator[TensorSpec]:
        channels = width * (2 if ratio == CSA else 1)  # ratio 4: one half for the next entry, one for its own
        yield self._f32(prefix + "ape", (ratio, channels), family)
        for part in ("wkv", "wgate"):
            yield self._dense(f"{prefix}{part}.weight", (channels, self.config.hidden_size), family)
        yield self._dense(prefix + "norm.weight", (width,), "norms")

    def _experts(self, prefix: str, is_hash: bool) -> Iterator[TensorSpec]:
        c = self.config
        yield self._dense(prefix + "gate.weight", (c.n_routed_experts, c.hidden_size), "router")
        if is_hash:
            yield self._tensor(prefix + "gate.tid2eid", "I64", (c.vocab_size, c.num_experts_per_tok), "router")
        else:
            yield self._f32(prefix + "gate.bias", (c.n_routed_experts,), "router")
        for expert in range(c.n_routed_experts):
            yield from self._mlp(f"{prefix}experts.{expert}.", "experts", expert)
        yield from self._mlp(prefix + "shared_experts.", "shared experts", None)

    def _mlp(self, prefix: str, family: str, expert: int | None) -> Iterator[TensorSpec]:
        inner, hidden = self.config.moe_intermediate_size, self.config.hidden_size
        yield from self._matrix(prefix + "w1", inner, hidden, family, 0, expert)
        yield from self._matrix(prefix + "w2", hidden, inner, family, 1, expert)
        yield from self._matrix(prefix + "w3", inner, hidden, family, 0, expert)

    def mtp(self, stage: int) -> Iterator[TensorSpec]:
        """Yield the tensors that an MTP stage has in addition to a block (April releases)."""
        prefix, hidden, family = f"mtp.{stage}.", self.config.hidden_size, "drafter"
        yield from self._matrix(prefix + "e_proj", hidden, hidden, family)
        yield from self._matrix(prefix + "h_proj", hidden, hidden, family)
        for name in ("enorm", "hnorm", "norm"):
            yield self._dense(f"{prefix}{name}.weight", (hidden,), "norms")
        yield from self.hc_head(prefix)

    def dspark(self, stage: int) -> Iterator[TensorSpec]:
        """Yield the tensors that a DSpark stage has in addition to a block: the first's input and the last's output."""
        assert self.config.dspark is not None
        prefix, c, family = f"mtp.{stage}.", self.config, "drafter"
        rank, targets = self.config.dspark.markov_rank, len(self.config.dspark.target_layer_ids)
        if stage == 0:
            yield from self._matrix(prefix + "main_proj", c.hidden_size, targets * c.hidden_size, family)
            yield self._dense(prefix + "main_norm.weight", (c.hidden_size,), "norms")
        if stage == c.draft_stages - 1:
            yield self._dense(prefix + "norm.weight", (c.hidden_size,), "norms")
            yield from self.hc_head(prefix)
            for name, shard in (("markov_w1", None), ("markov_w2", 0)):
                yield self._dense(f"{prefix}markov_head.{name}.weight", (c.vocab_size, rank), family, shard=shard)
            yield self._dense(prefix + "confidence_head.proj.weight", (1, c.hidden_size + rank), family)
