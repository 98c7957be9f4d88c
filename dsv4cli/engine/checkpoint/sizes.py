"""Size of a model from its tensor table: parameters, active parameters per token, bytes; no torch."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.kernels.ggml.types import BITS as BLOCK_BITS

BITS: Mapping[str, float] = BLOCK_BITS | DTYPE_BITS


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes as stored.

    Scales and lookup tables are not parameters; FP4 counts unpacked. The mappings are from family or dtype to bytes,
    largest first.

    Attributes:
        main: parameters without the drafter.
        active: main parameters used for one token, with only the selected routed experts.
        active_without_embedding: `active` without the input embedding, of which a token reads one row.
        drafter_bytes: the part of `nbytes` under `mtp.`.
    """

    tensors: int
    parameters: int
    main: int
    active: int
    active_without_embedding: int
    nbytes: int
    drafter_bytes: int
    by_family: Mapping[str, int]
    by_dtype: Mapping[str, int]


def measure(config: ModelConfig, specs: Collection[TensorSpec]) -> Sizes:
    """Sum up the tensor table of a model, `expected_tensors(config, …).values()`."""
    main = [spec for spec in specs if not spec.name.startswith("mtp.")]
    main_count = sum(spec.count for spec in main)
    routed = sum(spec.count for spec in main if spec.expert is not None)
    # all routed experts have one size
    active = main_count - routed + routed * config.num_experts_per_tok // config.n_routed_experts
    nbytes = sum(map(stored_bytes, specs))
    return Sizes(
        tensors=len(specs),
        parameters=sum(spec.count for spec in specs),
        main=main_count,
        active=active,
        active_without_embedding=active - config.vocab_size * config.hidden_size,
        nbytes=nbytes,
        drafter_bytes=nbytes - sum(map(stored_bytes, main)),
        by_family=_add_up((spec.family, stored_bytes(spec)) for spec in specs),
        by_dtype=_add_up((spec.dtype, stored_bytes(spec)) for spec in specs),
    )


def stored_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a stored tensor, also for GGUF types."""
    return int(prod(spec.shape) * BITS[spec.dtype]) // 8


def _add_up(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for key, value in pairs:
        sums[key] += value
    return dict(sums.most_common())
