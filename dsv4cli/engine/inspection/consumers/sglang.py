"""What SGLang 0.5.23 loads, from its source: models/deepseek_v4.py, configs/model_config.py, layers/quantization.

The configuration is a DeepseekV3Config with the unchanged keys of config.json, so only the official dialect works.
"""

from collections.abc import Iterator

from dsv4cli.engine.inspection.consumers import common
from dsv4cli.engine.inspection.consumers.checkpoint import Finding, InspectedCheckpoint, Rule

# models/deepseek_v4.py and deepseek_v2.py: attributes of the configuration
KEYS = ("compress_ratios", "compress_rope_theta", "num_hash_layers", "rope_scaling")


def dialect(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the keys that transformers' save_pretrained strips."""
    missing = [key for key in KEYS if key not in checkpoint.config]
    if missing and checkpoint.config:
        yield Finding("no", f"config.json lacks the official {', '.join(missing)}")


def experts(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the experts: their format is probed in a header, and expert_dtype is ignored (configs/model_config.py)."""
    form = checkpoint.formats.experts
    says = {key: str(checkpoint.quantization_says(key) or "").upper() for key in ("quant_algo", "moe_quant_algo")}
    nvfp4 = (
        list(says.values()) == ["MIXED_PRECISION", "NVFP4"] and checkpoint.quantization_says("group_size") is not None
    )
    if form in ("bf16", "f32"):
        # configs/deepseek_v4.py, try_detect_fp4_experts: packed types and F8_E4M3 only, else the default, FP4
        yield Finding(
            "not known",
            f"the experts are {form.upper()}, which SGLang's probe does not know: it continues as for FP4 unless "
            "SGLANG_DSV4_FP4_EXPERTS=0; the result has not been tested",
        )
    elif form == "nvfp4" and not nvfp4:
        yield Finding(
            "no",
            "the experts are NVFP4 and quantization_config does not say so (quant_algo MIXED_PRECISION, "
            "moe_quant_algo NVFP4, group_size)",
        )
    elif form != "nvfp4" and nvfp4:
        yield Finding("no", f"the experts are {form.upper()} and quantization_config says NVFP4")


def linears(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the linears: with FP8, wo_a must be FP8.

    Source: layers/quantization/fp8.py; models/deepseek_v4.py, load_weights.
    """
    linear, output = checkpoint.formats.linear, checkpoint.formats.output
    if checkpoint.quantization is None or not checkpoint.quantised or {linear, output} <= {"fp8", "fp8_f32"}:
        return
    if linear == "fp8":
        yield Finding(
            "no", f"wo_a is {output.upper()}: SGLang wants FP8 or SGLANG_OPT_FP8_WO_A_GEMM=0 in its environment"
        )
    elif checkpoint.spares_layers:
        yield Finding("not known", "ignored_layers is not checked: it must spare every matrix that is not FP8")
    else:
        yield Finding("no", "some matrices outside the experts are not FP8 and no ignored_layers says so")


def drafter(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the drafter: with NVFP4 experts in the model, its own are built in FP4 (model_loader/loader.py)."""
    if checkpoint.identity.config.drafter == "none":
        yield Finding("note", "there is no drafter: no speculative decoding")
    elif checkpoint.formats.drafter == "nvfp4":
        yield Finding("note", "the drafter's experts are NVFP4 and SGLang wants them in FP4: no speculative decoding")


RULES: tuple[Rule, ...] = (
    # models/deepseek_v4.py, load_weights: logged as a warning
    common.damage("SGLang only warns, and computes with whatever the memory holds"),
    common.root_config(architecture=True),
    common.official_names("SGLang only warns about each name it does not know, and loads nothing of it"),
    common.unknown_tensors("SGLang warns and continues", fatal=False),
    dialect,
    # layers/quantization/fp8.py, Fp8Config.from_config
    common.fp8_config("SGLang"),
    experts,
    linears,
    common.wide_scales("SGLang"),
    common.tokenizer(fatal=True),
    common.index,
    drafter,
)
