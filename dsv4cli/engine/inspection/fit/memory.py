"""How many bytes a model takes on one device: weights, cache and the tensors of a step; no torch.

Everything follows from the table (`layout`), from what `cache.py` keeps and from what the reference kernels allocate.
Where tensor parallelism cuts, a rank has its part; the cache and the tensors that the table does not cut are whole on
every rank.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_STEP_TOKENS, ROLLBACK
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.step import ACTIVATION, FP32, WidestStep
from dsv4cli.kernels.formats import FP4_BLOCK


@dataclass(frozen=True)
class Workload:
    """What is asked of the model: `batch` sequences of `context` tokens each, prompts in chunks of `chunk` tokens."""

    context: int
    batch: int
    chunk: int

    @property
    def tokens(self) -> int:
        """The most tokens of one step, as the schedule joins them."""
        return min(self.batch * min(self.chunk, self.context), MAX_STEP_TOKENS)


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on each of `ranks` devices. whole: the part that every rank holds, by family."""

    ranks: int
    nbytes: int
    whole: dict[str, int]


def weigh(specs: Collection[TensorSpec], ranks: int) -> Weights:
    """Adds up one rank's part of the table, which `ranks` must divide."""
    total, whole = 0, Counter[str]()
    for spec in specs:
        nbytes = prod(part_shape(spec, ranks)) * DTYPE_BITS[spec.dtype] // 8
        total += nbytes
        if spec.shard is None:
            whole[spec.family] += nbytes
    return Weights(ranks, total, dict(whole.most_common()))


def ring_bytes(config: ModelConfig) -> int:
    """What one sequence keeps whatever its length: window rings and open windows of every layer (see `cache.Cache`)."""
    total = 0
    for ratio in config.compress_ratios:
        total += (config.sliding_window + ROLLBACK) * config.head_dim * ACTIVATION
        for width in _entry_widths(config, ratio):
            span, channels = (2 * ratio, 2 * width) if ratio == 4 else (ratio, width)
            total += 2 * (span + ROLLBACK) * channels * FP32  # values and scores
    return total


def block_bytes(config: ModelConfig) -> int:
    """The compressed entries of BLOCK_TOKENS tokens in all layers."""
    # index keys are FP4: two codes a byte, one byte for the scale of a block
    index = config.index_head_dim // 2 + config.index_head_dim // FP4_BLOCK
    entry = {0: 0, 4: config.head_dim * ACTIVATION + index, 128: config.head_dim * ACTIVATION}
    return sum(BLOCK_TOKENS // ratio * entry[ratio] for ratio in config.compress_ratios if ratio)


def _entry_widths(config: ModelConfig, ratio: int) -> list[int]:
    return {0: [], 4: [config.head_dim, config.index_head_dim], 128: [config.head_dim]}[ratio]


def blocks(load: Workload) -> int:
    """Blocks of the pools when every sequence has its whole context: their number doubles from 8."""
    needed = load.batch * -(-load.context // BLOCK_TOKENS)
    count = 8
    while count < needed:
        count *= 2
    return count


def cache_bytes(config: ModelConfig, load: Workload) -> int:
    """The cache at its largest: the rings of all sequences and the pools of compressed entries."""
    return load.batch * ring_bytes(config) + blocks(load) * block_bytes(config)


def workspace_bytes(config: ModelConfig, formats: Formats, load: Workload, ranks: int, on_gpu: bool) -> int:
    """An upper estimate of what a step, or a pool of entries that doubles, takes beside weights and cache."""
    if ranks > 1:
        config = replace(
            config,
            num_attention_heads=config.num_attention_heads // ranks,
            o_groups=config.o_groups // ranks,
            moe_intermediate_size=config.moe_intermediate_size // ranks,
            vocab_size=config.vocab_size // ranks,
        )
    step = WidestStep(config, formats, tokens=load.tokens, batch=load.batch, context=load.context, on_gpu=on_gpu)
    entries = max((BLOCK_TOKENS // ratio for ratio in config.compress_ratios if ratio), default=0)
    return max(step.peak(), blocks(load) * entries * config.head_dim * ACTIVATION)
