"""The configurations of nano and nano-0731, shape and storage of each parameter, and initial values."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.values import form_of
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import COMMON
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats

VALUES: dict[str, Any] = COMMON | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "index_n_heads": 8,
    "index_topk": 64,
    "vocab_size": 2304,
    "max_position_embeddings": 8192,
}
# the same trunk with a DSpark drafter; the noise token is the pad token, which no text contains
VALUES_0731: dict[str, Any] = VALUES | {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}
GENERATION: dict[str, Any] = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": False,
}
FORMATS = Formats()
# standard deviation of the embedding, of the head, and the factor on matrices that write to the streams
EMBED_STD, HEAD_STD, WRITE_FACTOR = 0.5, 0.02, 0.3
# hyper-connections start as a plain residual: comb near the identity (softmax of 3, 0, 0, 0), pre a mean, post 1, each
# a little different from stream to stream, and the part that depends on the input small
COMB_DIAGONAL, BASE_STD, HC_SCALE = 3.0, 0.5, 0.1


@dataclass(frozen=True)
class Parameter:
    """A parameter of the twin: its unpacked shape (experts stacked first) and its storage format in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    form: str  # fp4, fp8, bf16, f32 or i64


def nano_config() -> ModelConfig:
    """Return the configuration of nano."""
    return parse_config(VALUES, "nano")


def nano_0731_config() -> ModelConfig:
    """Return the configuration of nano-0731."""
    return parse_config(VALUES_0731, "nano-0731")


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """Return every parameter by name: the checkpoint's names without scales, with the experts of a layer stacked."""
    stored = {spec.parameter: form_of(spec) for spec in expected_tensors(config, FORMATS).values() if _whole(spec)}
    table = {}
    for spec in expected_tensors(config, Formats("f32", "f32", "f32")).values():
        stack = () if spec.expert is None else (config.n_routed_experts,)
        table[spec.parameter] = Parameter(spec.parameter, (*stack, *spec.shape), stored[spec.parameter])
    return table


def _whole(spec: Any) -> bool:
    return not spec.is_scale


def initial_parameters(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return the parameters before training: fp32, except tid2eid int64 [V, k]."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _initial(entry, config, generator) for name, entry in parameter_table(config).items()}


def _initial(entry: Parameter, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    leaf = entry.name.removesuffix(".weight").rpartition(".")[2]
    if entry.form == "i64":
        return hash_table(config, generator)
    if leaf.endswith("norm"):
        return torch.ones(entry.shape)
    if leaf in ("ape", "attn_sink", "bias"):
        return torch.zeros(entry.shape)
    if leaf.endswith("_scale"):
        return torch.full(entry.shape, HC_SCALE)
    noise = torch.randn(entry.shape, generator=generator)
    if leaf.endswith("_base"):
        return _initial_base(config.hc_mult, noise)
    if leaf == "embed":
        return noise * EMBED_STD
    if leaf == "head":
        return noise * HEAD_STD
    return noise * (entry.shape[-1] ** -0.5 * (WRITE_FACTOR if leaf in ("wo_b", "w2") else 1.0))


def _initial_base(streams: int, noise: torch.Tensor) -> torch.Tensor:
    """Return pre (or the hyper-head's weights) [N], followed by post [N] and comb [N * N] if there are any."""
    base = noise * BASE_STD
    base[:streams] -= math.log(streams - 1)  # sigmoid: 1 / N
    if len(base) > streams:
        base[2 * streams :].view(streams, streams).fill_(0).fill_diagonal_(COMB_DIAGONAL)
    return base


def hash_table(config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """Return the experts of each token id in hash layers, int64 [V, k]. Every set of experts is equally frequent."""
    sets = torch.tensor([*combinations(range(config.n_routed_experts), config.num_experts_per_tok)])
    order = torch.randperm(config.vocab_size, generator=generator)
    return sets[order % len(sets)]
