"""What is like a checkpoint of this model and is not: other models, other layouts, and how they are known; no torch."""

from dataclasses import dataclass

OFFICIAL = "use the official checkpoint: `dsv4 download flash`"
BACK = ", or convert it back with `dsv4 convert {folder} OUT --to official`"
FOR = "see who loads it with `dsv4 inspect {folder} --for "
OTHER_MODELS = {
    "deepseek_v41": "DeepSeek-V4.1, another architecture",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v2": "DeepSeek-V2",
}


@dataclass(frozen=True)
class Foreign:
    """What is not the official layout. convertible: `dsv4 convert` reads it."""

    what: str
    remedy: str = OFFICIAL
    convertible: bool = False


GGUF = Foreign("a GGUF model", "run it with llama.cpp or ds4, or " + OFFICIAL)
MP = Foreign("a checkpoint cut for one number of GPUs by the official convert.py", FOR + "official`" + BACK, True)
NVFP4 = Foreign("an NVFP4 export", FOR + "vllm`" + BACK, True)
# what only the weights of a conversion or of a foreign model have, by a pattern of tensor names; the first match counts
FOREIGN_TENSORS = {
    r"\.kv_(a_proj_with_mqa|b_proj)\.": Foreign("a DeepSeek-V2 or V3 model", "run it with vLLM or SGLang"),
    r"(^|\.)engram|\.bias_vl$": Foreign("a DeepSeek-V4.1 or vision model", "run it with vLLM or SGLang"),
    r"\.weight_packed$": Foreign("a compressed-tensors export"),
    r"^model\d+-mp\d+/": MP,
    r"\.weight_scale_2$": NVFP4,
    r"\.weight_scale(_inv)?$": Foreign("a checkpoint of another quantisation tool"),
    r"^model\.(layers|embed_tokens)\.": Foreign(
        "a checkpoint with transformers' tensor names", FOR + "transformers`" + BACK, True
    ),
}
