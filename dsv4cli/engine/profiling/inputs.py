"""Inputs of one operation at a model's shapes: stored weights, activations, and index tensors of a step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.engine.weights.random_weights import random_tensors
from dsv4cli.kernels.stored_matrix import StoredMatrix

# a step of up to this many tokens is a decode step of as many sequences; a larger one is one prompt
MOST_SEQUENCES = 64
DTYPE = torch.bfloat16
# the values of expert n are those of expert 0, rotated by n times this prime
EXPERT_SHIFT = 7919


@dataclass(frozen=True)
class Shapes:
    """A model on one of `tp` ranks: its configuration, and its tensor table before sharding."""

    config: ModelConfig
    table: dict[str, TensorSpec]
    tp: int

    @cached_property
    def local(self) -> ModelConfig:
        """The configuration with the dimensions of one rank."""
        return replace(
            self.config,
            num_attention_heads=self.config.num_attention_heads // self.tp,
            o_groups=self.config.o_groups // self.tp,
            moe_intermediate_size=self.config.moe_intermediate_size // self.tp,
            vocab_size=self.config.vocab_size // self.tp,
        )

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor's shard on this rank."""
        spec = self.table[name]
        cut = part_shape(spec, self.tp)
        last = spec.shard is not None and spec.shard == len(spec.shape) - 1
        return replace(spec, shape=cut, columns=spec.columns // self.tp if last else spec.columns)

    def parts(self, matrix: str) -> tuple[str, str | None]:
        """Return the keys of a matrix: its weight and its block scale, which is None if its format has none."""
        scales = (name for name in (f"{matrix}.scale", f"{matrix}.weight_scale") if name in self.table)
        return f"{matrix}.weight", next(scales, None)

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the size of these tensors on this rank in bytes."""
        specs = [self.spec(name) for name in names]
        return sum(prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize for spec in specs)

    def layer(self, *, ratio: int | None = None, hashed: bool | None = None) -> str | None:
        """Return the prefix of the first layer with this ratio or this kind of router; None if there is none."""
        for number, found in enumerate(self.config.layer_ratios):
            if ratio in (None, found) and hashed in (None, self.config.is_hash_layer(number)):
                return f"layers.{number}."
        return None


class BenchmarkInputs:
    """Creates inputs on a device for a step of `tokens` tokens at a context of `context` tokens."""

    def __init__(self, shapes: Shapes, tokens: int, context: int, device: torch.device) -> None:
        self.shapes = shapes
        self.config = shapes.local
        self.tokens = tokens
        self.context = max(context, tokens) if tokens > MOST_SEQUENCES else context
        self.device = device
        self._random = torch.Generator(device).manual_seed(0)

    @property
    def sequences(self) -> int:
        """The number of sequences in the step."""
        return self.tokens if self.tokens <= MOST_SEQUENCES else 1

    def cells(self, ratio: int) -> int:
        """Return how many compressed entries a layer's pool can hold."""
        return self.sequences * -(-self.context // BLOCK_TOKENS) * (BLOCK_TOKENS // ratio)

    def visible(self, ratio: int) -> int:
        """Return how many compressed entries the last token sees."""
        return self.context // ratio

    def weight(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a tensor with random, well-scaled values."""
        spec = self.shapes.spec(name)
        ((_, values),) = random_tensors([spec], 0, self.config.n_routed_experts, self.device)
        return values.to(self.device)

    def matrix(self, name: str) -> StoredMatrix:
        """Return a matrix."""
        weight, scale = self.shapes.parts(name)
        second = f"{name}.weight_scale_2"
        return StoredMatrix(
            self.weight(weight),
            None if scale is None else self.weight(scale),
            self.weight(second) if second in self.shapes.table else None,
        )

    def experts(self, name: str) -> StoredMatrix:
        """Return a matrix of all experts, stacked. `name` is the matrix of expert 0."""
        weight, scale, second = self.matrix(name)
        every = None if second is None else second.repeat(self.config.n_routed_experts)
        return StoredMatrix(self._stacked(weight), None if scale is None else self._stacked(scale), every)

    def _stacked(self, first: torch.Tensor) -> torch.Tensor:
        """Stack shifted copies of one expert's values: different for each expert, and fast to create."""
        one = first.view(torch.uint8) if first.element_size() == 1 else first
        count = self.config.n_routed_experts
        every = torch.empty((count, *one.shape), dtype=one.dtype, device=self.device)
        for number in range(count):
            every[number] = one.flatten().roll(number * EXPERT_SHIFT).view(one.shape)
        return every.view(first.dtype)

    def randn(self, *shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        """Return activations of unit variance."""
        return torch.randn(shape, generator=self._random, device=self.device).to(dtype)

    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return distinct, uniformly random experts, int64 [T, k], and their weights, fp32 [T, k]."""
        score = self.randn(self.tokens, self.config.n_routed_experts, dtype=torch.float32)
        weights, experts = score.topk(self.config.num_experts_per_tok, -1)
        return experts, weights.softmax(-1) * self.config.routed_scaling_factor

    @cached_property
    def batch(self) -> Batch:
        """The step's batch: each sequence's next token, or the last `tokens` tokens of one prompt."""
        return self._step(self.context)

    @cached_property
    def opening(self) -> Batch:
        """The same batch, but a prompt is whole: none of its tokens are in the KV cache before the step."""
        if self.tokens <= MOST_SEQUENCES or self.tokens == self.context:
            return self.batch
        return self._step(self.tokens)

    def cache(self) -> Cache:
        """Return an empty KV cache with a slot for each sequence and one layer of each kind."""
        kinds = tuple(sorted(set(self.config.layer_ratios)))
        layers = replace(self.config, num_hidden_layers=len(kinds), compress_ratios=kinds, dspark=None)
        return Cache(layers, Numerics.reference(), slots=self.sequences, device=self.device)

    def _step(self, context: int) -> Batch:
        cache, count = self.cache(), self.tokens // self.sequences
        work = []
        for _ in range(self.sequences):
            sequence = cache.allocate()
            cache.reserve(sequence, context - count)
            cache.advance(sequence, context - count)
            work.append((sequence, [0] * count))
        return make_batch(cache, work)
