"""What transformers 5.23.0 loads; every rule was tested with it (on a CPU, and as on a GPU with FP8).

DeepseekV4ForCausalLM renames official names itself (conversion_mapping.py) and accepts its own. On a GPU with FP8,
quantized matrices stay quantized; elsewhere they are loaded as bf16 (quantizer_finegrained_fp8.py).
"""

from collections.abc import Iterator

from dsv4cli.engine.checkpoint.headers import INDEX
from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.inspection.consumers import common
from dsv4cli.engine.inspection.consumers.checkpoint import Finding, InspectedCheckpoint, Rule

VERSION = "transformers 5.23.0"
SINGLE_FILE = "model.safetensors"


def ratios(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the ratio keys: without them the layers get another schedule.

    Source: configuration_deepseek_v4.py, __post_init__.
    """
    if not {"compress_ratios", "layer_types"} & checkpoint.config.keys():
        yield Finding("no", "config.json has neither compress_ratios nor layer_types")


def files(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the files (modeling_utils.py, _get_resolved_checkpoint_files; utils/hub.py, get_checkpoint_shard_files)."""
    names = [path.name for path in checkpoint.identity.checkpoint.files]
    if checkpoint.ranks:
        yield Finding("no", f"the files are cut for the official scripts on {checkpoint.ranks} GPUs")
    elif not checkpoint.has_index and names != [SINGLE_FILE]:
        yield Finding("no", f"there is neither {INDEX} nor {SINGLE_FILE}")
    elif not checkpoint.index_metadata:
        yield Finding("no", f"{INDEX} has no key 'metadata'", f'add "metadata": {{}} to {INDEX}')


def quantization(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the quant_method, which selects the class (quantizers/auto.py); it must be a FineGrainedFP8Config."""
    found = checkpoint.quantization
    if checkpoint.quantised and found is None:
        yield Finding("no", "config.json has no quantization_config and the weights are quantised", common.RELEASED)
    elif not checkpoint.quantised and found is not None:
        text = "config.json has a quantization_config and no matrix is quantised"
        yield Finding("no", text, "remove quantization_config from config.json")
    elif found is not None and found.get("quant_method") != "fp8":
        method = found.get("quant_method")
        yield Finding("not known", f"quant_method is {method!r}; it is only known what transformers does with 'fp8'")


def experts(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check FineGrainedFP8Config.expert_dtype: from quantization_config, else from the top level, else fp8."""
    form = checkpoint.formats.experts
    if form == "nvfp4":
        yield Finding("no", "the experts are NVFP4, which transformers does not support for this model")
        return
    if checkpoint.quantization is None or not checkpoint.quantised:
        return
    given = checkpoint.quantization.get("expert_dtype") or checkpoint.config.get("expert_dtype") or "fp8"
    if given not in ("fp4", "fp8"):
        yield Finding("no", f"expert_dtype is {given!r}; transformers knows fp4 and fp8 only")
    elif STORAGE[form].expert_dtype != given:
        unasked = "expert_dtype" not in {*checkpoint.quantization, *checkpoint.config}
        why = "without expert_dtype" if unasked else f"as expert_dtype is {given!r}"
        fix = f'set "expert_dtype": "{form}" in config.json' if form in ("fp4", "fp8") else ""
        text = (
            f"the experts are {form.upper()} and it takes them for {given.upper()} {why}; without an FP8 GPU it loads"
        )
        yield Finding("no", text, fix)


def linears(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the linears: ignored_layers are not replaced (integrations/finegrained_fp8.py, replace_with_fp8_linear)."""
    if checkpoint.quantization is None or not checkpoint.quantised:
        return
    stored = {checkpoint.formats.linear, checkpoint.formats.output}
    if not stored <= {"fp8", "fp8_f32"} and not checkpoint.spares_layers:
        text = (
            "some matrices outside the experts are not FP8 and no ignored_layers says so; without an FP8 GPU it loads"
        )
        yield Finding("no", text)


def names(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Report that transformers' names are untested with quantized weights; they work in bf16 and fp32."""
    if checkpoint.has_transformers_names and checkpoint.quantised:
        yield Finding("not known", "transformers' names with quantised weights have not been tried")


def needs(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Report other requirements and ignored tensors (modeling_deepseek_v4.py, _keys_to_ignore_on_load_unexpected)."""
    if checkpoint.quantised:
        yield Finding("note", "FP8 needs the package accelerate, and on a GPU the package kernels and the hub")
        yield Finding("note", "without an FP8 GPU every matrix becomes bf16: two bytes a parameter")
    if not any(path.startswith("chat_template") for path in checkpoint.files):
        yield Finding("note", "there is no chat template: `dsv4 inspect MODEL --template` prints the release's")
    if checkpoint.identity.config.drafter != "none":
        yield Finding("note", "transformers ignores the drafter (mtp.*), and what it saves has none")


RULES: tuple[Rule, ...] = (
    common.damage("transformers fills missing tensors with random numbers, and warns"),
    common.root_config(architecture=False),
    common.unknown_tensors("transformers reports it and continues", fatal=False),
    files,
    ratios,
    quantization,
    experts,
    linears,
    common.wide_scales("transformers"),
    names,
    common.tokenizer(fatal=False),
    common.index,
    needs,
)
