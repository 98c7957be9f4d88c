"""Rules shared by several consumers: damage, required files, names."""

from collections.abc import Iterator

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.config.keys import MODEL_TYPE
from dsv4cli.engine.inspection.consumers.checkpoint import (
    CONFIG,
    TOKENIZER,
    Finding,
    InspectedCheckpoint,
    Rule,
    and_more,
)
from dsv4cli.engine.text.gguf_vocabulary import has_vocabulary

OFFICIAL_ARCHITECTURE = "DeepseekV4ForCausalLM"
RELEASED = "copy config.json of the release into the folder"


def damage(consequence: str) -> Rule:
    """Return a rule on tensors that are missing or mismatched. consequence: how the consumer reacts to them."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        missing = checkpoint.identity.checkpoint.missing_files
        if missing:
            yield Finding("no", and_more([f"{name}, which the index lists, is missing" for name in missing]))
        elif checkpoint.damage:
            yield Finding("no", f"{and_more(checkpoint.damage)}; {consequence}")
        for sentence in checkpoint.identity.aliases:
            yield Finding("not known", f"{sentence}; whether other programs read it has not been tried")
        if checkpoint.drafter_damage and not missing:
            yield Finding("note", f"the drafter is damaged: {and_more(checkpoint.drafter_damage)}")
        if checkpoint.downcast:
            first, count = checkpoint.downcast[0], len(checkpoint.downcast)
            words = f"{count} tensors are" if count > 1 else "1 tensor is"
            yield Finding(
                "note",
                f"{words} {first.found} instead of {first.expected} ({first.name}): they load, but a rounding that was "
                "made once stays",
            )

    return rule


def unknown_tensors(reaction: str, *, fatal: bool) -> Rule:
    """Return a rule on tensors that the model does not have. reaction: how the consumer reacts to them."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        names = [f"{name} is not a tensor of this model" for name in checkpoint.coverage.unexpected]
        if names:
            yield Finding("no" if fatal else "note", f"{and_more(names)}; {reaction}")

    return rule


def wide_scales(consumer: str) -> Rule:
    """Return a rule on FP8 with F32 block scales, which no release for inference has."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        if "fp8_f32" in {checkpoint.formats.linear, checkpoint.formats.output, checkpoint.formats.experts}:
            yield Finding("not known", f"what {consumer} does with F32 block scales has not been tried")

    return rule


def index(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Report index errors: vLLM, SGLang and transformers read whole files and therefore run into them."""
    problems = list(checkpoint.coverage.index_problems)
    if problems:
        yield Finding("note", f"{and_more(problems)}; it reads whole files and finds it nevertheless")


def root_config(*, architecture: bool) -> Rule:
    """Return a rule on the root config.json and the two keys that select the model class."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        if CONFIG not in checkpoint.files:
            yield Finding("no", "there is no config.json", RELEASED)
            return
        if checkpoint.config.get("model_type") != MODEL_TYPE:
            yield Finding("no", "config.json has no model_type", f'add "model_type": "{MODEL_TYPE}" to config.json')
        if architecture and checkpoint.config.get("architectures") != [OFFICIAL_ARCHITECTURE]:
            yield Finding(
                "no",
                f"config.json does not say which class: architectures is {checkpoint.config.get('architectures')!r}",
                f'set "architectures": ["{OFFICIAL_ARCHITECTURE}"] in config.json',
            )

    return rule


def tokenizer(*, fatal: bool) -> Rule:
    """Return a rule on the tokenizer, without which no prompt can be encoded."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        identity = checkpoint.identity
        in_file = isinstance(identity, GgufIdentity) and has_vocabulary(identity.metadata)
        if TOKENIZER not in checkpoint.files and not in_file:
            fix = "copy tokenizer.json and tokenizer_config.json of the release into the folder"
            yield Finding("no" if fatal else "note", "there is no tokenizer.json", fix)

    return rule


def official_names(reaction: str) -> Rule:
    """Return a rule that requires official names and unsharded tensors.

    reaction: how the consumer reacts to other names.
    """

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        if checkpoint.ranks:
            yield Finding("no", f"the files are cut for the official scripts on {checkpoint.ranks} GPUs")
        elif checkpoint.has_transformers_names:
            yield Finding("no", f"the tensors have transformers' names; {reaction}")

    return rule


def fp8_config(consumer: str) -> Rule:
    """Return a rule on the quantization_config for vLLM and SGLang, in which 'fp8' covers FP4 experts too."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        found = checkpoint.quantization
        if not checkpoint.quantised and found is not None:
            text = "config.json has a quantization_config and no matrix is quantised: FP8 layers would be built"
            yield Finding("no", text, "remove quantization_config from config.json")
        elif checkpoint.quantised and found is None:
            yield Finding("no", "config.json has no quantization_config and the weights are quantised", RELEASED)
        elif found is not None and found.get("quant_method") != "fp8":
            method = found.get("quant_method")
            yield Finding("not known", f"quant_method is {method!r}; it is only known what {consumer} does with 'fp8'")
        elif found is not None and "activation_scheme" not in found:
            fix = 'add "activation_scheme": "dynamic" to the quantization_config'
            yield Finding("no", "quantization_config lacks activation_scheme", fix)

    return rule
