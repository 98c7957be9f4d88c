"""Validity checks of the numbers in a configuration, each alone and in combination; no torch."""

from collections.abc import Mapping
from typing import Any

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.formats import FormatName, is_quantised
from dsv4cli.engine.config.keys import MAX_EXPERTS, MAX_LAYERS, MAX_NUMBER, POSITIVE
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.formats import FP4_BLOCK, FP8_BLOCK, KV_BLOCK

REMEDY = "use the config.json of the release"
# key -> least, most, and why no model has another
LIMITS: dict[str, tuple[float, float, str]] = {
    "rope_theta": (2, MAX_NUMBER, "the wave lengths of a head grow from 1 to it"),
    "compress_rope_theta": (2, MAX_NUMBER, "the wave lengths of a head grow from 1 to it"),
    "rope_scaling.factor": (1, 2**20, "YaRN divides frequencies by it"),
    "rope_scaling.beta_fast": (2**-10, 2**20, "YaRN counts turns with it"),
    "rope_scaling.beta_slow": (2**-10, 2**20, "YaRN counts turns with it"),
    "sliding_window": (1, 8192, "a step lists the window of each of its tokens"),
    "hc_sinkhorn_iters": (1, 1000, "the weights of streams settle in 20"),
    "routed_scaling_factor": (2**-20, 2**20, "the routed experts are weighted with it"),
    "hc_eps": (0, 1, "it only keeps sums away from 0"),
    "rms_norm_eps": (0, 1, "it only keeps sums away from 0"),
    "dspark_markov_rank": (1, MAX_NUMBER, "the drafter's head is as wide"),
    "dspark_block_size": (1, ROLLBACK, "this many tokens can be removed at once"),
}


def number(values: Mapping[str, Any], key: str, kind: type, where: str, inside: str = "") -> Any:
    """Return a number of the configuration, converted to `kind` (int or float) and checked against its limits.

    Args:
        values: the object that holds the number.
        key: its key in `values`.
        kind: int or float.
        where: names the file in errors.
        inside: name of the enclosing object with a trailing dot, '' for the root.

    Raises CheckpointError for a key that is missing or a number that is not allowed.
    """
    name = inside + key
    if key not in values:
        raise CheckpointError(f"{where} lacks the key {key!r}", REMEDY)
    value = values[key]
    if type(value) not in (int, float) or not (key in POSITIVE) <= value <= MAX_NUMBER or value != kind(value):
        raise CheckpointError(f"{where}: {name} is {value!r}, which is not allowed", REMEDY)
    least, most, why = LIMITS.get(name, (0, MAX_NUMBER, ""))
    if not least <= value <= most:
        bounds = f"between {least:,} and {most:,}: {why}"
        raise CheckpointError(f"{where}: {name} is {value!r}, which is not {bounds}", REMEDY)
    return kind(value)


def check_config(config: ModelConfig, nextn: int, where: str) -> None:
    """Raise CheckpointError for the first numbers that contradict each other.

    nextn: number of MTP draft stages that the configuration states.
    """
    rules = {**_of_layers(config, nextn), **_of_widths(config), **_of_tokens(config)}
    for sentence, holds in rules.items():
        if not holds:
            raise CheckpointError(f"{where}: {sentence}", REMEDY)


def _of_layers(config: ModelConfig, nextn: int) -> dict[str, bool]:
    layers, stages = config.num_hidden_layers, config.draft_stages
    expected = stages if config.dspark else nextn
    targets = config.dspark.target_layer_ids if config.dspark else (0,)
    return {
        f"compress_ratios has {len(config.compress_ratios)} entries for {layers} layers and {expected} draft stages": (
            stages == expected and stages >= 0 and (stages > 0 or not config.dspark)
        ),
        f"{layers:,} layers with {config.n_routed_experts:,} experts each are more than any model has": (
            layers <= MAX_LAYERS and layers * config.n_routed_experts <= MAX_EXPERTS
        ),
        f"compress_ratios of the draft stages are {config.compress_ratios[layers:]}, expected zeros": not any(
            config.compress_ratios[layers:]
        ),
        f"num_experts_per_tok is {config.num_experts_per_tok}, more than n_routed_experts {config.n_routed_experts}": (
            config.num_experts_per_tok <= config.n_routed_experts
        ),
        f"dspark_target_layer_ids is {[*targets]}, which names a layer that does not exist": all(
            0 <= layer < layers for layer in targets
        ),
        f"dspark_target_layer_ids is {[*targets]}: it must name at least one layer, and none twice": (
            0 < len(targets) == len({*targets})
        ),
    }


def _of_widths(config: ModelConfig) -> dict[str, bool]:
    head, rope, index = config.head_dim, config.qk_rope_head_dim, config.index_head_dim
    return {
        f"num_attention_heads = {config.num_attention_heads} is not divisible by o_groups = {config.o_groups}": (
            config.num_attention_heads % config.o_groups == 0
        ),
        f"qk_rope_head_dim is {rope}, which is odd or larger than head_dim {head} or index_head_dim {index}": (
            rope % 2 == 0 and rope <= min(head, index)
        ),
        f"head_dim is {head} and qk_rope_head_dim {rope}: the {head - rope} values between them are rounded in blocks "
        f"of {KV_BLOCK}": head > rope and (head - rope) % KV_BLOCK == 0,
        f"index_head_dim is {index}: its rotation and rounding need a power of two from {FP4_BLOCK} on": (
            index >= FP4_BLOCK and index & (index - 1) == 0
        ),
    }


def _of_tokens(config: ModelConfig) -> dict[str, bool]:
    vocabulary, noise = config.vocab_size, config.dspark.noise_token_id if config.dspark else 0
    tokens = {"bos_token_id": config.bos_token_id, "dspark_noise_token_id": noise}
    tokens |= {"eos_token_id": max(config.eos_token_ids)}
    return {
        f"{key} is {token}, and the vocabulary of {vocabulary:,} tokens ends before it": token < vocabulary
        for key, token in tokens.items()
    }


def check_blocks(config: ModelConfig, linear: FormatName, experts: FormatName, where: str) -> None:
    """Raise CheckpointError for the first width that is not a whole number of activation quantization blocks.

    Only the inputs of FP8 and FP4 weights are quantized in blocks. linear, experts: storage formats.
    """
    sizes: dict[str, int] = {}
    if is_quantised(linear) or is_quantised(experts):
        sizes |= {"hidden_size": config.hidden_size, "moe_intermediate_size": config.moe_intermediate_size}
    if is_quantised(linear):
        sizes |= {"q_lora_rank": config.q_lora_rank, "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank}
    for key, size in sizes.items():
        if size % FP8_BLOCK:
            raise CheckpointError(
                f"{where}: {key} is {size}, but inputs of FP8 and FP4 weights are rounded in blocks of {FP8_BLOCK}",
                REMEDY,
            )
