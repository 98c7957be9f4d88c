"""Estimates of throughput from the bytes that a step reads from each tier of memory, and its bandwidth; no torch.

A decode step takes the time to read its weights at a share of the bandwidth, plus the time of launches, which no weight
hides; experts that are not on the GPU come over the host link one after another. The constants are fitted to dsv4's
measurements on H200 and H100 (docs/internals/performance.md); the tests compare them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.inspection.fit.cards import CARDS, CardSpec, card_named
from dsv4cli.engine.inspection.fit.cluster import KNOWN
from dsv4cli.engine.inspection.fit.share import Share
from dsv4cli.engine.weights.sizes import RankSizes

# share of a card's nominal bandwidth that a step's reads reach, and of the host link
MEMORY_SHARE, LINK_SHARE = 0.75, 0.75
# experts to copy, of those that random choice would miss: steps reuse recent ones; share of the link on many ranks
MISSES, LINK_OF_MANY = 0.85, 0.85
# seconds per layer for each further row; factors per doubling of the ranks
ROW, LAUNCHES_PER_DOUBLING, ROW_PER_DOUBLING = 1.2e-6, 0.24, 0.9
# prefill: factor on several ranks, and the seconds per layer and chunk for launches
RANKS_SHARE, CHUNK_LAUNCHES = 0.8, 6.3e-3
# factors for the low and the high end of an estimate: calibrated to measurements, or by data sheet alone
CALIBRATED, BY_DATA_SHEET = (0.8, 1.25), (0.6, 1.35)


@dataclass(frozen=True)
class KernelRates:
    """How fast the kernels of a form are.

    Attributes:
        layer: seconds per layer of a decode step that no bandwidth shortens: launches, and waits in the kernels.
        compute: share of the nominal bf16 rate that prefill reaches.
        cards: the cards on which they were measured, so that estimates are calibrated to them.
        elsewhere: those of GPUs other than Hopper, if these lack some of the kernels.
    """

    layer: float
    compute: float
    cards: frozenset[str]
    elsewhere: "KernelRates | None" = None


# for the official form and NVFP4
STORED = KernelRates(44e-6, 0.55, frozenset({"H100", "H200"}))
# for GGUF blocks; elsewhere with the times of other GPUs' kernels on an H200: 6.76 ms per token, and for the experts of
# 8,192 tokens 33 ms per layer instead of 7
BLOCKS = KernelRates(70e-6, 0.40, frozenset({"H200"}), elsewhere=KernelRates(95e-6, 0.125, frozenset()))


@dataclass(frozen=True)
class Tiers:
    """Bytes that one rank reads in a decode step, by tier."""

    gpu: float
    host: float


@dataclass(frozen=True)
class Range:
    """A throughput between two bounds, in tokens/s over all sequences."""

    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """Estimated throughput of one way to run a model.

    Attributes:
        decode: by batch size.
        prefill: of a prompt that fills the chunks.
        read: bytes per decode step of one sequence, by tier.
        calibrated: whether kernels of this form were measured on this card.
    """

    card: str
    decode: dict[int, Range]
    prefill: Range
    read: Tiers
    calibrated: bool


def estimate(
    config: ModelConfig, sizes: RankSizes, share: Share, batches: Sequence[int], kernels: KernelRates
) -> Speed | None:
    """Return the speed on the GPUs of a share; None for a CPU and for unknown cards."""
    names = {card_named(device.name) for device in share.devices}
    name = next(iter(names)) if len(names) == 1 else None
    if name is None or not share.on_gpu:
        return None
    card, calibrated = CARDS[name], name in kernels.cards
    low, high = CALIBRATED if calibrated else BY_DATA_SHEET
    if KNOWN.get(name) != "hopper" and kernels.elsewhere is not None:
        kernels = kernels.elsewhere

    def spread(rate: float) -> Range:
        return Range(rate * low, rate * high)

    decode = {batch: spread(batch / step_seconds(config, sizes, share, card, batch, kernels)) for batch in batches}
    prefill = spread(share.chunk / chunk_seconds(config, sizes, share, card, kernels))
    return Speed(name, decode, prefill, step_bytes(config, sizes, share, 1), calibrated)


def step_bytes(config: ModelConfig, sizes: RankSizes, share: Share, batch: int) -> Tiers:
    """Return the bytes of weights that a decode step of `batch` rows reads on one rank, with random experts."""
    missed = 1 - config.num_experts_per_tok / sizes.experts
    used = sizes.experts * (1 - missed**batch)
    experts = sizes.layers * used * sizes.expert
    return Tiers(sizes.rest + experts, experts * (1 - _resident(sizes, share)) * MISSES)


def _resident(sizes: RankSizes, share: Share) -> float:
    """Return the share of the experts that is on the GPU."""
    division = share.placement.division if share.placement else None
    return 1.0 if division is None else division.rows / sizes.experts


def step_seconds(
    config: ModelConfig, sizes: RankSizes, share: Share, card: CardSpec, batch: int, kernels: KernelRates
) -> float:
    """Return the seconds of a decode step."""
    tiers, layers, doublings = step_bytes(config, sizes, share, batch), config.num_hidden_layers, log2(share.ranks)
    launches = kernels.layer * (1 + LAUNCHES_PER_DOUBLING * doublings)
    launches += ROW * (1 + ROW_PER_DOUBLING * doublings) * (batch - 1)
    read = tiers.gpu / (card.bandwidth * MEMORY_SHARE) + tiers.host / link_rate(card, share.ranks)
    return layers * launches + read


def chunk_seconds(config: ModelConfig, sizes: RankSizes, share: Share, card: CardSpec, kernels: KernelRates) -> float:
    """Return the seconds of a prefill chunk, which uses every expert."""
    ranks, layers = share.ranks, config.num_hidden_layers
    flops = 2 * active_weights(config) * share.chunk / ranks
    compute = flops / (card.flops * kernels.compute * (RANKS_SHARE if ranks > 1 else 1))
    read = sizes.main / (card.bandwidth * MEMORY_SHARE) + share.host / link_rate(card, ranks)
    return max(compute + read, layers * CHUNK_LAUNCHES * (1 if ranks > 2 else 0))


def link_rate(card: CardSpec, ranks: int) -> float:
    """Return the bytes/s that each of several GPUs of one host reads from host memory."""
    return card.link * LINK_SHARE * (LINK_OF_MANY if ranks > 2 else 1)


def active_weights(config: ModelConfig) -> int:
    """Return the number of weights that a token multiplies: attention, its experts and the shared one."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads * config.head_dim, config.q_lora_rank
    output = config.o_groups * config.o_lora_rank
    attention = hidden * (rank + config.head_dim) + rank * heads + heads // config.o_groups * output + output * hidden
    experts = 3 * hidden * config.moe_intermediate_size * (config.num_experts_per_tok + 1)
    return config.num_hidden_layers * (attention + experts)
