"""The configuration of a checkpoint: every dimension of the model; no torch.

Field names are those of the official root `config.json`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dsv4cli.engine.config.presets import Release

Drafter = Literal["none", "mtp", "dspark"]


@dataclass(frozen=True)
class Yarn:
    """YaRN interpolation of the RoPE table of layers with ratio 4 or 128; none if there are 0 original positions."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DSparkConfig:
    """The drafter of the 0731 and 0813 releases (section 'DSpark' of the official model.py)."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True)
class ModelConfig:
    """Every number of one model, and its release if the checkpoint states it.

    `compress_ratios` covers the main layers, then the draft stages. Each token of `eos_token_ids` ends an answer.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    max_position_embeddings: int
    routed_scaling_factor: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    hc_eps: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    yarn: Yarn
    compress_ratios: tuple[int, ...]
    dspark: DSparkConfig | None
    release: Release | None

    @cached_property
    def layer_ratios(self) -> tuple[int, ...]:
        """The compression ratio (0, 4 or 128) of each main layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def draft_stages(self) -> int:
        """Number of blocks under `mtp.`: one for MTP, three for DSpark, none if the checkpoint has no drafter."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def drafter(self) -> Drafter:
        """The kind of drafter in the checkpoint."""
        if self.draft_stages == 0:
            return "none"
        return "mtp" if self.dspark is None else "dspark"

    def is_hash_layer(self, layer: int) -> bool:
        """Return whether the experts of a layer are chosen by token id (never in draft stages)."""
        return layer < self.num_hash_layers

    def without_drafter(self) -> "ModelConfig":
        """Return the same model with its main layers only."""
        return replace(self, compress_ratios=self.layer_ratios, dspark=None)
