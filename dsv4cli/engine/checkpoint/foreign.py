"""Checkpoints that resemble this model but are not supported: other models, other tools' exports; no torch."""

from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.names import folder_word
from dsv4cli.errors import UnsupportedCheckpoint

OFFICIAL = "use the official checkpoint: `dsv4 download flash`"
CONVERT = "convert it back with `dsv4 convert {folder} OUT --to official`"
RESCALE = "if every scale is a power of two, write it as F8_E8M0 (its exponent plus 127, in a byte); or " + OFFICIAL
OTHER_MODELS = {
    "deepseek_v41": "DeepSeek-V4.1, another architecture",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v2": "DeepSeek-V2",
}


@dataclass(frozen=True)
class Foreign:
    """A checkpoint that has no known layout of this model."""

    what: str
    remedy: str = OFFICIAL


MLX = Foreign("an MLX export", "run it with mlx-lm, or " + OFFICIAL)
# quantization_config.quant_method of tools whose formats are not known here
QUANTIZERS = {
    "quark": Foreign("a Quark export"),
    "gptq": Foreign("a GPTQ export"),
    "awq": Foreign("an AWQ export"),
    "auto-round": Foreign("an AutoRound export"),
    "bitsandbytes": Foreign("a bitsandbytes export"),
    "hqq": Foreign("an HQQ export"),
    "torchao": Foreign("a torchao export"),
}
GGUF = Foreign(
    "a GGUF model", "check whether llama.cpp loads it: `dsv4 inspect {folder} --for llama.cpp`, or " + CONVERT
)
# patterns of tensor names that only another model or another tool's export has; the first match counts
FOREIGN_TENSORS = {
    r"\.kv_(a_proj_with_mqa|b_proj)\.": Foreign("a DeepSeek-V2 or V3 model", "run it with vLLM or SGLang"),
    r"(^|\.)engram|\.bias_vl$": Foreign("a DeepSeek-V4.1 or vision model", "run it with vLLM or SGLang"),
    r"\.weight_(shape|zero_point|g_idx)$": Foreign(
        "a compressed-tensors export in a format other than NVFP4 and MXFP4"
    ),
    r"^model\d+-mp(0|\d{5,})/": Foreign("a checkpoint cut by the official convert.py for an impossible number of GPUs"),
    r"\.(qweight|qzeros)$": Foreign("a GPTQ or AWQ export"),
    r"\.weight\.(absmax|quant_map|quant_state\.\w+)$": QUANTIZERS["bitsandbytes"],
    # GPTQ has .scales too
    r"\.switch_mlp\.|\.(scales|biases)$": MLX,
    r"\.weight_scale_inv$": Foreign("a checkpoint of another quantisation tool"),
}


def refusal(folder: Path, foreign: Foreign, sign: str) -> UnsupportedCheckpoint:
    """Return the error that names what a folder contains. sign: the evidence for it."""
    remedy = foreign.remedy.format(folder=folder_word(folder))
    return UnsupportedCheckpoint(f"{folder} is {foreign.what} ({sign}), which dsv4 does not run", remedy)
