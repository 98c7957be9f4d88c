"""Targets of a conversion: storage formats and naming of each. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, written_types
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.naming import CompressedNaming, MpNaming, Naming, OfficialNaming, TransformersNaming
from dsv4cli.engine.config.formats import FormatName
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UsageError

TargetName = Literal["official", "bf16", "fp8", "base", "nvfp4", "mp", "transformers", "gguf", "compressed-tensors"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)
# the official convert.py widens wo_a, whose grouped product its kernels take in bf16; NVIDIA's NVFP4 exports, and
# SGLang, have the drafter as it was
FORMATS: Mapping[TargetName, Formats] = {
    "official": Formats("fp8", "fp4", "bf16"),
    "bf16": Formats("bf16", "bf16", "bf16"),
    "fp8": Formats("fp8", "fp8", "bf16"),
    "base": Formats("fp8_f32", "fp8_f32", "bf16"),
    "nvfp4": Formats("fp8", "nvfp4", "bf16", draft_experts="fp4"),
    "mp": Formats("fp8", "fp4", "bf16", wo_a="bf16"),
    "transformers": Formats("bf16", "bf16", "bf16"),
    # matrices in fp32 are rounded to Q8_0 as they are written
    "gguf": Formats("f32", "fp4", "bf16"),
    "compressed-tensors": Formats("bf16", "fp4", "bf16"),
}
# values of --experts for each target, the default first
EXPERTS: Mapping[TargetName, tuple[FormatName, ...]] = {
    "official": ("fp4", "fp8", "bf16"),
    "bf16": ("bf16", "fp4", "fp8"),
    "fp8": ("fp8",),
    "base": ("fp8_f32",),
    "nvfp4": ("nvfp4",),
    "mp": ("fp4", "fp8", "bf16"),
    "transformers": ("bf16",),
    "gguf": ("fp4", "bf16"),
    "compressed-tensors": ("fp4", "nvfp4"),
}
# targets that support only bf16 for matrices outside the experts
ONLY_BF16 = ("transformers", "gguf", "compressed-tensors")


@dataclass(frozen=True)
class Target:
    """A target with its options resolved."""

    name: TargetName
    formats: Formats
    naming: Naming

    def table(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """Return every tensor of an output with this configuration, by official name."""
        return _table(self.name, config, self.formats)


def choose_target(
    name: TargetName,
    config: ModelConfig,
    *,
    experts: FormatName | None = None,
    attention: FormatName | None = None,
    ranks: int | None = None,
) -> Target:
    """Return the target for a model of this configuration.

    Args:
        experts, attention: storage formats to use instead of the target's own; `attention` is every quantizable matrix
            outside the routed experts.
        ranks: the number of `mp` ranks.

    Raises UsageError for a choice that the target does not have.
    """
    formats = FORMATS[name]
    if experts is not None:
        if experts not in EXPERTS[name]:
            raise UsageError(
                f"--to {name} cannot store experts in {experts}", f"use --experts {' or '.join(EXPERTS[name])}"
            )
        formats = replace(formats, experts=experts)
    if attention is not None:
        if name in ONLY_BF16 and attention != "bf16":
            raise UsageError(f"--to {name} cannot store attention in {attention}", "use --attention bf16")
        formats = replace(formats, linear=attention, wo_a=None if formats.wo_a == attention else formats.wo_a)
    if (name == "mp") != (ranks is not None):
        raise UsageError("--ranks N and --to mp must be used together", "for example `--to mp --ranks 4`")
    return Target(name, formats, _naming(name, config, formats, ranks))


def _table(name: TargetName, config: ModelConfig, formats: Formats) -> dict[str, TensorSpec]:
    specs = expected_tensors(config, formats)
    if name == "compressed-tensors":
        # weights alone are quantised
        return {key: spec for key, spec in specs.items() if spec.role != "input_scale"}
    if name != "gguf":
        return specs
    # llama.cpp multiplies by vectors in fp32 only
    wide = expected_tensors(config, replace(formats, dense="f32"))
    return {key: wide[key] if len(spec.shape) == 1 else spec for key, spec in specs.items()}


def _naming(name: TargetName, config: ModelConfig, formats: Formats, ranks: int | None) -> Naming:
    if ranks is not None:
        return MpNaming(ranks, config.n_routed_experts)
    if name == "gguf":
        return GgufNaming(config.n_routed_experts, written_types(_table(name, config, formats).values()))
    if name == "compressed-tensors":
        return CompressedNaming((1,), "U8")
    return TransformersNaming(config) if name == "transformers" else OfficialNaming()
