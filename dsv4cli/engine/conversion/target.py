"""What a conversion aims at: the storage formats and the naming of each target; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dsv4cli.engine.checkpoint.naming import MpNaming, Naming, OfficialNaming, TransformersNaming
from dsv4cli.engine.config.formats import FormatName
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UsageError

TargetName = Literal["official", "bf16", "fp8", "base", "nvfp4", "mp", "transformers"]
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
}
# what --experts may say for a target; the first is its own
EXPERTS: Mapping[TargetName, tuple[FormatName, ...]] = {
    "official": ("fp4", "fp8", "bf16"),
    "bf16": ("bf16", "fp4", "fp8"),
    "fp8": ("fp8",),
    "base": ("fp8_f32",),
    "nvfp4": ("nvfp4",),
    "mp": ("fp4", "fp8", "bf16"),
    "transformers": ("bf16",),
}


@dataclass(frozen=True)
class Target:
    """A target with its choices made."""

    name: TargetName
    formats: Formats
    naming: Naming


def choose_target(
    name: TargetName,
    config: ModelConfig,
    *,
    experts: FormatName | None = None,
    attention: FormatName | None = None,
    ranks: int | None = None,
) -> Target:
    """The target for a model of this configuration.

    experts, attention: storage formats instead of the target's own; `attention` means every matrix outside the routed
    experts that has a storage format. ranks: of mp. Raises UsageError for a choice that the target does not have.
    """
    formats = FORMATS[name]
    if experts is not None:
        if experts not in EXPERTS[name]:
            raise UsageError(f"--to {name} has no experts in {experts}", f"allowed with it: {', '.join(EXPERTS[name])}")
        formats = replace(formats, experts=experts)
    if attention is not None:
        if name == "transformers" and attention != "bf16":
            raise UsageError(f"--to transformers has no attention in {attention}", "allowed with it: bf16")
        formats = replace(formats, linear=attention, wo_a=None if formats.wo_a == attention else formats.wo_a)
    if (name == "mp") != (ranks is not None):
        raise UsageError("--ranks N belongs to --to mp, and --to mp needs it", "as in `--to mp --ranks 4`")
    return Target(name, formats, _naming(name, config, ranks))


def _naming(name: TargetName, config: ModelConfig, ranks: int | None) -> Naming:
    if ranks is not None:
        return MpNaming(ranks, config.n_routed_experts)
    return TransformersNaming(config) if name == "transformers" else OfficialNaming()
