"""The keys of the official configuration files: translations, fixed values and defaults; no torch.

Sources: the releases' root `config.json`, `inference/config.json` and the defaults of the official `ModelArgs`.
"""

from typing import Any

# model_type of the releases, in config.json
MODEL_TYPE = "deepseek_v4"
# inference/config.json key -> config.json key (official `ModelArgs`)
INFERENCE_KEYS = {
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "n_hash_layers": "num_hash_layers",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "n_mtp_layers": "num_nextn_predict_layers",
}
INFERENCE_ROPE_KEYS = {
    "rope_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# runtime limits and storage formats of the official script, no property of the model
INFERENCE_IGNORED = {"max_batch_size", "max_seq_len", "dtype", "scale_dtype", "scale_fmt"}

# quantization_config of the releases, without activation_scheme, which concerns no weight
FP8_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
# keys that ModelOpt's export adds if the experts are NVFP4
NVFP4_QUANTIZATION: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}

# keys whose value the architecture fixes; a different value means a different model
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}
# the fixed keys that the releases write
RELEASED = (
    "attention_bias", "hidden_act", "n_shared_experts", "norm_topk_prob", "num_key_value_heads", "scoring_func",
    "tie_word_embeddings", "topk_method",
)  # fmt: skip
# keys of the file format, of training and of generation (transformers' PretrainedConfig) that change no number of the
# forward pass
IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha", "bad_words_ids",
    "begin_suppress_tokens", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "ep_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "seq_aux", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers_version", "typical_p", "use_bfloat16", "use_cache",
}  # fmt: skip
INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "num_hash_layers", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
    "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip
POSITIVE = {*INTEGERS} - {"num_hash_layers"}
# no number is larger: a double holds it exactly
MAX_NUMBER = 2**53
# layers, and routed experts of all layers together, that make a table of tensors; Pro has 62 and 23,808
MAX_LAYERS, MAX_EXPERTS = 1000, 100_000
NUMBERS = ("routed_scaling_factor", "swiglu_limit", "rope_theta", "compress_rope_theta")
# keys that may be absent, with the official default
DEFAULTS: dict[str, Any] = {
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "num_nextn_predict_layers": 1,
}
EOS_TOKEN_ID = 1
# draft stages of each DSpark release
DSPARK_STAGES = 3
DSPARK_KEYS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
# dsv4's own key: the release, which tensors without a drafter cannot tell; `dsv4 convert` writes it
RELEASE_KEY = "dsv4_release"

# transformers' dialect (transformers 5.23 DeepseekV4Config): ratio of a layer -> its layer_type
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
COMPRESS_RATES = {name: ratio for ratio, name in LAYER_TYPES.items() if ratio}
HASH_MLP, SCORE_MLP = "hash_moe", "moe"
# YaRN multiplies cos and sin by nothing in DeepSeek-V4; transformers would derive 1.277 where this is absent
ATTENTION_FACTOR = 1.0
# keys of a rope table and the values that match the official code, which reads none of them
ROPE_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_factor": (ATTENTION_FACTOR, None),
    "truncate": (True, None),
    "mscale": (0, 1, None),
    "mscale_all_dim": (0, 1, None),
}
# transformers' keys that duplicate official ones or do not affect the forward pass
TRANSFORMERS_KEYS = {
    "layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor", "mlp_bias",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip
