"""What stands beside the weights of each target: its files, key by key, and what is copied."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.metadata import copied_files, metadata_files
from dsv4cli.engine.conversion.target import FORMATS, TargetName
from tests.support.metadata import CONFIG, PARTIAL, ROOT, TINY, saved, with_inference

FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "mtp.0"]


def written(folder: Path, config: ModelConfig, formats: Formats, target: TargetName) -> dict[str, Any]:
    """The values of each file that is written."""
    files = metadata_files(folder, config, formats, target)
    own = (folder / "chat_template.jinja").exists()
    assert ("chat_template.jinja" in files) == (target == "transformers" and not own)
    files.pop("chat_template.jinja", None)
    assert all(text.endswith("}\n") and text.startswith('{\n  "') for text in files.values())
    return {path: json.loads(text) for path, text in files.items()}


def of_target(target: TargetName, formats: Formats | None = None) -> dict[str, Any]:
    return written(TINY, CONFIG, formats or FORMATS[target], target)


def test_official():
    files = of_target("official")
    assert files == {"config.json": ROOT | {"quantization_config": FP8 | {"expert_dtype": "fp4"}}}


def test_fp8():
    expected = {"expert_dtype": "fp8", "quantization_config": FP8 | {"expert_dtype": "fp8"}}
    assert of_target("fp8") == {"config.json": ROOT | expected}


def test_bf16_has_no_quantization_config():
    expected = {key: value for key, value in ROOT.items() if key != "quantization_config"}
    assert of_target("bf16") == {"config.json": expected | {"expert_dtype": "bf16"}}


@pytest.mark.parametrize(("dense", "name"), [("bf16", "bfloat16"), ("f32", "float32")])
def test_torch_dtype_is_that_of_the_other_tensors(dense, name):
    values = of_target("transformers", Formats(dense, dense, dense))["config.json"]
    assert (values["torch_dtype"], values["dtype"], values["expert_dtype"]) == (name, name, dense)


def test_nvfp4():
    files = of_target("nvfp4")
    layers = {f"{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in LAYERS[:5]}
    others = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
    producer = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}
    quantization = FP8 | {
        # vLLM and transformers know no other word for e2m1 than fp4
        "expert_dtype": "fp4",
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        # not in NVFP4
        "ignore": others,
        # not quantised at all
        "ignored_layers": ["head"],
        "quantized_layers": layers,
        "producer": producer,
    }
    assert files == {
        "config.json": ROOT | {"expert_dtype": "fp4", "quantization_config": quantization},
        "hf_quant_config.json": {
            "producer": producer,
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "quantized_layers": layers,
                "exclude_modules": others,
            },
        },
    }


def test_the_drafter_of_dspark_is_not_in_nvfp4():
    config = parse_config(PRESETS["flash-0731"], "flash-0731")
    files = written(TINY, config, FORMATS["nvfp4"], "nvfp4")
    quantization = files["hf_quant_config.json"]["quantization"]
    assert quantization["exclude_modules"][3:] == ["mtp.*"]
    assert len(quantization["quantized_layers"]) == 43


def test_mp():
    files = of_target("mp")
    assert files["inference/config.json"] == {
        "vocab_size": 512, "dim": 256, "moe_inter_dim": 128, "n_layers": 5, "n_hash_layers": 1, "n_mtp_layers": 1,
        "n_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1, "n_activated_experts": 2,
        "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 128, "head_dim": 128,
        "rope_head_dim": 64, "norm_eps": 1e-6, "o_groups": 2, "o_lora_rank": 128, "window_size": 128,
        "compress_ratios": [0, 0, 4, 128, 4, 0], "compress_rope_theta": 160000, "original_seq_len": 65536,
        "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 4,
        "index_head_dim": 128, "index_topk": 16, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    # the official convert.py widens wo_a
    wide = ["head", *(f"{layer}.attn.wo_a" for layer in LAYERS)]
    quantization = FP8 | {"expert_dtype": "fp4", "ignored_layers": wide}
    assert files["config.json"] == ROOT | {"quantization_config": quantization}
    assert files.keys() == {"config.json", "inference/config.json"}


@pytest.mark.parametrize(
    ("formats", "dtype", "experts"),
    [(Formats(), "fp8", "fp4"), (Formats("fp8", "fp8"), "fp8", None), (Formats("bf16", "bf16"), "bf16", None)],
)
def test_the_official_script_knows_two_formats_of_experts(formats, dtype, experts):
    values = of_target("mp", formats)["inference/config.json"]
    assert (values["dtype"], values["expert_dtype"]) == (dtype, experts)


def test_mp_with_dspark():
    config = parse_config(PRESETS["flash-0731"], "flash-0731")
    files = written(TINY, config, FORMATS["mp"], "mp")
    values = files["inference/config.json"]
    assert {key: value for key, value in values.items() if key.startswith(("dspark", "n_mtp"))} == {
        "n_mtp_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    # the release says so in its root file
    assert files["config.json"]["num_nextn_predict_layers"] == 1


def test_transformers():
    values = of_target("transformers")["config.json"]
    share = {"partial_rotary_factor": 0.5}
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    said = share | {
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
        "rope_parameters": {
            "main": share | {"rope_type": "default", "rope_theta": 10000},
            "compress": share | yarn | {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0},
        },
        "dtype": "bfloat16",
    }
    # beside the official keys, which vLLM reads and transformers would strip
    expected = {key: value for key, value in ROOT.items() if key != "quantization_config"}
    assert values == expected | said | {"expert_dtype": "bf16"}


@pytest.mark.parametrize("target", FORMATS)
def test_the_official_script_finds_its_file_where_it_was(tmp_path, target):
    files = metadata_files(with_inference(tmp_path), CONFIG, FORMATS[target], target)
    assert ("inference/config.json" in files) == (target in ("official", "bf16", "fp8", "base", "nvfp4", "mp"))


@pytest.mark.parametrize("formats", [*FORMATS.values(), *PARTIAL], ids=lambda form: f"{form.linear}-{form.experts}")
def test_expert_dtype_stands_in_both_places(formats):
    values = of_target("official", formats)["config.json"]
    quantised = {"fp4", "fp8", "fp8_f32", "nvfp4"} & {formats.linear, formats.experts}
    assert ("quantization_config" in values) == bool(quantised)
    assert values["expert_dtype"] == {"nvfp4": "fp4", "fp8_f32": "fp8"}.get(formats.experts, formats.experts)
    assert values.get("quantization_config", values)["expert_dtype"] == values["expert_dtype"]


@pytest.mark.parametrize("formats", PARTIAL[:3], ids=lambda form: f"{form.linear}-{form.experts}")
def test_what_is_not_quantised_is_named(formats):
    values = of_target("official", formats)["config.json"]["quantization_config"]
    experts = [f"{layer}.ffn.experts" for layer in LAYERS]
    matrices = {
        spec.matrix
        for spec in expected_tensors(CONFIG, formats).values()
        if spec.columns and ".ffn.experts." not in spec.name
    }
    wide = {*(experts if formats.experts == "bf16" else ()), *(matrices if formats.linear == "bf16" else ())}
    assert values["ignored_layers"][0] == "head"
    assert {*values["ignored_layers"][1:]} == wide
    assert len(values["ignored_layers"]) == 1 + len(wide)


def test_harmless_keys_of_the_source_survive(tmp_path):
    harmless = {"initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "n_group": 1}
    (tmp_path / "config.json").write_text(json.dumps(ROOT | harmless | {"dtype": "float32", "expert_dtype": "fp8"}))
    values = written(tmp_path, CONFIG, FORMATS["official"], "official")["config.json"]
    assert values == of_target("official")["config.json"] | harmless


def test_numbers_are_written_as_in_the_releases():
    values = of_target("official")["config.json"]
    whole = [values["rope_theta"], values["compress_rope_theta"], *list(values["rope_scaling"].values())[:3]]
    assert all(type(number) is int for number in whole)
    # transformers' strict DeepseekV4Config takes no int for these
    assert all(type(values[key]) is float for key in ("swiglu_limit", "routed_scaling_factor", "hc_eps"))


def test_the_same_text_comes_from_the_same_model_whatever_the_order_of_the_source(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(reversed(ROOT.items()))))
    assert metadata_files(tmp_path, CONFIG, FORMATS["nvfp4"], "nvfp4") == metadata_files(
        TINY, CONFIG, FORMATS["nvfp4"], "nvfp4"
    )


def test_what_is_copied(tmp_path):
    copied = [
        "LICENSE", "README.md", "encoding/encoding_dsv4.py", "generation_config.json", "inference/model.py",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    left = [
        ".cache/huggingface/x.lock", ".dsv4-convert/journal", ".gitattributes", "config.json", "hf_quant_config.json",
        "inference/config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "old/w.pt",
        "pytorch_model.bin", "pytorch_model.bin.index.json", "q4.gguf", "encoding/.hidden/a",
    ]  # fmt: skip
    folder = saved(tmp_path / "source", dict.fromkeys([*copied, *left], "x"))
    # as in the cache of huggingface_hub
    (tmp_path / "blob").write_text("y")
    (folder / "linked.txt").symlink_to(tmp_path / "blob")
    assert copied_files(folder) == sorted(folder / path for path in [*copied, "linked.txt"])
    # named, so that it is missed
    (folder / "broken.txt").symlink_to(tmp_path / "nowhere")
    assert copied_files(folder) == sorted(folder / path for path in [*copied, "linked.txt", "broken.txt"])


def test_the_way_back_from_transformers_leaves_no_word_of_its_dialect(tmp_path):
    files = metadata_files(TINY, CONFIG, FORMATS["transformers"], "transformers")
    source = saved(tmp_path, files)
    (source / "config.json").write_text(json.dumps(json.loads(files["config.json"]) | {"router_jitter_noise": 0.01}))
    assert written(source, CONFIG, FORMATS["official"], "official") == of_target("official")
    again = written(source, CONFIG, FORMATS["transformers"], "transformers")["config.json"]
    assert again == of_target("transformers")["config.json"] | {"router_jitter_noise": 0.01}


def test_a_source_without_a_root_file_gets_a_complete_one(tmp_path):
    inference = of_target("mp")["inference/config.json"]
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference))
    files = written(tmp_path, read_config(tmp_path), FORMATS["official"], "official")
    assert files["config.json"] == of_target("official")["config.json"]
