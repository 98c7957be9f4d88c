"""Copies of a golden checkpoint that look like what the engine does not run: other models, exports, other layouts.

FOREIGN lists them with words that the refusal must contain, for every command that opens a checkpoint.
"""

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import INDEX, Damage, Stored, edit_config, folder_empty, rewrite


def half(harms: Iterable[Damage], which: int) -> list[Any]:
    """Every other one, from `which` on, and the rest among the slow tests: of two commands each meets another half, and
    `dsv4 inspect` every third (test_inspect.py)."""
    return [
        harm if number % 2 == which else pytest.param(harm, marks=pytest.mark.slow) for number, harm in enumerate(harms)
    ]


def is_v41(folder: Path) -> None:
    edit_config(folder, model_type="deepseek_v41", architectures=["DeepseekV41ForCausalLM"])


def is_v3(folder: Path) -> None:
    values = {"model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512, "num_hidden_layers": 61}
    (folder / "config.json").write_text(json.dumps(values))


def is_another_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}))


def has_v3_tensors(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {"model." + name.replace(".attn.wkv", ".self_attn.kv_b_proj"): stored})


def has_transformers_names(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {"model." + name.replace(".attn.", ".self_attn."): stored})


def lacks_scale_2(folder: Path) -> None:
    """NVFP4 without the scale of whole tensors, which a careless loader takes for 1."""

    def export(name: str, stored: Stored) -> dict[str, Stored]:
        if ".ffn.experts." not in name:
            return {name: stored}
        if name.endswith(".weight"):
            return {name: replace(stored, dtype="U8")}
        rows, columns = stored.shape
        return {
            name.replace(".scale", ".weight_scale"): Stored("F8_E4M3", [rows, 2 * columns], bytes(2 * rows * columns))
        }

    rewrite(folder, export)


def is_cut_for_gpus(folder: Path) -> None:
    for rank, path in enumerate(sorted(folder.glob("model-*.safetensors"))):
        path.rename(folder / f"model{rank}-mp3.safetensors")
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()


def has_bf16_scales(folder: Path) -> None:
    def widen(name: str, stored: Stored) -> dict[str, Stored]:
        odd = stored.dtype == "F8_E8M0" and ".ffn.experts." not in name
        return {name: Stored("BF16", stored.shape, bytes(2 * len(stored.data))) if odd else stored}

    rewrite(folder, widen)


def has_inverse_scales(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {name.replace(".scale", ".weight_scale_inv"): stored})


def has_wo_a_in_fp4(folder: Path) -> None:
    def pack(name: str, stored: Stored) -> dict[str, Stored]:
        rows, columns = (*stored.shape, 0)[:2]
        odd = name.endswith("wo_a.weight")
        return {name: Stored("U8", [rows, columns // 2], stored.data[: rows * columns // 2]) if odd else stored}

    rewrite(folder, pack)


def is_cut_for_no_process(folder: Path) -> None:
    for rank, path in enumerate(sorted(folder.glob("model-*.safetensors"))):
        path.rename(folder / f"model{rank}-mp0.safetensors")
    (folder / INDEX).unlink()


def is_compressed_tensors(folder: Path) -> None:
    """W4A16."""

    def export(name: str, stored: Stored) -> dict[str, Stored]:
        if stored.dtype != "I8":
            return {name: stored}
        return {name.replace(".weight", ".weight_packed"): stored, f"{name}_shape": Stored("I64", [2], bytes(16))}

    rewrite(folder, export)


def says_compressed_tensors(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})


def is_gguf(folder: Path) -> None:
    folder_empty(folder)
    (folder / "config.json").unlink()
    # version 3, no tensors, one key
    key, value = b"general.architecture", b"llama"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    (folder / "llama-Q4_K_M.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)


def has_f32_scales(folder: Path) -> None:
    """FP4 experts whose scales were widened from e8m0."""

    def widen(name: str, stored: Stored) -> dict[str, Stored]:
        odd = stored.dtype == "F8_E8M0" and ".ffn.experts." in name
        return {name: Stored("F32", stored.shape, bytes(4 * len(stored.data))) if odd else stored}

    rewrite(folder, widen)


def is_mlx(folder: Path) -> None:
    """As mlx-lm writes it: stacked experts, codes in words of 32 bits, scales and biases of groups."""

    def export(name: str, stored: Stored) -> dict[str, Stored]:
        if not name.endswith("ffn.experts.0.w1.weight"):
            return {name: stored}
        stem = name.replace("experts.0.w1.weight", "switch_mlp.gate_proj.")
        words = Stored("U32", [stored.shape[0], stored.shape[1] // 4], stored.data)
        group = Stored("BF16", [stored.shape[0], 1], bytes(2 * stored.shape[0]))
        return {stem + "weight": words, stem + "scales": group, stem + "biases": group}

    rewrite(folder, export)


def says_mlx(folder: Path) -> None:
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    edit_config(folder, quantization=quantization, quantization_config=quantization)


def is_gptq(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {re.sub(r"w1\.(weight|scale)$", r"w1.q\1", name): stored})


def says_awq(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True})


# known layouts of which something is not there
INCOMPLETE: dict[Damage, tuple[str, ...]] = {
    has_transformers_names: ("model.embed_tokens.weight is missing",),
    lacks_scale_2: ("experts.0.w1.weight_scale_2 is missing, but its weight is there",),
    is_cut_for_gpus: ("has no config.json",),
}
FOREIGN: dict[Damage, tuple[str, ...]] = {
    is_v41: ("DeepSeek-V4.1", "deepseek_v41"),
    is_v3: ("DeepSeek-V3", "deepseek_v3"),
    is_another_model: ("another model", "llama"),
    has_v3_tensors: ("V3", "kv_b_proj"),
    has_bf16_scales: ("linear weights are F8_E4M3 with block scales stored as BF16", "F8_E8M0 or F32"),
    has_inverse_scales: ("another quantisation tool", "weight_scale_inv"),
    has_wo_a_in_fp4: ("wo_a weights are stored as U8", "fp8"),
    is_cut_for_no_process: ("for an impossible number of GPUs", "model0-mp0"),
    is_compressed_tensors: ("compressed-tensors export in a format other", "weight_shape"),
    says_compressed_tensors: ("compressed-tensors export in a format other", "'pack-quantized'"),
    is_gguf: ("GGUF", ".gguf"),
    has_f32_scales: ("experts weights are I8 with block scales stored as F32", "F8_E8M0"),
    is_mlx: ("an MLX export", "switch_mlp.gate_proj"),
    says_mlx: ("an MLX export", "quantization.bits 4"),
    is_gptq: ("a GPTQ or AWQ export", "w1.qweight"),
    says_awq: ("an AWQ export", "quant_method 'awq'"),
}
