"""Copies of a golden checkpoint that look like what the engine does not run: other models, exports, other layouts.

FOREIGN lists them with words that the refusal must contain, for every command that opens a checkpoint.
"""

import json
from dataclasses import replace
from pathlib import Path

from tests.support.damage import INDEX, Damage, Stored, edit_config, edit_json, folder_empty, rewrite


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


def is_base(folder: Path) -> None:
    def widen(name: str, stored: Stored) -> dict[str, Stored]:
        rows, columns = (*stored.shape, 0)[:2]
        if stored.dtype == "I8":
            return {name: Stored("F8_E4M3", [rows, columns * 2], bytes(rows * columns * 2))}
        if stored.dtype == "F8_E8M0":
            blocks = [rows // 128, columns // 4] if ".experts." in name else [rows, columns]
            return {name: Stored("F32", blocks, bytes(4 * blocks[0] * blocks[1]))}
        return {name: stored}

    rewrite(folder, widen)
    edit_json(folder / "config.json", lambda config: config["quantization_config"].pop("scale_fmt"))


def has_f32_scales(folder: Path) -> None:
    def widen(name: str, stored: Stored) -> dict[str, Stored]:
        if stored.dtype == "F8_E8M0" and ".ffn.experts." not in name:
            return {name: Stored("F32", stored.shape, bytes(4 * len(stored.data)))}
        return {} if ".ffn.experts." in name else {name: stored}

    rewrite(folder, widen)


def is_nvfp4(folder: Path) -> None:
    def export(name: str, stored: Stored) -> dict[str, Stored]:
        if ".ffn.experts." not in name:
            return {name: stored}
        if name.endswith(".weight"):
            return {name: replace(stored, dtype="U8"), f"{name}_scale_2": Stored("F32", [], bytes(4))}
        rows, columns = stored.shape
        return {
            name.replace(".scale", ".weight_scale"): Stored("F8_E4M3", [rows, 2 * columns], bytes(2 * rows * columns))
        }

    rewrite(folder, export)


def says_nvfp4(folder: Path) -> None:
    is_nvfp4(folder)
    quantization = {"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    edit_config(folder, quantization_config=quantization)


def is_compressed_tensors(folder: Path) -> None:
    def export(name: str, stored: Stored) -> dict[str, Stored]:
        return {name.replace(".weight", ".weight_packed") if stored.dtype == "I8" else name: stored}

    rewrite(folder, export)


def says_compressed_tensors(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})


def is_cut_for_gpus(folder: Path) -> None:
    for rank, path in enumerate(sorted(folder.glob("model-*.safetensors"))):
        path.rename(folder / f"model{rank}-mp3.safetensors")
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()


def is_gguf(folder: Path) -> None:
    folder_empty(folder)
    (folder / "config.json").unlink()
    (folder / "DeepSeek-V4-Flash-Q4.gguf").write_bytes(b"GGUF")


FOREIGN: dict[Damage, tuple[str, ...]] = {
    is_v41: ("DeepSeek-V4.1", "deepseek_v41"),
    is_v3: ("DeepSeek-V3", "deepseek_v3"),
    is_another_model: ("another model", "llama"),
    has_v3_tensors: ("V3", "kv_b_proj"),
    has_transformers_names: ("transformers' tensor names", "model.layers.0"),
    is_base: ("Base checkpoint", "F32 block scales"),
    has_f32_scales: ("another FP8 layout", "F32 block scales"),
    is_nvfp4: ("NVFP4 export", "weight_scale_2"),
    says_nvfp4: ("NVFP4 export", "moe_quant_algo"),
    is_compressed_tensors: ("compressed-tensors export", "weight_packed"),
    says_compressed_tensors: ("compressed-tensors export", "quant_method"),
    is_cut_for_gpus: ("cut for one number of GPUs", "model0-mp3.safetensors"),
    is_gguf: ("GGUF", ".gguf"),
}
