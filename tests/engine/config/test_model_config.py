"""Configuration files: what the releases say, and what is refused."""

import json
from typing import Any

import pytest

from dsv4cli.engine.config.dialects import translate_inference
from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint
from tests.support.damage import GOLDEN

# the lists as the releases write them
FLASH = [
    0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
    4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
]  # fmt: skip
PRO = [
    128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
    128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
    4, 128, 4,
]  # fmt: skip
# inference/config.json of Flash, revision 60d8d707
INFERENCE = {
    "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43, "n_hash_layers": 3, "n_heads": 64,
    "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
    "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64, "o_groups": 8,
    "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16,
    "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "compress_rope_theta": 160000,
    "compress_ratios": [*FLASH, 0],
}  # fmt: skip


def flash(**changes: Any) -> dict[str, Any]:
    return PRESETS["flash"] | changes


@pytest.mark.parametrize(
    ("name", "ratios", "stages", "drafter"),
    [
        ("flash", FLASH, 1, "mtp"),
        ("pro", PRO, 1, "mtp"),
        ("flash-0731", FLASH, 3, "dspark"),
        ("tiny", [0, 0, 4, 128, 4], 1, "mtp"),
    ],
)
def test_a_preset_has_the_schedule_of_its_release(name, ratios, stages, drafter):
    config = parse_config(PRESETS[name], name)
    assert list(config.layer_ratios) == ratios
    assert config.num_hidden_layers == len(ratios)
    assert list(config.compress_ratios) == ratios + [0] * stages
    assert (config.draft_stages, config.drafter) == (stages, drafter)


@pytest.mark.parametrize(("name", "window", "csa", "hca"), [("flash", 2, 21, 20), ("pro", 0, 30, 31)])
def test_layers_of_each_kind(name, window, csa, hca):
    ratios = parse_config(PRESETS[name], name).layer_ratios
    assert [ratios.count(ratio) for ratio in (0, 4, 128)] == [window, csa, hca]


def test_the_first_three_layers_choose_experts_by_token():
    config = parse_config(PRESETS["pro"], "pro")
    assert [layer for layer in range(62) if config.is_hash_layer(layer)] == [0, 1, 2]


def test_inference_config_says_the_same_as_the_root_config():
    assert parse_config(translate_inference(INFERENCE), "inference") == parse_config(PRESETS["flash"], "root")


def test_inference_config_alone_is_enough(tmp_path):
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(INFERENCE))
    assert read_config(tmp_path) == parse_config(PRESETS["flash"], "root")


def test_inference_config_of_0731_counts_three_stages(tmp_path):
    dspark = {key: value for key, value in PRESETS["flash-0731"].items() if key.startswith("dspark_")}
    ratios = PRESETS["flash-0731"]["compress_ratios"]
    inference = INFERENCE | dspark | {"n_mtp_layers": 3, "compress_ratios": ratios}
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference))
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["flash-0731"]))
    config = read_config(tmp_path)
    assert config.dspark is not None
    assert config.dspark.target_layer_ids == (40, 41, 42)
    assert config == parse_config(translate_inference(inference), "inference")


@pytest.mark.parametrize("name", ["tiny-flash", "tiny-pro"])
def test_golden_configs_are_read(name):
    values = json.loads((GOLDEN / name / "config.json").read_text())
    assert list(read_config(GOLDEN / name).compress_ratios) == values["compress_ratios"]


REQUIRED = [key for key in PRESETS["flash"] if key not in {"model_type", "hc_eps", "rms_norm_eps"}]


@pytest.mark.parametrize("key", [key for key in REQUIRED if key != "num_nextn_predict_layers"])
def test_a_missing_key_is_named(key):
    values = flash()
    del values[key]
    with pytest.raises(CheckpointError, match=rf"^config\.json.*{key}"):
        parse_config(values, "config.json")


DSPARK = {key: value for key, value in PRESETS["flash-0731"].items() if key.startswith("dspark_")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": FLASH[:-1]}, "compress_ratios has 42 entries for 43 layers"),
        ({"compress_ratios": FLASH}, "compress_ratios has 43 entries for 43 layers and 1 draft stages"),
        ({"compress_ratios": [*FLASH, 0, 0, 0]}, "compress_ratios has 46 entries"),
        ({"compress_ratios": [*FLASH, 4]}, "expected zeros"),
        ({"num_hidden_layers": 44}, "44 layers"),
        (DSPARK | {"compress_ratios": FLASH}, "0 draft stages"),
        (DSPARK | {"dspark_target_layer_ids": [41, 42, 43]}, "dspark_target_layer_ids"),
        (DSPARK | {"dspark_target_layer_ids": [-1]}, "dspark_target_layer_ids"),
        (DSPARK | {"dspark_target_layer_ids": "40"}, "dspark_target_layer_ids"),
        ({"dspark_block_size": 5}, "dspark_noise_token_id"),
        ({"o_groups": 7}, "o_groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"index_head_dim": 96}, "index_head_dim"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 4096.5}, "hidden_size is 4096.5"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"vocab_size": float("inf")}, "vocab_size is inf"),
        ({"routed_scaling_factor": -1.5}, "routed_scaling_factor"),
        ({"kv_source_layers": [2, 8]}, "unknown key 'kv_source_layers'"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": PRESETS["flash"]["rope_scaling"] | {"scale": 1.0}}, r"rope_scaling\.scale"),
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        parse_config(flash(**changes), "config.json")


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"compress_ratios": [0, 0] + [2] * 41 + [0]}, "compress_ratios holds 2"),
        ({"compress_ratios": [False, *FLASH]}, "compress_ratios holds False"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"n_group": 8}, "n_group"),
        ({"quantization_config": QUANTIZATION | {"quant_method": "quark"}}, "quant_method"),
        ({"quantization_config": QUANTIZATION | {"weight_block_size": [32, 32]}}, "weight_block_size"),
        ({"quantization_config": QUANTIZATION | {"scale_fmt": "float"}}, "scale_fmt"),
        ({"quantization_config": QUANTIZATION | {"quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4'"),
    ],
)
def test_another_model_is_refused(changes, words):
    with pytest.raises(UnsupportedCheckpoint, match=words):
        parse_config(flash(**changes), "config.json")


def test_what_changes_no_number_is_accepted():
    harmless = {
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "quantization_config": QUANTIZATION,
        "expert_dtype": "fp4",
    }
    assert parse_config(flash(**harmless), "config.json") == parse_config(flash(), "config.json")


def test_official_defaults_stand_in_for_absent_keys():
    values = flash()
    for key in ("hc_eps", "rms_norm_eps", "num_nextn_predict_layers"):
        del values[key]
    assert parse_config(values, "config.json") == parse_config(flash(), "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_a_shortened_preset_is_a_model(name):
    config = parse_config(shortened(PRESETS[name], 2, 6), name)
    assert (config.num_hidden_layers, config.n_routed_experts) == (2, 6)
    assert config.layer_ratios == tuple(PRESETS[name]["compress_ratios"][:2])
    assert config.drafter == parse_config(PRESETS[name], name).drafter
