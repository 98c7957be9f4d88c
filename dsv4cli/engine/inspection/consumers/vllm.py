"""What vLLM 0.33.0 loads, from its source: models/deepseek_v4, model_loader/default_loader.py, layers/quantization.

This is its CUDA model. The configuration goes through transformers' DeepseekV4Config (vLLM requires transformers 5.16
to 5.20), so both dialects work.
"""

from collections.abc import Iterator

from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.inspection.consumers import common
from dsv4cli.engine.inspection.consumers.checkpoint import Finding, InspectedCheckpoint, Rule


def ratios(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the ratio keys (transformers_utils/deepseek_v4_utils.py, get_compress_ratios)."""
    if not {"compress_ratios", "layer_types"} & checkpoint.config.keys():
        yield Finding("no", "config.json has neither compress_ratios nor layer_types")


def experts(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check expert_dtype, read from the top level only, 'fp4' by default.

    Source: quant_config.py, DeepseekV4FP8Config.expert_dtype and get_quant_method.
    """
    if checkpoint.quantization is None or not checkpoint.quantised:
        return
    given, form = checkpoint.config.get("expert_dtype", "fp4"), checkpoint.formats.experts
    nvfp4 = str(checkpoint.quantization_says("moe_quant_algo") or "").upper() == "NVFP4"
    if given not in ("fp4", "fp8"):
        yield Finding("no", f"expert_dtype is {given!r}; vLLM knows fp4 and fp8 only")
    elif STORAGE[form].expert_dtype == "fp8" and given == "fp4":
        yield Finding("no", "the experts are FP8 and vLLM takes them for FP4, as expert_dtype is not 'fp8'")
    elif form == "fp8":
        # nvidia/model.py, load_weights: an e8m0 expert scale is viewed as uint8; Fp8MoEMethod has F32 parameters for it
        yield Finding(
            "no",
            "the scales of the FP8 experts are e8m0: vLLM copies their bytes as numbers (121 for 2^-6) into F32 "
            "parameters, without an error",
        )
    elif form in ("bf16", "f32"):
        yield from _wide_experts(checkpoint, given)
    elif given == "fp8" and form != "fp8_f32":
        yield Finding("no", "expert_dtype is 'fp8' and the experts are not", 'set "expert_dtype": "fp4" in config.json')
    elif form != "fp8_f32" and (form == "nvfp4") != nvfp4:
        is_said = "says" if nvfp4 else "does not say"
        yield Finding("no", f"the experts are {form.upper()} and quantization_config {is_said} moe_quant_algo NVFP4")


def _wide_experts(checkpoint: InspectedCheckpoint, given: str) -> Iterator[Finding]:
    if checkpoint.spares_layers:
        yield Finding("not known", "ignored_layers is not checked: it must spare the experts, which are not quantised")
    else:
        yield Finding(
            "no", f"the experts are {checkpoint.formats.experts.upper()} and vLLM takes them for {given.upper()}"
        )


def linears(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the linears: FP8 parameters unless ignored_layers lists them, with F32 scales if expert_dtype is fp8.

    Source: fp8.py, Fp8LinearMethod; quant_config.py, is_scale_e8m0.
    """
    stored = {checkpoint.formats.linear, checkpoint.formats.output}
    given = checkpoint.config.get("expert_dtype", "fp4")
    if checkpoint.quantization is None or stored == {"fp8_f32" if given == "fp8" else "fp8"}:
        return
    if stored <= {"fp8", "fp8_f32"}:
        found, wanted = ("e8m0", "F32") if given == "fp8" else ("F32", "e8m0")
        yield Finding("no", f"block scales are {found}; vLLM takes {wanted} ones where expert_dtype is {given!r}")
    elif checkpoint.quantised and checkpoint.spares_layers:
        yield Finding("not known", "ignored_layers is not checked: it must spare every matrix that is not FP8")
    elif checkpoint.quantised:
        yield Finding("no", "some matrices outside the experts are not FP8 and no ignored_layers says so")


def drafter(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the drafter: its experts are built like the model's (quant_config.py, get_quant_method)."""
    if checkpoint.identity.config.drafter == "none":
        yield Finding("note", "there is no drafter: no speculative decoding")
    elif checkpoint.formats.drafter != checkpoint.formats.experts:
        form, other = checkpoint.formats.drafter.upper(), checkpoint.formats.experts.upper()
        yield Finding("note", f"the drafter's experts are {form} and vLLM wants {other}: no speculative decoding")


RULES: tuple[Rule, ...] = (
    # default_loader.py, load_weights: tracked for models that are not quantised only
    common.damage("vLLM does not notice where a model is quantised, and computes with whatever the memory holds"),
    common.root_config(architecture=True),
    common.official_names("vLLM stops at the first of them"),
    # models/utils.py, AutoWeightsLoader, and the loop of load_weights in nvidia/model.py
    common.unknown_tensors("vLLM stops at it", fatal=True),
    ratios,
    # quant_config.py, DeepseekV4FP8Config.override_quantization_method; fp8.py, Fp8Config.from_config
    common.fp8_config("vLLM"),
    experts,
    linears,
    common.tokenizer(fatal=True),
    common.index,
    drafter,
)
