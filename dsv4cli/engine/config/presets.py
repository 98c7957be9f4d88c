"""The configurations of the released models, for checks and for models with random weights; no torch.

Numbers: the releases' `config.json` (Flash revision 60d8d707, Pro b5968e91, Flash-0731), reduced to what the engine
reads.
"""

from typing import Any, Literal, get_args

from dsv4cli.engine.config.keys import MODEL_TYPE

Release = Literal["v4", "0731"]
"""The prompt encoder that a checkpoint was trained with: April 2026 (Flash, Pro), or 0731 and later."""
RELEASES: tuple[Release, ...] = get_args(Release)
# used if a checkpoint does not state its release: prompt formats differ only in the texts for reasoning efforts
ASSUMED_RELEASE: Release = "v4"

COMMON: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
FLASH = COMMON | {
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
}
PRO = COMMON | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
}
FLASH_0731 = FLASH | {
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
# every kind of layer and of router, small enough for two cores
TINY = COMMON | {
    "num_hidden_layers": 5,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "index_n_heads": 16,
    "index_topk": 32,
    "vocab_size": 512,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
}
PRESETS: dict[str, dict[str, Any]] = {"flash": FLASH, "pro": PRO, "flash-0731": FLASH_0731, "tiny": TINY}


def shortened(preset: dict[str, Any], layers: int | None, experts: int | None) -> dict[str, Any]:
    """Return the preset with only its first `layers` layers (draft stages kept) and its first `experts` experts."""
    values = dict(preset)
    if layers is not None:
        ratios, count = preset["compress_ratios"], preset["num_hidden_layers"]
        values["compress_ratios"] = ratios[:layers] + ratios[count:]
        values["num_hidden_layers"] = layers
        values["num_hash_layers"] = min(preset["num_hash_layers"], layers)
        if "dspark_target_layer_ids" in preset:
            wanted = len(preset["dspark_target_layer_ids"])
            values["dspark_target_layer_ids"] = list(range(max(layers - wanted, 0), layers))
    if experts is not None:
        values["n_routed_experts"] = experts
    return values
