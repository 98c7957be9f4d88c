"""Memory that a device needs besides weights: cache, a step's tensors, and what CUDA and Triton load; no torch.

Loading keeps this memory free, and `inspect --fit` shows it. Every rank has the whole cache and all tensors that tensor
parallelism does not shard.
"""

from dataclasses import dataclass, replace

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, DEFAULT_CHUNK, MAX_STEP_TOKENS, ROLLBACK, divides_from
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.weights.reference_step import WidestStep
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.shares import rows_each

# prefill chunk sizes in tokens, the preferred first: a larger one is faster and needs more memory
CHUNKS = (MAX_STEP_TOKENS, DEFAULT_CHUNK, 2048, 1024, 512, 256, 128, 64)
# assumed context in tokens if lengths are not known
FAR = 131_072
# bytes of loaded kernels and CUDA graphs (0.2 GB on an H200 with torch 2.11), and of NCCL with several ranks
OVERHEAD, NCCL = 6 * 10**8, 10**9
# allocator fragmentation is 1 / GAPS of a step's tensors (H200, torch 2.11: 24 % of 1.2 GB and of 2.4 GB)
GAPS = 4
# bytes of an activation (bf16), of fp32, of an index (int64)
ACTIVATION, FP32, INDEX = 2, 4, 8
# entries per token, with their numbers, that top-k keeps while it reads the others
KEPT = 8192


@dataclass(frozen=True)
class Workload:
    """The expected workload of a model: `batch` sequences of `context` tokens each.

    Attributes:
        chunk: tokens of a prefill chunk; None for the largest that fits.
        serves: whether many clients share `cache` bytes of KV cache.
        cache: bytes of KV cache of a server; None for half of the memory that the weights leave.
    """

    context: int = FAR
    batch: int = 1
    chunk: int | None = None
    serves: bool = False
    cache: int | None = None

    def tokens(self, chunk: int) -> int:
        """Return the largest number of tokens in one step with this chunk size, as the scheduler batches them."""
        return min(self.batch * min(chunk, self.context), MAX_STEP_TOKENS)


@dataclass(frozen=True)
class Reserve:
    """Memory needed besides weights, in bytes, with prefill chunks of `chunk` tokens.

    Attributes:
        cache: the cache.
        step: the peak of a step's tensors, with fragmentation.
        overhead: CUDA, kernels and NCCL.
    """

    chunk: int
    cache: int
    step: int
    overhead: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.cache + self.step + self.overhead


def reserves(
    config: ModelConfig,
    formats: Formats,
    load: Workload,
    ranks: int,
    *,
    on_gpu: bool = True,
    triton: bool = True,
    divides: bool = True,
) -> tuple[Reserve, ...]:
    """Return the memory that each of `ranks` devices needs besides weights, for each chunk size, the preferred first.

    Args:
        load: the workload; if it names a chunk size, that is the only one.
        triton: whether the run uses Triton's kernels; otherwise the reference kernels.
        divides: whether ranks divide the rows of large steps.
    """
    found, overhead = [], 0
    if on_gpu:
        overhead = OVERHEAD + (NCCL if ranks > 1 else 0)
    for chunk in CHUNKS if load.chunk is None else (load.chunk,):
        shares = divides and ranks > 1 and load.tokens(chunk) >= divides_from(ranks)
        step = step_bytes(config, formats, load, chunk, ranks, on_gpu=on_gpu, triton=on_gpu and triton, divides=shares)
        step += step // GAPS if on_gpu else 0
        found.append(Reserve(chunk, _held(config, load, step + overhead), step, overhead))
    return tuple(found)


def _held(config: ModelConfig, load: Workload, beside: int) -> int:
    """Return the maximum bytes of the cache.

    A server without a cache size gives the cache half of the memory besides weights, as much as all other uses have.
    """
    if not load.serves:
        return cache_bytes(config, load)
    rings = load.batch * ring_bytes(config)
    return rings + (rings + beside if load.cache is None else load.cache)


def ring_bytes(config: ModelConfig) -> int:
    """Return a sequence's bytes at any length: window rings and incomplete groups (see `cache.Cache`)."""
    total = 0
    for ratio in config.compress_ratios:
        total += (config.sliding_window + ROLLBACK) * config.head_dim * ACTIVATION
        for width in _entry_widths(config, ratio):
            span, channels = (2 * ratio, 2 * width) if ratio == CSA else (ratio, width)
            total += 2 * (span + ROLLBACK) * channels * FP32  # values and scores
    return total


def block_bytes(config: ModelConfig) -> int:
    """Return the bytes of the compressed entries of BLOCK_TOKENS tokens, in all layers."""
    # index keys are FP4: two codes per byte, and one scale byte per block
    index = config.index_head_dim // 2 + config.index_head_dim // FP4_BLOCK
    entry = {0: 0, 4: config.head_dim * ACTIVATION + index, 128: config.head_dim * ACTIVATION}
    return sum(BLOCK_TOKENS // ratio * entry[ratio] for ratio in config.compress_ratios if ratio)


def _entry_widths(config: ModelConfig, ratio: int) -> list[int]:
    return {0: [], 4: [config.head_dim, config.index_head_dim], 128: [config.head_dim]}[ratio]


def blocks(load: Workload) -> int:
    """Return the number of cache blocks if every sequence uses its whole context; pools double from 8 blocks."""
    needed = load.batch * -(-load.context // BLOCK_TOKENS)
    count = 8
    while count < needed:
        count *= 2
    return count


def cache_bytes(config: ModelConfig, load: Workload) -> int:
    """Return the bytes of the cache at its largest: rings of all sequences, and pools of compressed entries."""
    return load.batch * ring_bytes(config) + blocks(load) * block_bytes(config)


def step_bytes(
    config: ModelConfig,
    formats: Formats,
    load: Workload,
    chunk: int,
    ranks: int,
    *,
    on_gpu: bool,
    triton: bool,
    divides: bool,
) -> int:
    """Return an upper bound of a step's memory, or of doubling an entry pool, besides weights and cache.

    Args:
        divides: whether the ranks divide the rows of the step's streams.
    """
    if ranks > 1:
        config = replace(
            config,
            num_attention_heads=config.num_attention_heads // ranks,
            o_groups=config.o_groups // ranks,
            moe_intermediate_size=config.moe_intermediate_size // ranks,
            vocab_size=config.vocab_size // ranks,
        )
    tokens = load.tokens(chunk)
    if triton:
        widest = TritonStep(config, tokens, load.batch, load.context, ranks, divides).peak()
    else:
        widest = WidestStep(
            config, formats, tokens=tokens, batch=load.batch, context=load.context, on_gpu=on_gpu
        ).peak()
    entries = max((BLOCK_TOKENS // ratio for ratio in config.compress_ratios if ratio), default=0)
    return max(widest, blocks(load) * entries * config.head_dim * ACTIVATION)


class TritonStep:
    """Peak memory of each part of a step with Triton's kernels: the bytes of the tensors alive at the same time.

    `config` has one rank's shard of the dimensions.
    """

    def __init__(self, config: ModelConfig, tokens: int, batch: int, context: int, ranks: int, divides: bool) -> None:
        """divides: as in `step_bytes`."""
        self.config, self.tokens, self.batch, self.ranks, self.divides = config, tokens, batch, ranks, divides
        self.entries = {ratio: context // ratio if ratio in config.compress_ratios else 0 for ratio in (CSA, HCA)}
        self.hidden = ACTIVATION * tokens * config.hidden_size
        # rows of the streams that a rank holds, and their bytes in one stream
        self.rows = rows_each(tokens, ranks) if divides else tokens
        self.own = ACTIVATION * self.rows * config.hidden_size
        self.queries = ACTIVATION * tokens * config.num_attention_heads * config.head_dim

    def peak(self) -> int:
        """Return the bytes of the batch's index lists, which live for the whole step, plus the largest peak."""
        return self.lists() + max(self.indexer(), self.attention(), self.experts(), self.head())

    def lists(self) -> int:
        """Return the bytes of window rows, HCA entries, ids, positions, cells, rotations and the entry table."""
        c, listed = self.config, self.entries[HCA]
        rows = 12 + c.sliding_window + (c.sliding_window + listed + 2 * c.qk_rope_head_dim)
        return INDEX * (self.tokens * rows + self.batch * sum(self.entries.values()))

    def projected(self) -> int:
        """Return the bytes of attention's inputs.

        These are the streams before and in a block and its input; latent queries, keys, window keys, compressor rows
        and the indexer's weights; queries, and the indexer's queries for this rank's rows.
        """
        c = self.config
        csa = 4 in c.compress_ratios
        channels = 4 * (c.head_dim + c.index_head_dim) + c.index_n_heads if csa else 2 * c.head_dim
        heads = c.index_n_heads * c.index_head_dim if csa else 0
        narrow = ACTIVATION * (c.q_lora_rank + 2 * c.head_dim) + FP32 * channels
        return (2 * c.hc_mult + 2) * self.own + self.tokens * narrow + self.queries + ACTIVATION * self.rows * heads

    def indexer(self) -> int:
        """Return the peak memory of the indexer: scores of a rank's rows, and the selection for these and all rows."""
        entries, k = self.entries[CSA], self.config.index_topk
        kept = min(KEPT, entries) if entries > KEPT else 0
        operands = self.config.index_n_heads * (self.config.index_head_dim + ACTIVATION)
        chosen = INDEX * (k + self.config.sliding_window)
        own = self.rows * (operands + ACTIVATION * (entries + kept) + FP32 * kept + chosen)
        return self.projected() + own + (self.tokens * chosen if self.divides else 0)

    def attention(self) -> int:
        """Return the peak memory of attention.

        It is the lists, and the heads with the queries; then the groups' output, also rounded, with the layer's output
        or with a dequantized matrix.
        """
        c = self.config
        inner = c.o_groups * c.o_lora_rank
        lists = INDEX * self.tokens * (c.sliding_window + min(c.index_topk, self.entries[CSA]))
        widened = ACTIVATION * c.num_attention_heads * c.head_dim * c.o_lora_rank
        summed = self.hidden + (self.own if self.divides else 2 * self.hidden if self.ranks > 1 else 0)
        out = self.tokens * inner * (ACTIVATION + 1) + summed
        return self.projected() + lists + self.queries + max(out, ACTIVATION * self.tokens * inner + widened)

    def experts(self) -> int:
        """Return the peak memory of the experts.

        It is the streams before and after attention and in the block; the input, also rounded; the outputs of the
        shared and the routed experts with their inner values; their sum, which is fp32 with several ranks.
        """
        c, k = self.config, self.config.num_experts_per_tok
        inner = ACTIVATION * self.tokens * k * c.moe_intermediate_size
        outputs = k * self.hidden
        summed = 2 * self.hidden + (self.own if self.ranks > 1 else 0)
        return (3 * c.hc_mult + 3) * self.own + 2 * self.hidden + outputs + max(2 * inner, summed)

    def head(self) -> int:
        """Return the peak memory of the last streams, the sequences' logits and sampling.

        Sampling holds logits, with biases and penalties, of the likeliest tokens only, noise, probabilities and two
        temporary tensors, beside the token counts of penalized requests.
        """
        return (
            self.config.hc_mult * (2 * self.own + self.hidden)
            + 9 * FP32 * self.batch * self.config.vocab_size * self.ranks
        )
