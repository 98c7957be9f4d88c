"""One tiny model twice: as the engine's Transformer and, with the same weights, as transformers' DeepseekV4ForCausalLM.

Every kind of layer (ratios 0, 4, 128), of router (by token id, by score) and of clamp acts in it: swiglu_limit is 0.5
because random weights never reach the released 10; the two epsilons are not the released 1e-6, so that each shows and
neither stands for the other. With fewer than 16 indexer heads, scores tie at 0 when every ReLU is off, and any choice
among ties is right.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import COMMON
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random

VALUES = COMMON | {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 4, 128, 0, 4, 128],
    "num_nextn_predict_layers": 0,
    "num_hash_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,
    "hc_eps": 0.03,
    "rms_norm_eps": 0.01,
    "rope_scaling": COMMON["rope_scaling"] | {"original_max_position_embeddings": 64},
    "max_position_embeddings": 64 * 16,
}
TOKENS = 300
# relative to the largest logit: fp32 sums in another order are 1e-6 apart after six layers, the mildest mistake 6e-2
TOLERANCE = 1e-5

# (pattern in the engine's names, replacement), applied in this order; transformers' own list: conversion_mapping.py
RENAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.wq_b\.", ".attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.(compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn\.attn_sink$", ".attn.sinks"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.w([qo]_[ab]|kv|gate)\.", r".\1_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.experts\.w2\.weight$", ".experts.down_proj"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: operations this small only wait for a second one, many times longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def oracle_config() -> ModelConfig:
    """The tiny model's configuration."""
    return parse_config(VALUES, "the oracle's configuration")


def engine_model(seed: int) -> Transformer:
    """The tiny model with fp32 weights and no simulated rounding; biases, ape, sinks and hc bases are not zero."""
    return build_random(oracle_config(), Numerics.plain(), formats=Formats("f32", "f32", "f32"), seed=seed)


def random_ids(seed: int, count: int = TOKENS) -> list[int]:
    """Token ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VALUES["vocab_size"], (count,), generator=generator).tolist()


def transformers_model(model: Transformer) -> Any:
    """transformers' model with the weights of `model`. Raises when a tensor of either side has no partner."""
    # it takes seconds to import, and most tests do without
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    twin = DeepseekV4ForCausalLM(DeepseekV4Config.from_dict(deepcopy(VALUES), attn_implementation="eager")).eval()
    tensors = dict(model.named_parameters())
    renamed = {}
    for name in [name for name in tensors if name.endswith("ffn.experts.w1.weight")]:
        halves = tensors.pop(name), tensors.pop(name.replace(".w1.", ".w3."))
        tensors[name.replace(".w1.weight", ".gate_up_proj")] = torch.cat(halves, 1)
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        assert name not in renamed, f"two tensors are called {name}"
        renamed[name] = tensor
    twin.load_state_dict(renamed, strict=True)
    return twin


@one_thread()
@torch.no_grad()
def transformers_logits(model: Transformer, ids: Sequence[int]) -> torch.Tensor:
    """The yardstick: transformers' logits [T, V] of one forward pass without a cache, with the weights of `model`."""
    return transformers_model(model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@one_thread()
@torch.no_grad()
def logits_in_chunks(model: Transformer, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """The engine's logits [T, V] when the tokens arrive in chunks of these sizes."""
    assert sum(chunks) == len(ids), f"chunks of {sum(chunks)} tokens for {len(ids)}"
    cache = Cache(model.config, model.numerics, device=next(model.parameters()).device)
    sequence = cache.allocate()
    logits = []
    for count in chunks:
        batch = make_batch(cache, [(sequence, ids[sequence.length : sequence.length + count])])
        logits.append(model.logits(model(batch, cache.layers).streams))
        cache.advance(sequence, count)
    return torch.cat(logits)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected logit; infinite where a logit is not a number."""
    difference = (logits - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(float("inf")))
