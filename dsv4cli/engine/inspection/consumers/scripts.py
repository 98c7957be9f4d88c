"""What the official inference scripts load: generate.py and model.py of the releases.

generate.py reads model{rank}-mp{world}.safetensors with strict=False, the tokenizer in the same folder, and ModelArgs
from the file that --config names.
"""

from collections.abc import Iterator

from dsv4cli.engine.config.keys import (
    DEFAULTS,
    DSPARK_KEYS,
    INFERENCE_IGNORED,
    INFERENCE_KEYS,
    INFERENCE_ROPE_KEYS,
    INTEGERS,
    NUMBERS,
)
from dsv4cli.engine.inspection.consumers import common
from dsv4cli.engine.inspection.consumers.checkpoint import INFERENCE, Finding, InspectedCheckpoint, Rule

VERSION = "the official inference scripts (April to August 2026)"
# ModelArgs, which takes no other key
ARGUMENTS = {
    *INFERENCE_KEYS, *INFERENCE_ROPE_KEYS, *INFERENCE_IGNORED, *DSPARK_KEYS, *INTEGERS, *NUMBERS, *DEFAULTS,
    "compress_ratios", "expert_dtype", "n_shared_experts", "temperature",
} - set(INFERENCE_KEYS.values())  # fmt: skip


def cut(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check that there is one file per process (generate.py, load_model)."""
    if not checkpoint.ranks:
        yield Finding("no", "the scripts read files cut for the number of GPUs, model0-mp4.safetensors for instance")


def arguments(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check --config: its dtypes select the parameters (generate.py; model.py, ModelArgs and Linear)."""
    if not checkpoint.ranks:
        return
    if INFERENCE not in checkpoint.files:
        yield Finding("no", f"there is no {INFERENCE}", "copy inference/ of the release into the folder")
        return
    unknown = sorted(key for key in checkpoint.inference if key not in ARGUMENTS)
    if unknown:
        yield Finding("no", f"{INFERENCE}: ModelArgs has no {unknown[0]}", f"remove {unknown[0]} from {INFERENCE}")
    linear, experts = checkpoint.formats.linear, checkpoint.formats.experts
    dtype, given = checkpoint.inference.get("dtype", "fp8"), checkpoint.inference.get("expert_dtype")
    if dtype != linear:
        yield Finding("no", f"{INFERENCE}: dtype is {dtype!r} and the matrices are {linear.upper()}")
    wanted = "fp4" if experts == "fp4" else None
    if experts not in ("fp4", linear):
        yield Finding("no", f"the experts are {experts.upper()}: model.py has FP4 or the format of the other matrices")
    elif given != wanted:
        words = "null" if wanted is None else '"fp4"'
        text = f"{INFERENCE}: expert_dtype is {given!r} and the experts are {experts.upper()}"
        yield Finding("no", text, f'set "expert_dtype": {words} in {INFERENCE}')


def output_projection(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check wo_a, a bf16 parameter, to which convert.py dequantizes it (model.py, Attention)."""
    if checkpoint.ranks and checkpoint.formats.output != "bf16":
        yield Finding("no", f"wo_a is {checkpoint.formats.output.upper()} and model.py has it in bf16")


def processes(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the number of processes (generate.py, WORLD_SIZE)."""
    if checkpoint.ranks:
        yield Finding("note", f"it runs on {checkpoint.ranks} GPUs, no more and no fewer")


RULES: tuple[Rule, ...] = (
    common.damage("the scripts do not notice (strict=False) and compute with whatever the memory holds"),
    cut,
    arguments,
    output_projection,
    common.unknown_tensors("the scripts do not notice (strict=False)", fatal=False),
    common.tokenizer(fatal=True),
    processes,
)
