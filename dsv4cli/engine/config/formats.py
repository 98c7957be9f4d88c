"""The table of storage formats: dtype, packing and scales of a matrix in a checkpoint; no torch.

How to add a format: "A storage format" in CONTRIBUTING.md.
Sources: the releases' headers, ModelOpt's and compressed-tensors' exports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsv4cli.kernels.formats import FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK

FormatName = Literal["fp4", "fp8", "fp8_f32", "nvfp4", "bf16", "f32"]
Role = Literal["weight", "scale", "weight_scale", "weight_scale_2", "input_scale"]


@dataclass(frozen=True)
class ScaleForm:
    """A scale tensor of a quantized matrix.

    Attributes:
        role: last part of its name.
        dtype: its dtype in a safetensors header.
        block: rows and columns that share a scale; None for one scale of the whole matrix.
        parameter: its name in the model; '' for a scale of the activations, which no product uses.
    """

    role: Role
    dtype: str
    block: tuple[int, int] | None
    parameter: str = "scale"

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scale of a matrix [rows, columns]."""
        if self.block is None:
            return ()
        return -(-rows // self.block[0]), -(-columns // self.block[1])


@dataclass(frozen=True)
class StorageFormat:
    """The storage format of a matrix.

    Attributes:
        words: name in human-readable output.
        dtype: dtype of the weight in a safetensors header.
        expert_dtype: value of `expert_dtype` in config.json for experts in this format.
        codes: values packed in an element of the weight.
        scales: its scale tensors; none for an unquantized format.
    """

    words: str
    dtype: str
    expert_dtype: str
    codes: int = 1
    scales: tuple[ScaleForm, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that share a scale; a matrix may be split only at multiples of this number."""
        return max((scale.block[0] for scale in self.scales if scale.block), default=1)

    def scale(self, role: Role) -> ScaleForm:
        """Return the scale with a role, which must exist."""
        return next(scale for scale in self.scales if scale.role == role)


_FP8_BLOCKS = (FP8_BLOCK, FP8_BLOCK)
STORAGE: Mapping[FormatName, StorageFormat] = {
    "fp4": StorageFormat("fp4", "I8", "fp4", 2, (ScaleForm("scale", "F8_E8M0", (1, FP4_BLOCK)),)),
    "fp8": StorageFormat("fp8", "F8_E4M3", "fp8", 1, (ScaleForm("scale", "F8_E8M0", _FP8_BLOCKS),)),
    "fp8_f32": StorageFormat("fp8 with fp32 scales", "F8_E4M3", "fp8", 1, (ScaleForm("scale", "F32", _FP8_BLOCKS),)),
    # vLLM, transformers and the official config.json know "fp4" and "fp8" only, and NVFP4 is e2m1 as FP4 is
    "nvfp4": StorageFormat(
        "nvfp4",
        "U8",
        "fp4",
        2,
        (
            ScaleForm("weight_scale", "F8_E4M3", (1, NVFP4_BLOCK)),
            ScaleForm("weight_scale_2", "F32", None, "scale_2"),
            ScaleForm("input_scale", "F32", None, ""),
        ),
    ),
    "bf16": StorageFormat("bf16", "BF16", "bf16"),
    "f32": StorageFormat("fp32", "F32", "f32"),
}  # fmt: skip
# dtypes in headers that hold the same bytes: two e2m1 codes (F4 counts codes instead of bytes), an e8m0 scale
CODE_DTYPES = ("I8", "U8", "F4")
E8M0_DTYPES = ("F8_E8M0", "U8")
EXPERT_DTYPES = tuple(dict.fromkeys(storage.expert_dtype for storage in STORAGE.values()))


def is_quantised(form: FormatName) -> bool:
    """Return whether a matrix in this format has scales."""
    return bool(STORAGE[form].scales)
