"""The configuration as GGUF metadata: keys under `deepseek4.`, written and read; no torch.

Source: llama.cpp, src/llama-arch.cpp and src/models/deepseek4.cpp; ds4 reads the same keys and vocab_size.
"""

import reprlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4cli.engine.config.keys import RELEASE_KEY
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.read import parse_config
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

ARCHITECTURE = "deepseek4"
# official key -> GGUF's
NUMBERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "qk_rope_head_dim": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "o_lora_rank": "attention.output_lora_rank",
    "o_groups": "attention.output_group_count",
    "sliding_window": "attention.sliding_window",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_hash_layers": "hash_layer_count",
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "routed_scaling_factor": "expert_weights_scale",
    "rope_theta": "rope.freq_base",
    "compress_rope_theta": "attention.compress_rope_freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# what every model of the architecture has; 4 is sqrtsoftplus
FIXED: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_gating_func": 4,
    "rope.scaling.type": "yarn",
}
RATIOS, CLAMPS = "attention.compress_ratios", ("swiglu_clamp_exp", "swiglu_clamp_shexp")
BOS, EOS, EOT = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"
TOKENS = "tokenizer.ggml.tokens"
# dsv4's own key, as RELEASE_KEY in config.json
RELEASE = "dsv4.release"
REMEDY = "convert the model again: `dsv4 convert flash OUT --to gguf`"


def gguf_values(config: ModelConfig) -> dict[str, Any]:
    """Return every metadata key of a model without its drafter, with the types that llama.cpp and ds4 expect.

    `swiglu_clamp_*` are lists with one number per layer.
    """
    assert config.drafter == "none"
    values: dict[str, Any] = {key: getattr(config, name) for name, key in NUMBERS.items()}
    values |= {key: getattr(config.yarn, name) for name, key in YARN.items()} | FIXED
    values |= {"attention.value_length": config.head_dim, "embedding_length_out": config.hc_mult * config.hidden_size}
    values |= {RATIOS: list(config.layer_ratios)}
    values |= {key: [float(config.swiglu_limit)] * config.num_hidden_layers for key in CLAMPS}
    own = {} if config.release is None else {RELEASE: config.release}
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()} | own


def end_tokens(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of the BOS and EOS tokens; a second EOS token becomes the end-of-turn token."""
    ends = dict(zip((EOS, EOT), config.eos_token_ids, strict=False))
    return {BOS: config.bos_token_id, **ends}


def check_architecture(metadata: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint for a model of another architecture."""
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedCheckpoint(
            f"{where} is a GGUF model of the architecture {reprlib.repr(architecture)}, not {ARCHITECTURE!r}",
            "run it with llama.cpp, or use a DeepSeek-V4 model",
        )


def parse_gguf(metadata: Mapping[str, Any], where: str, stages: int = 0) -> ModelConfig:
    """Return the configuration of a model with this number of MTP stages; `where` names it in errors.

    Raises UnsupportedCheckpoint for another architecture, CheckpointError for a key that is missing or contradicts
    another.
    """
    check_architecture(metadata, where)
    lacking = list(missing_keys(metadata))
    if lacking:
        others = f" and {len(lacking) - 1} more keys" if len(lacking) > 1 else ""
        raise CheckpointError(f"{where} lacks the key {lacking[0]}{others}, as early converters did", REMEDY)
    for key, value in FIXED.items():
        found = metadata.get(f"{ARCHITECTURE}.{key}", value)
        if found != value:
            raise UnsupportedCheckpoint(f"{where}: {ARCHITECTURE}.{key} is {found!r}; DeepSeek-V4 has {value!r}")
    values = dict(_official(metadata, where))
    if stages and isinstance(values["compress_ratios"], list):
        ratios = values["compress_ratios"][: values["num_hidden_layers"]]
        values |= {"compress_ratios": ratios + [0] * stages, "num_nextn_predict_layers": stages}
    return parse_config(values, where, drafter_stored=stages > 0)


def missing_keys(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the required keys that the metadata lacks; vocab_size follows from the token list."""
    for key in (*NUMBERS.values(), *YARN.values(), RATIOS, CLAMPS[0]):
        derived = key == NUMBERS["vocab_size"] and isinstance(metadata.get(TOKENS), list)
        if f"{ARCHITECTURE}.{key}" not in metadata and not derived:
            yield f"{ARCHITECTURE}.{key}"


def _official(metadata: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the official keys of the root config.json with their values."""
    values = {key: metadata.get(f"{ARCHITECTURE}.{key}") for key in (*NUMBERS.values(), *YARN.values(), RATIOS)}
    if values["vocab_size"] is None:
        values["vocab_size"] = len(metadata[TOKENS])
    yield from ((name, _number(values[key])) for name, key in NUMBERS.items())
    yield "rope_scaling", {"type": "yarn"} | {name: _number(values[key]) for name, key in YARN.items()}
    limits = metadata[f"{ARCHITECTURE}.{CLAMPS[0]}"]
    different = sorted(set(limits)) if isinstance(limits, list) else [limits]
    if len(different) != 1:
        raise UnsupportedCheckpoint(f"{where}: {ARCHITECTURE}.{CLAMPS[0]} has {len(different)} values, expected one")
    yield "swiglu_limit", different[0]
    # some converters keep the ratios of the drafter, which is not in the file
    yield "compress_ratios", values[RATIOS]
    yield RELEASE_KEY, metadata.get(RELEASE)
    if BOS in metadata:
        yield "bos_token_id", metadata[BOS]
    yield "eos_token_id", [metadata[key] for key in (EOS, EOT) if key in metadata] or None


def _number(value: Any) -> Any:
    """Return a number as it was before it was stored in 32 bits: the shortest decimal that rounds to it."""
    if not isinstance(value, float):
        return value
    digits = (float(f"{value:.{count}g}") for count in range(1, 10))
    return next((number for number in digits if struct.pack("<f", number) == struct.pack("<f", value)), value)
