"""What a configuration states about weight storage, and which statements are refused; no torch.

The formats are determined from the tensors; the statements must only be possible and consistent.
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
    """Storage formats of the matrices.

    Attributes:
        linear: attention and shared experts.
        experts: routed experts.
        dense: everything that the releases store in BF16.
        wo_a: None if as `linear`; the official convert.py converts wo_a alone to bf16.
        draft_experts: routed experts of the drafter, None if as `experts`; NVIDIA's NVFP4 exports keep them in FP4.
    """

    linear: FormatName = "fp8"
    experts: FormatName = "fp4"
    dense: DenseFormat = "bf16"
    wo_a: FormatName | None = None
    draft_experts: FormatName | None = None

    @property
    def output(self) -> FormatName:
        """The format of wo_a, the first matrix of the grouped output projection."""
        return self.wo_a or self.linear

    @property
    def drafter(self) -> FormatName:
        """The format of the drafter's routed experts."""
        return self.draft_experts or self.experts


def check_storage(values: Mapping[str, Any], where: str) -> None:
    """Check the statements of a config.json about storage.

    Raises UnsupportedCheckpoint for a quantization_config that is neither the releases' nor ModelOpt's for NVFP4
    experts, CheckpointError for an expert_dtype that does not exist.
    """
    quantization = _quantization(values, where)
    nvfp4 = quantization.get("moe_quant_algo") is not None
    if quantization.get("quant_method") != "compressed-tensors":
        _check(quantization, {**FP8_QUANTIZATION, **(NVFP4_QUANTIZATION if nvfp4 else {"quant_algo": None})}, where)
    for key, value in _expert_dtypes(values, quantization).items():
        if not isinstance(value, str) or value not in EXPERT_DTYPES:
            known = ", ".join(EXPERT_DTYPES)
            raise CheckpointError(
                f"{where}: {key} is {value!r}; known values are {known}", "correct it to match the tensors"
            )


def contradictions(values: Mapping[str, Any], formats: "Formats") -> Iterator[str]:
    """Yield a sentence for each statement of a config.json about storage that is wrong; other programs may rely on it.

    formats: the formats of the stored tensors.
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
    """Return the expert dtypes that a configuration states, by key."""
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
                f"{where}: quantization_config.{key} is {quantization[key]!r}; the official layout has {value!r}",
                "use the official checkpoint (FP4 experts, FP8 linears)",
            )
