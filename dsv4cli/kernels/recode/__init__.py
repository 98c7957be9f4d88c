"""Conversions between the storage formats of a weight: FP4, FP8 and NVFP4 to bf16 and to each other, and back.

Weights are matrices [N, K] or bands of their rows that begin at a multiple of 128; K is a multiple of 32.
FP4: int8 or uint8 [N, K/2] (two e2m1 codes per byte, low nibble = even column) with scale e8m0 [N, K/32].
FP8: e4m3 [N, K] with scale e8m0 [ceil(N/128), ceil(K/128)]; blocks at the edges are smaller.
NVFP4 (ModelOpt): uint8 [N, K/2] as FP4, weight_scale e4m3 [N, K/16], scale_2 fp32 [] per tensor; a value is code *
(weight_scale * scale_2). Tensors are contiguous, e8m0 may be passed as uint8, and zeros always keep their sign.

Conversions are exact or raise NotRepresentable, for NaN, infinity and values outside the target format; only `to_fp8`,
`to_fp4` and `to_nvfp4` round. Subnormals must not be flushed (torch's default). Every function runs on its tensors'
device.
Source: official convert.py, OCP Microscaling, ModelOpt's NVFP4 export.
"""

from collections.abc import Sequence

import torch

from dsv4cli.kernels.recode import ref
from dsv4cli.kernels.recode.blocks import NotRepresentable

__all__ = [
    "NotRepresentable",
    "are_e8m0",
    "fp4_to_fp8",
    "fp4_to_nvfp4",
    "nvfp4_exponent",
    "nvfp4_scale_2",
    "nvfp4_to_fp4",
    "nvfp4_values",
    "to_e8m0",
    "to_fp4",
    "to_fp8",
    "to_nvfp4",
    "widen",
]


def widen(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the exact bf16 values [N, K] of an FP4 or FP8 weight. The weight's dtype tells the format.

    out: contiguous bf16 [N, K] to write to. Raises NotRepresentable for the first value that is NaN or outside bf16:
    FP4 with scales above 2 ** 125, FP8 above 2 ** 119 or below 2 ** -124, and only if a value is affected.
    """
    return ref.widen(weight, scale, out)


def fp4_to_fp8(
    weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 weight and scale with exactly the values of an FP4 weight.

    A block's scale is the largest scale of its groups / 2 ** 6, as in the official convert.py, at least 2 ** -127. If
    that loses a value, which requires scales that differ by more than 2 ** 14, the scale is the smallest power of two
    with amax / scale <= 448. If that loses one too, no scale works: raises NotRepresentable for the block.
    out: contiguous e4m3 [N, K] to write to.
    """
    return ref.fp4_to_fp8(weight, scale, out)


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest FP8 weight, ties to even, and its scale: the smallest power of two with amax / scale <= 448.

    values: [N, K] bf16 or fp32, finite. A block of zeros has scale 1; no scale is below 2 ** -127. Values that are e4m3
    codes times one power of two >= 2 ** -127 per block are kept exactly: the scale found is at most theirs, and a code
    times 2 ** j is a code as long as it is <= 448. Their scale is kept too unless all codes of a block are <= 224.
    """
    return ref.to_fp8(values)


def to_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest FP4 weight (int8), ties to even, and its scale.

    The scale is the smallest power of two with amax / scale <= 6. values: [N, K] bf16 or fp32, finite. A group of zeros
    has scale 1; no scale is below 2 ** -127. Values that came from FP4 are kept exactly, as in `to_fp8`; their scale
    too unless all codes of a group are <= 3.
    """
    return ref.to_fp4(values)


def are_e8m0(scale: torch.Tensor) -> bool:
    """Return whether e8m0 can represent all of these fp32 scales: powers of two from 2 ** -127 to 2 ** 127."""
    return ref.are_e8m0(scale)


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Convert fp32 scales that e8m0 can represent to e8m0."""
    return ref.to_e8m0(scale)


def nvfp4_exponent(matrices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Return k_max, the largest scale exponent of FP4 matrices (weight, scale) that are to share one scale_2.

    If the scales differ by more than 2 ** 17, groups of zeros are ignored if that helps. The gate and up projections of
    an expert must share scale_2, because vLLM and TensorRT-LLM fuse them (ModelOpt does the same).
    """
    return ref.nvfp4_exponent(matrices)


def fp4_to_nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, k_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the NVFP4 weight, weight_scale and scale_2 with exactly the values of an FP4 weight.

    The codes are the same bytes and share the argument's memory. scale_2 is 2 ** (k_max - 8), and both halves of a
    group get its scale / scale_2; e4m3 has the powers of two from 2 ** -9 to 2 ** 8. A group of zeros outside that
    range gets the nearest of them; any other group raises NotRepresentable.
    """
    return ref.fp4_to_nvfp4(weight, scale, k_max)


def nvfp4_to_fp4(
    weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the FP4 weight and scale with the same codes and values, or None if there are none.

    They exist if scale_2 and all scales are powers of two, equal in both halves of each group, with products from 2 **
    -127 to 2 ** 127. The weight returned shares the argument's memory.
    """
    return ref.nvfp4_to_fp4(weight, weight_scale, scale_2)


def nvfp4_values(weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values [N, K] of any NVFP4 weight: code * (weight_scale * scale_2), both products in fp32."""
    return ref.nvfp4_values(weight, weight_scale, scale_2)


def nvfp4_scale_2(amax: torch.Tensor) -> torch.Tensor:
    """Return scale_2, fp32 [], of a tensor with largest magnitude amax: amax / (6 * 448), at least 2 ** -126."""
    return ref.nvfp4_scale_2(amax)


def to_nvfp4(values: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the NVFP4 weight and weight_scale nearest to the values, rounded as in ModelOpt.

    values: [N, K] bf16 or fp32, finite; scale_2 from `nvfp4_scale_2` of the whole tensor, or larger. With a smaller
    one, values beyond 2688 * scale_2 are clipped. A block's scale is e4m3(amax / (6 * scale_2)), 1 for zeros and at
    least 2 ** -9; a code is the nearest to value / (scale * scale_2), ties to even.
    """
    return ref.to_nvfp4(values, scale_2)
