"""What a configuration says about how the weights are stored, and what of that is refused; no torch.

The formats themselves are read off the tensors; what is said here must only be possible and not contradict itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsv4cli.engine.config.formats import EXPERT_DTYPES, STORAGE, FormatName, is_quantised
from dsv4cli.engine.config.keys import FP8_QUANTIZATION, NVFP4_QUANTIZATION
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

DenseFormat = Literal["bf16", "f32"]


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored: `linear` of attention and shared experts, `experts`, `dense` everything in BF16.

    wo_a: None where it is as the other linears; the official convert.py widens it to bf16 alone. draft_experts: None
    where those of the drafter are as the others; NVIDIA's NVFP4 exports leave them in FP4.
    """

    linear: FormatName = "fp8"
    experts: FormatName = "fp4"
    dense: DenseFormat = "bf16"
    wo_a: FormatName | None = None
    draft_experts: FormatName | None = None

    @property
    def output(self) -> FormatName:
        """The format of wo_a, the first matrix of the grouped output."""
        return self.wo_a or self.linear

    @property
    def drafter(self) -> FormatName:
        """The format of the drafter's routed experts."""
        return self.draft_experts or self.experts


def check_storage(values: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedCheckpoint for a quantization_config that is neither the releases' nor ModelOpt's for NVFP4
    experts, CheckpointError for an expert_dtype that does not exist."""
    quantization = _quantization(values, where)
    nvfp4 = quantization.get("moe_quant_algo") is not None
    if quantization.get("quant_method") != "compressed-tensors":
        _check(quantization, {**FP8_QUANTIZATION, **(NVFP4_QUANTIZATION if nvfp4 else {"quant_algo": None})}, where)
    for key, value in _expert_dtypes(values, quantization).items():
        if not isinstance(value, str) or value not in EXPERT_DTYPES:
            known = ", ".join(EXPERT_DTYPES)
            raise CheckpointError(
                f"{where}: {key} is {value!r}, known values are {known}", "correct it: it must say what the tensors are"
            )


def contradictions(values: Mapping[str, Any], formats: "Formats") -> Iterator[str]:
    """What a config.json says about the storage that is not so, a sentence each; other programs may go by it.

    formats: as the tensors are stored.
    """
    quantization = values.get("quantization_config")
    found = quantization if isinstance(quantization, Mapping) else {}
    for key, given in _expert_dtypes(values, found).items():
        if given != STORAGE[formats.experts].expert_dtype:
            yield f"config.json says {key} {given!r}, and the experts are {STORAGE[formats.experts].words}"
    if not found or found.get("quant_method") == "compressed-tensors":
        return
    matrices = {formats.linear, formats.output}
    if not any(map(is_quantised, (*matrices, formats.experts))):
        yield "config.json has a quantization_config, and no matrix is quantised"
        return
    is_nvfp4 = str(found.get("moe_quant_algo")).upper() == "NVFP4"
    if is_nvfp4 is not (formats.experts == "nvfp4"):
        says = "says" if is_nvfp4 else "does not say"
        yield f"quantization_config {says} moe_quant_algo 'NVFP4', and the experts are {formats.experts}"
    others = " and ".join(sorted(form for form in matrices if STORAGE[form].expert_dtype != "fp8"))
    if others and not any(found.get(key) for key in ("ignored_layers", "modules_to_not_convert")):
        yield f"quantization_config says fp8, and the matrices outside the experts are {others}"


def _expert_dtypes(values: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of the experts, by the key that says it."""
    places = {"expert_dtype": values, "quantization_config.expert_dtype": quantization}
    return {key: place["expert_dtype"] for key, place in places.items() if place.get("expert_dtype") is not None}


def _quantization(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    quantization = values.get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization_config is {quantization!r}", "use the config.json of the release")
    return quantization


def _check(quantization: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    for key, value in expected.items():
        if quantization.get(key) not in (value, None):
            raise UnsupportedCheckpoint(
                f"{where}: quantization_config.{key} is {quantization[key]!r}, the official layout has {value!r}",
                "use the official checkpoint (FP4 experts, FP8 linears)",
            )
