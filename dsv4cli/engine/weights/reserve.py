"""Memory that a device needs besides weights: cache, a step's tensors, and what CUDA and Triton load; no torch.

Loading keeps this memory free, and `inspect --fit` shows it. Every rank has the whole cache and all tensors that tensor
parallelism does not shard.
"""

from dataclasses import astuple, dataclass, replace

from dsv4cli.engine.config.capacity import (
    BLOCK_TOKENS,
    DEFAULT_CHUNK,
    MAX_STEP_TOKENS,
    ROLLBACK,
    captured_rows,
    columns_of,
    divides_from,
)
from dsv4cli.engine.config.layer_kind import CSA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.weights.reference_step import ACTIVATION, FP32, WidestStep
from dsv4cli.engine.weights.triton_step import TritonStep
from dsv4cli.kernels.formats import FP4_BLOCK

# prefill chunk sizes in tokens, the preferred first: a larger one is faster and needs more memory
CHUNKS = (MAX_STEP_TOKENS, DEFAULT_CHUNK, 2048, 1024, 512, 256, 128, 64)
# assumed context in tokens if lengths are not known
FAR = 131_072
# bytes of loaded kernels and decode graphs (0.2 GB on an H200 with torch 2.11), and of NCCL with several ranks
OVERHEAD, NCCL = 6 * 10**8, 10**9
# allocator fragmentation is 1 / GAPS of a step's tensors (H200, torch 2.11: 24 % of 1.2 GB and of 2.4 GB)
GAPS = 4


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
        overhead: CUDA, kernels, NCCL and a server's captured prefill steps.
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
    gguf: bool = False,
) -> tuple[Reserve, ...]:
    """Return the memory that each of `ranks` devices needs besides weights, for each chunk size, the preferred first.

    Args:
        load: the workload; if it names a chunk size, that is the only one.
        triton: whether the run uses Triton's kernels; otherwise the reference kernels.
        divides: whether ranks divide the rows of large steps.
        gguf: whether matrices are GGUF blocks. On a CPU they are dequantized as bf16 is, and the intermediate values of
            decoding, a few MB, are not counted.
    """
    if gguf:
        formats = Formats(*("bf16" if form == "f32" else form for form in astuple(formats)))
    found, overhead = [], 0
    if on_gpu:
        overhead = OVERHEAD + (NCCL if ranks > 1 else 0)
        if triton and load.serves:
            overhead += prefill_graph_bytes(config, load, ranks, divides, gguf)
    for chunk in CHUNKS if load.chunk is None else (load.chunk,):
        shares = divides and ranks > 1 and load.tokens(chunk) >= divides_from(ranks)
        step = step_bytes(
            config, formats, load, chunk, ranks, on_gpu=on_gpu, triton=on_gpu and triton, divides=shares, gguf=gguf
        )
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
    gguf: bool,
) -> int:
    """Return an upper bound of a step's memory, or of doubling an entry pool, besides weights and cache.

    Args:
        divides: whether the ranks divide the rows of the step's streams.
        gguf: whether matrices are GGUF blocks.
    """
    config, tokens = _shard(config, ranks), load.tokens(chunk)
    if triton:
        widest = TritonStep(config, tokens, load.batch, load.context, ranks, divides, gguf).peak()
    else:
        widest = WidestStep(
            config, formats, tokens=tokens, batch=load.batch, context=load.context, on_gpu=on_gpu
        ).peak()
    entries = max((BLOCK_TOKENS // ratio for ratio in config.compress_ratios if ratio), default=0)
    return max(widest, blocks(load) * entries * config.head_dim * ACTIVATION)


def prefill_graph_bytes(config: ModelConfig, load: Workload, ranks: int, divides: bool, gguf: bool = False) -> int:
    """Return the memory of a server's captured prefill steps: the tensors of the largest, the outputs of the others.

    The temporary tensors of all graphs share the memory of the largest, with the fragmentation of other steps.
    """
    shard = _shard(config, ranks)

    def step(rows: int) -> TritonStep:
        shares = divides and ranks > 1 and rows >= divides_from(ranks)
        return TritonStep(shard, rows, load.batch, load.context, ranks, shares, gguf)

    *others, largest = captured_rows(columns_of(load.context), ranks)
    total = step(largest).layers() + sum(step(rows).output() for rows in others)
    return total + total // GAPS


def _shard(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return one rank's dimensions."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        o_groups=config.o_groups // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
        vocab_size=config.vocab_size // ranks,
    )
