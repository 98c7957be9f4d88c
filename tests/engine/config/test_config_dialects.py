"""Every dialect of a configuration that `dsv4 convert` reads, and what it refuses in each."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from dsv4cli.engine.config.presets import FLASH_0731, PRESETS, TINY
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.errors import CheckpointError, Dsv4Error, UnsupportedCheckpoint

MODEL = parse_config(TINY, "tiny")
# what transformers 5.23 writes instead of compress_ratios, num_hash_layers and rope_scaling of TINY
SAID = {
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        "compress": {
            "rope_type": "yarn",
            "type": "yarn",
            "rope_theta": 160000,
            "partial_rotary_factor": 0.5,
            "attention_factor": 1.0,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "mlp_bias": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "dtype": "bfloat16",
    "transformers_version": "5.23.0",
}
STRIPPED = ("compress_ratios", "num_hash_layers", "rope_scaling")
DSPARK = {key: value for key, value in FLASH_0731.items() if key.startswith("dspark_")} | {
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [2, 3, 4],
}


def saved(**changes: Any) -> dict[str, Any]:
    """TINY as transformers saves it."""
    return {key: value for key, value in TINY.items() if key not in STRIPPED} | SAID | changes


def rope(name: str, **changes: Any) -> dict[str, Any]:
    tables = SAID["rope_parameters"]
    return {"rope_parameters": tables | {name: tables[name] | changes}}


@pytest.mark.parametrize("values", [TINY, saved(), TINY | SAID], ids=["official", "transformers", "both"])
def test_both_dialects_are_read(values):
    assert parse_config(values, "config.json") == MODEL


def test_the_official_rope_may_name_its_kind_either_way():
    scaling = {"rope_type": "yarn"} | {key: value for key, value in TINY["rope_scaling"].items() if key != "type"}
    assert parse_config(TINY | SAID | {"rope_scaling": scaling}, "config.json") == MODEL


def test_the_share_of_the_rotated_dimensions_stands_for_their_number():
    values = saved()
    del values["qk_rope_head_dim"]
    assert parse_config(values, "config.json") == MODEL


@pytest.mark.parametrize("name", PRESETS)
def test_what_transformers_saves_is_read(tmp_path, name):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    values = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not {*STRIPPED} & {*values}
    assert parse_config(values, "config.json") == parse_config(PRESETS[name], name)


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({"compress_ratios": [0, 0, 4, 4, 4, 0]}, "compress_ratios", r"layer_types .*\[3\] is 4 and 128"),
        ({"compress_ratios": [0, 0, 4, 128]}, "compress_ratios", "layer_types .*has 4 and 5 entries"),
        ({"num_hash_layers": 2}, "num_hash_layers", "mlp_layer_types .* is 2 and 1"),
        ({"rope_scaling": TINY["rope_scaling"] | {"factor": 8}}, "rope_scaling", r"rope_parameters\.compress "),
        ({"rope_theta": 20000}, "rope_theta", r"rope_parameters\.main\.rope_theta"),
        ({"compress_rope_theta": 40000}, "compress_rope_theta", r"rope_parameters\.compress\.rope_theta"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim", "partial_rotary_factor"),
        (rope("main", partial_rotary_factor=0.25), "qk_rope_head_dim", r"rope_parameters\.main.* is 64 and 32"),
        ({"layer_types": SAID["layer_types"][:4]}, "layer_types", "num_hidden_layers .* 4 entries and 5 layers"),
        ({"mlp_layer_types": ["moe"] * 6}, "mlp_layer_types", "num_hidden_layers .* 6 entries and 5 layers"),
        ({"layer_types": "full"}, "layer_types", "num_hidden_layers .* 'full'"),
    ],
)
def test_dialects_that_contradict_each_other_are_both_named(changes, first, second):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {first} and {second}"):
        parse_config(TINY | SAID | changes, "config.json")


def test_places_of_one_dialect_that_contradict_each_other_are_both_named():
    values = saved(**rope("compress", partial_rotary_factor=0.125))
    del values["qk_rope_head_dim"]
    with pytest.raises(CheckpointError, match=r": partial_rotary_factor and rope_parameters\.compress\.partial_rotary"):
        parse_config(values, "config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types holds 'full_attention'"),
        ({"compress_rates": SAID["compress_rates"] | {"compressed_sparse_attention": 8}}, "compress_rates"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "'hash_moe' after 'moe'"),
        ({"mlp_layer_types": ["mlp"] * 5}, "mlp_layer_types holds 'mlp'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (rope("main", rope_type="yarn"), r"rope_parameters\.main\.rope_type is 'yarn'"),
        (rope("compress", rope_type="default"), r"rope_parameters\.compress\.rope_type is 'default'"),
        # transformers would multiply the table by 1.277
        (rope("compress", attention_factor=None), r"rope_parameters\.compress\.attention_factor is None"),
        (rope("main", factor=4), r"unknown key rope_parameters\.main\.factor"),
        (rope("compress", scale=1.0), r"unknown key rope_parameters\.compress\.scale"),
        (rope("compress", truncate=False), r"rope_parameters\.compress\.truncate is False"),
        (rope("compress", factor="16"), "factor is '16'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "expected main and compress"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"kv_source_layers": [2, 8]}, "unknown key 'kv_source_layers'"),
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_content_is_checked_in_every_dialect(changes, words):
    with pytest.raises((CheckpointError, UnsupportedCheckpoint), match=words):
        parse_config(saved(**changes), "config.json")


@pytest.mark.parametrize("key", [*SAID, "num_hidden_layers", "head_dim", "num_nextn_predict_layers"])
@pytest.mark.parametrize("value", [None, -1, 10**12, 0.5, "x", [], ["x"], {}, {"main": {}, "compress": []}])
def test_nonsense_is_an_error_and_no_crash(key, value):
    for values in (saved(**{key: value}), TINY | SAID | {key: value}):
        with suppress(Dsv4Error):
            parse_config(values, "config.json")


@pytest.mark.parametrize(
    ("keys", "drafter", "stages"),
    [
        ({}, "mtp", 1),
        ({"num_nextn_predict_layers": 0}, "none", 0),
        # the releases with DSpark say 1 and have three stages
        (DSPARK, "dspark", 3),
        (DSPARK | {"num_nextn_predict_layers": 2}, "dspark", 2),
    ],
)
def test_draft_stages_where_no_list_counts_them(keys, drafter, stages):
    config = parse_config(saved(**keys), "config.json")
    assert (config.drafter, config.draft_stages) == (drafter, stages)
    # transformers keeps these keys and drops the tensors
    without = parse_config(saved(**keys), "config.json", drafter_stored=False)
    assert without.drafter == "none"
    # MTP leaves no key of its own behind
    release = "0731" if DSPARK.items() <= keys.items() else None
    assert without == replace(config.without_drafter(), release=release)


@pytest.mark.parametrize("values", [TINY, TINY | SAID], ids=["official", "both"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_nextn_predict_layers": 0},
        {"compress_ratios": TINY["compress_ratios"][:5]},
        {"num_nextn_predict_layers": 0, "compress_ratios": TINY["compress_ratios"][:5]},
    ],
    ids=["unchanged", "no stages", "no ratios", "neither"],
)
def test_there_is_no_drafter_where_none_is_stored_whatever_the_keys_say(values, changes):
    release = None if "compress_ratios" in changes else "v4"
    found = parse_config(values | changes, "config.json", drafter_stored=False)
    assert found == replace(MODEL.without_drafter(), release=release)


@pytest.mark.parametrize(
    ("keys", "stored", "release"),
    [
        ({}, True, "v4"),
        ({}, False, "v4"),
        (DSPARK | {"compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0]}, True, "0731"),
        (DSPARK | {"compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0]}, False, "0731"),
        # the drafter's keys remain when its stages are gone, or the other way round
        (DSPARK | {"compress_ratios": [0, 0, 4, 128, 4]}, False, "0731"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0]}, False, "0731"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0], "num_nextn_predict_layers": 3}, True, "v4"),
        # every release says 1
        ({"compress_ratios": [0, 0, 4, 128, 4], "num_nextn_predict_layers": 1}, False, None),
        ({"dsv4_release": "0731"}, True, "0731"),
        (DSPARK | {"dsv4_release": "v4"}, False, "v4"),
        ({"dsv4_release": None}, False, "v4"),
    ],
)
def test_the_release_is_what_the_config_says_or_else_its_drafter_tells(keys, stored, release):
    assert parse_config(TINY | keys, "config.json", drafter_stored=stored).release == release


@pytest.mark.parametrize("value", ["0814", 731, ["v4"]])
def test_an_unknown_release_is_refused(value):
    with pytest.raises(CheckpointError, match=r"dsv4_release is .* known releases are v4, 0731"):
        parse_config(TINY | {"dsv4_release": value}, "config.json")


def test_transformers_keeps_the_release_of_what_it_saves(tmp_path):
    from transformers import AutoConfig

    values = TINY | {"num_nextn_predict_layers": 0, "compress_ratios": TINY["compress_ratios"][:5]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"dsv4_release": "0731"}))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert read_config(tmp_path / "saved", drafter_stored=False).release == "0731"


def test_both_files_of_a_folder_may_describe_a_drafter_that_is_not_stored(tmp_path):
    ratios = TINY["compress_ratios"]
    (tmp_path / "inference").mkdir()
    inference = {"n_layers": 5, "n_mtp_layers": 1, "compress_ratios": ratios}
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference))
    for kept in (ratios, ratios[:5]):
        (tmp_path / "config.json").write_text(json.dumps(TINY | {"compress_ratios": kept}))
        assert read_config(tmp_path, drafter_stored=False).drafter == "none"


FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
NVFP4 = FP8 | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    "storage",
    [
        {"quantization_config": FP8},
        {"quantization_config": FP8, "expert_dtype": "fp4"},
        {"quantization_config": FP8 | {"expert_dtype": "fp8"}},
        {"quantization_config": FP8 | {"expert_dtype": "fp8"}, "expert_dtype": "fp8"},
        {"quantization_config": FP8 | {"expert_dtype": "fp8"}, "expert_dtype": "fp4"},
        {"quantization_config": FP8 | {"ignored_layers": ["layers.0.attn.wq_a"]}},
        {"quantization_config": NVFP4 | {"expert_dtype": "fp4"}, "expert_dtype": "fp4"},
        {"quantization_config": {key: value for key, value in NVFP4.items() if key != "quant_algo"}},
        {"quantization_config": None, "expert_dtype": "bf16"},
        {"quantization_config": FP8 | {"scale_fmt": None}, "expert_dtype": "fp8"},
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
        {"expert_dtype": None},
        {},
    ],
)
def test_every_storage_format_is_read(storage):
    assert parse_config(TINY | storage, "config.json") == MODEL


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ({"quantization_config": FP8 | {"quant_method": "quark"}}, "quant_method is 'quark'"),
        ({"quantization_config": FP8 | {"weight_block_size": [32, 32]}}, "weight_block_size"),
        ({"quantization_config": FP8 | {"quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4'"),
        ({"quantization_config": NVFP4 | {"moe_quant_algo": "W4A8_AWQ"}}, "moe_quant_algo is 'W4A8_AWQ'"),
        ({"quantization_config": NVFP4 | {"group_size": 32}}, "group_size is 32"),
        ({"quantization_config": [16]}, "quantization_config is"),
        ({"expert_dtype": "int4"}, "expert_dtype is 'int4'; known values are fp4, fp8, bf16, f32"),
        ({"quantization_config": FP8 | {"expert_dtype": ["fp4"]}}, r"quantization_config\.expert_dtype is \['fp4'\]"),
    ],
)
def test_a_storage_that_cannot_be_is_refused(storage, words):
    with pytest.raises((CheckpointError, UnsupportedCheckpoint), match=words):
        parse_config(TINY | storage, "config.json")


@pytest.mark.parametrize("dialect", [TINY, saved()], ids=["official", "transformers"])
def test_both_files_of_a_folder_must_agree(tmp_path, dialect):
    (tmp_path / "inference").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(dialect))
    inference = tmp_path / "inference" / "config.json"
    ratios = TINY["compress_ratios"]
    inference.write_text(json.dumps({"dim": 256, "compress_ratios": ratios, "rope_factor": 16, "expert_dtype": "fp4"}))
    assert read_config(tmp_path) == MODEL
    for key, value in {"dim": 512, "compress_ratios": [*ratios, 0], "rope_factor": 8}.items():
        inference.write_text(json.dumps({key: value}))
        with pytest.raises(CheckpointError, match=r"config\.json and .*inference/config\.json contradict each other"):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("root", "inference", "agree"),
    [("fp4", "fp4", True), ("fp8", None, True), ("bf16", None, True), ("fp4", None, False), ("fp8", "fp4", False)],
)
def test_the_official_script_says_null_for_experts_that_are_not_fp4(tmp_path, root, inference, agree):
    (tmp_path / "inference").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"expert_dtype": root}))
    (tmp_path / "inference" / "config.json").write_text(json.dumps({"dim": 256, "expert_dtype": inference}))
    if agree:
        assert read_config(tmp_path) == MODEL
    else:
        with pytest.raises(CheckpointError, match="expert_dtype is"):
            read_config(tmp_path)
