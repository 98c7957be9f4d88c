"""Metadata and other small files of an output: what the readers of each target expect, and what is copied. No torch.

Readers of inference/config.json: the official generate.py. Readers of config.json: transformers 5.23 (DeepseekV4Config,
FineGrainedFP8Config), vLLM (DeepseekV4FP8Config) and SGLang; the last two also read moe_quant_algo in it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.formats import STORAGE, is_quantised
from dsv4cli.engine.config.keys import (
    ATTENTION_FACTOR,
    COMPRESS_RATES,
    FIXED,
    FP8_QUANTIZATION,
    HASH_MLP,
    IGNORED,
    INFERENCE_KEYS,
    INFERENCE_ROPE_KEYS,
    LAYER_TYPES,
    MODEL_TYPE,
    NVFP4_QUANTIZATION,
    RELEASE_KEY,
    RELEASED,
    SCORE_MLP,
    TRANSFORMERS_KEYS,
)
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import ASSUMED_RELEASE
from dsv4cli.engine.config.read import config_values
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.chat_templates import CHAT, own_template
from dsv4cli.engine.conversion.manifest import MANIFEST
from dsv4cli.engine.conversion.target import TargetName
from dsv4cli.engine.text.chat_template import chat_template
from dsv4cli.kernels.formats import FP4_BLOCK, NVFP4_BLOCK

CONFIG, INFERENCE, NVFP4_MANIFEST = "config.json", "inference/config.json", "hf_quant_config.json"
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt"}
TORCH_DTYPE = {"bf16": "bfloat16", "f32": "float32"}
# as in nvidia/DeepSeek-V4-Flash-NVFP4, which has this layout; readers check the name
PRODUCER = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}
# ModelOpt's patterns for matrices that are not in NVFP4
NOT_NVFP4 = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
# targets that the official scripts do not read
PLAIN = ("transformers", "gguf", "compressed-tensors")
# the routed experts, by their names in the files and by vLLM's module names
PACKED_TARGETS = [r"re:.*experts\.\d+\.w[123]$", r"re:.*experts\.\d+\.(gate|up|down)_proj$"]
# root keys that official ModelArgs does not have
NOT_OFFICIAL_ARGS = {"max_position_embeddings", "bos_token_id", "eos_token_id", "rope_scaling"}


def metadata_files(folder: Path, config: ModelConfig, formats: Formats, target: TargetName) -> dict[str, str]:
    """Return the text of every metadata file of a conversion, by its path below the output folder.

    Every configuration is read back by read_config to the same `config`. Transformers also gets the release's chat
    template, unless the source brings its own.

    Args:
        folder: the source. Keys of its root config.json that describe neither the model nor its storage are kept.
        config, formats: the output's configuration and storage formats.
    """
    # random weights and GGUF have none
    has_config = any((folder / name).is_file() for name in (CONFIG, INFERENCE))
    root = next(config_values(folder))[1] if has_config else {}
    files = {CONFIG: _root(root, config, formats, target)}
    if target == "mp" or (target not in PLAIN and (folder / INFERENCE).is_file()):
        files[INFERENCE] = _inference(config, formats)
    if formats.experts == "nvfp4" and target != "compressed-tensors":
        files[NVFP4_MANIFEST] = _nvfp4_manifest(config, formats)
    texts = {path: json.dumps(values, indent=2, sort_keys=True) + "\n" for path, values in files.items()}
    if target == "transformers" and own_template(folder) is None:
        texts[CHAT] = chat_template(config.release or ASSUMED_RELEASE)
    return texts


def copied_files(folder: Path) -> list[Path]:
    """Return the files that are copied to the output unchanged: neither weights, index, metadata nor hidden files.

    Dangling links are included, so that the caller can report them.
    """
    every = (path for path in sorted(folder.rglob("*")) if path.is_file() or is_dead(path))
    paths = {path.relative_to(folder): path for path in every}
    return [
        path
        for below, path in paths.items()
        if path.suffix not in WEIGHTS
        and not path.name.endswith(".index.json")
        # the source's hashes do not apply to the output
        and below.as_posix() not in {CONFIG, INFERENCE, NVFP4_MANIFEST, MANIFEST}
        and not any(part.startswith(".") for part in below.parts)
    ]


def is_dead(path: Path) -> bool:
    """Return whether a path is a dangling symbolic link."""
    return path.is_symlink() and not os.path.exists(path)


def _root(source: Mapping[str, Any], config: ModelConfig, formats: Formats, target: TargetName) -> dict[str, Any]:
    transformers = target == "transformers"
    harmless = {*FIXED, *IGNORED, *(TRANSFORMERS_KEYS if transformers else ())} - {"dtype"}
    values = {key: value for key, value in source.items() if key in harmless}
    values |= {key: FIXED[key] for key in RELEASED} | _model(config)
    values |= {"model_type": MODEL_TYPE, "architectures": ["DeepseekV4ForCausalLM"]}
    values |= {"torch_dtype": TORCH_DTYPE[formats.dense], "expert_dtype": STORAGE[formats.experts].expert_dtype}
    if config.release is not None:
        values[RELEASE_KEY] = config.release
    if transformers:
        values |= _transformers(config) | {"dtype": values["torch_dtype"]}
    if target == "gguf":
        # GGUF files state their own storage types
        return {key: value for key, value in values.items() if key != "expert_dtype"}
    if target == "compressed-tensors":
        return values | {"quantization_config": _packed_quantization(config, formats)}
    quantization = _quantization(config, formats)
    return values | ({"quantization_config": quantization} if quantization else {})


def _model(config: ModelConfig) -> dict[str, Any]:
    """Return the official root keys of a model, with the number types that the releases use."""
    values = asdict(config)
    del values["release"]
    yarn, dspark, ends = values.pop("yarn"), values.pop("dspark"), values.pop("eos_token_ids")
    values["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    for key in ("rope_theta", "compress_rope_theta"):
        values[key] = _whole(values[key])
    values["compress_ratios"] = list(config.compress_ratios)
    values["rope_scaling"] = {"type": "yarn"} | {key: _whole(value) for key, value in yarn.items()}
    # releases with DSpark have 1 here, and three stages in compress_ratios
    values["num_nextn_predict_layers"] = 1 if dspark else config.draft_stages
    if dspark:
        dspark["target_layer_ids"] = list(dspark["target_layer_ids"])
        values |= {f"dspark_{key}": value for key, value in dspark.items()}
    return values


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _transformers(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that transformers 5.23 DeepseekV4Config writes in place of the official ones."""
    model, share = _model(config), config.qk_rope_head_dim / config.head_dim
    main = {"rope_type": "default", "rope_theta": model["rope_theta"]}
    compress = {"rope_type": "yarn", "rope_theta": model["compress_rope_theta"], "attention_factor": ATTENTION_FACTOR}
    tables = {"main": main, "compress": compress | model["rope_scaling"]}
    hashed = config.num_hash_layers
    return {
        "layer_types": [LAYER_TYPES[ratio] for ratio in config.layer_ratios],
        "compress_rates": COMPRESS_RATES,
        "mlp_layer_types": [HASH_MLP] * hashed + [SCORE_MLP] * (config.num_hidden_layers - hashed),
        "rope_parameters": {name: table | {"partial_rotary_factor": share} for name, table in tables.items()},
        "partial_rotary_factor": share,
    }


def _inference(config: ModelConfig, formats: Formats) -> dict[str, Any]:
    """Return the official ModelArgs. Its expert_dtype is "fp4", or null for the dtype of the other matrices."""
    model = _model(config)
    rope = {key: model["rope_scaling"][name] for key, name in INFERENCE_ROPE_KEYS.items()}
    names = {name: key for key, name in INFERENCE_KEYS.items()}
    values = {names.get(key, key): value for key, value in model.items() if key not in NOT_OFFICIAL_ARGS} | rope
    values |= {"n_mtp_layers": config.draft_stages, "n_shared_experts": FIXED["n_shared_experts"]}
    values |= {"score_func": FIXED["scoring_func"], "scale_fmt": FP8_QUANTIZATION["scale_fmt"]}
    values["dtype"] = "fp8" if is_quantised(formats.linear) else "bf16"
    values["expert_dtype"] = "fp4" if STORAGE[formats.experts].expert_dtype == "fp4" else None
    return values


def _quantization(config: ModelConfig, formats: Formats) -> dict[str, Any]:
    """Return the quantization_config, or an empty dict if nothing is quantized: then there must be no such key.
     ignored_layers has the official names of the matrices that are bf16 or fp32 while others are quantized. vLLM and
    SGLang match these names exactly (routed experts by their module's name). transformers reads the key as
    modules_to_not_convert: it treats the entries as regular expressions, renames them like its weights, and then no
    longer skips the head by default. Patterns as in `ignore` would make it fail.

    vLLM and transformers reject an expert_dtype other than fp4 and fp8 if there is a quantization_config. So a model
    with bf16 experts and fp8 matrices fails to load in both, instead of loading incorrectly.
    """
    if not (is_quantised(formats.linear) or is_quantised(formats.experts)):
        return {}
    values = (
        FP8_QUANTIZATION | {"activation_scheme": "dynamic"} | {"expert_dtype": STORAGE[formats.experts].expert_dtype}
    )
    wide = [name for name, form in _modules(config, formats).items() if form in TORCH_DTYPE]
    if formats.experts == "nvfp4":
        values |= NVFP4_QUANTIZATION | {"producer": PRODUCER, "ignored_layers": ["head", *wide]}
        values |= {"ignore": NOT_NVFP4, "quantized_layers": _nvfp4_layers(config, formats)}
    elif wide:
        values["ignored_layers"] = ["head", *wide]
    return values


def _packed_quantization(config: ModelConfig, formats: Formats) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors: weight-only for the routed experts, all else bf16.

    vLLM matches its own names for the projections; the other patterns match the names in the files.
    """
    nvfp4 = formats.experts == "nvfp4"
    form = "nvfp4-pack-quantized" if nvfp4 else "mxfp4-pack-quantized"
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if nvfp4 else "group",
        "group_size": NVFP4_BLOCK if nvfp4 else FP4_BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
    }
    group = {"targets": PACKED_TARGETS, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": form}},
        "ignore": ["head", *(name for name, kind in _modules(config, formats).items() if kind in TORCH_DTYPE)],
    }


def _nvfp4_manifest(config: ModelConfig, formats: Formats) -> dict[str, Any]:
    """Return hf_quant_config.json as ModelOpt writes it."""
    quantization = {key: NVFP4_QUANTIZATION[key] for key in ("quant_algo", "group_size")}
    quantization |= {"kv_cache_quant_algo": None, "quantized_layers": _nvfp4_layers(config, formats)}
    return {"producer": PRODUCER, "quantization": quantization | {"exclude_modules": NOT_NVFP4}}


def _nvfp4_layers(config: ModelConfig, formats: Formats) -> dict[str, Any]:
    layer = {"quant_algo": NVFP4_QUANTIZATION["moe_quant_algo"], "group_size": NVFP4_QUANTIZATION["group_size"]}
    return {name: layer for name, form in _modules(config, formats).items() if form == "nvfp4"}


def _modules(config: ModelConfig, formats: Formats) -> dict[str, str]:
    """Return the storage format of every matrix that has one; the routed experts of a layer are one entry."""
    # one expert represents all
    specs = expected_tensors(replace(config, n_routed_experts=1, num_experts_per_tok=1), formats).values()
    return {
        spec.matrix.split(".experts.")[0] + ".experts" * (spec.expert is not None): spec.form
        for spec in specs
        if spec.form and not spec.is_scale
    }
