"""Changes of a weight's storage format: FP4, FP8 and NVFP4 to bf16 and to each other, and back.

Weights are matrices [N, K] or bands of their rows that begin at a multiple of 128; K is a multiple of 32.
FP4: int8 or uint8 [N, K/2] (two e2m1 codes a byte, low nibble = even column) with scale e8m0 [N, K/32].
FP8: e4m3 [N, K] with scale e8m0 [ceil(N/128), ceil(K/128)], the blocks at the edges being smaller.
NVFP4 (ModelOpt): uint8 [N, K/2] as FP4, weight_scale e4m3 [N, K/16], scale_2 fp32 [] of the whole tensor; a value is
code * (weight_scale * scale_2). Tensors are contiguous, e8m0 may come as uint8, and zeros keep their sign throughout.

Nothing is lost in silence: a value that the target cannot hold, NaN and infinity raise NotRepresentable; only `to_fp8`,
`to_fp4`, `to_nvfp4` round. Subnormals must not be flushed (torch's default). Every function runs where its tensors are.
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
    """The exact bf16 values [N, K] of an FP4 or FP8 weight; the format follows from the weight's dtype.

    out: contiguous bf16 [N, K] to write to. Raises NotRepresentable for the first value that is NaN or that bf16 cannot
    hold: FP4 beyond scale 2 ** 125, FP8 beyond 2 ** 119 or below 2 ** -124, and there only if a value needs it.
    """
    return ref.widen(weight, scale, out)


def fp4_to_fp8(
    weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 weight and scale with exactly the values of an FP4 weight.

    A block's scale is the largest of its groups' scales / 2 ** 6, as in the official convert.py, at least 2 ** -127.
    Where that would lose a value, which takes groups more than 2 ** 14 apart, it is the smallest power of two with
    amax / scale <= 448; where that loses one too, no scale would do, and NotRepresentable names the block.
    out: contiguous e4m3 [N, K] to write to.
    """
    return ref.fp4_to_fp8(weight, scale, out)


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest FP8 weight, ties to even, and its scale: the smallest power of two with amax / scale <= 448.

    values: [N, K] bf16 or fp32, finite. A block of zeros has scale 1; none is below 2 ** -127. Values that are e4m3
    codes times one power of two >= 2 ** -127 a block come back exactly: the scale found is no larger than theirs, and
    a code times 2 ** j is a code as long as it is <= 448. Their scale comes back too unless all codes of a block are
    <= 224.
    """
    return ref.to_fp8(values)


def to_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest FP4 weight (int8), ties to the even code, and its scale: the smallest power of two with
    amax / scale <= 6.

    values: [N, K] bf16 or fp32, finite. A group of zeros has scale 1; none is below 2 ** -127. Values that came from
    FP4 come back exactly, as in `to_fp8`; their scale too unless all codes of a group are <= 3.
    """
    return ref.to_fp4(values)


def are_e8m0(scale: torch.Tensor) -> bool:
    """Whether e8m0 has all of these fp32 scales: powers of two from 2 ** -127 to 2 ** 127."""
    return ref.are_e8m0(scale)


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """These fp32 scales in e8m0, which has them."""
    return ref.to_e8m0(scale)


def nvfp4_exponent(matrices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """k_max of whole FP4 matrices (weight, scale) that are to share one scale_2: the largest exponent of their scales.

    Where groups are more than 2 ** 17 apart, groups of zeros do not count if that helps. The gate and up projections of
    an expert must share scale_2, since vLLM and TensorRT-LLM fuse them (ModelOpt does the same).
    """
    return ref.nvfp4_exponent(matrices)


def fp4_to_nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, k_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The NVFP4 weight, weight_scale and scale_2 with exactly the values of an FP4 weight.

    The codes are the same bytes; they share the argument's memory. scale_2 is 2 ** (k_max - 8), and both halves of a
    group take its scale / scale_2: e4m3 has the powers of two from 2 ** -9 to 2 ** 8. A group of zeros outside takes
    the nearest of them; any other raises NotRepresentable.
    """
    return ref.fp4_to_nvfp4(weight, scale, k_max)


def nvfp4_to_fp4(
    weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The FP4 weight and scale with the same codes and values, or None if there are none.

    There are if scale_2 and all scales are powers of two, equal in both halves of a group, and their products from
    2 ** -127 to 2 ** 127. The weight returned shares the argument's memory.
    """
    return ref.nvfp4_to_fp4(weight, weight_scale, scale_2)


def nvfp4_values(weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """The fp32 values [N, K] of any NVFP4 weight: code * (weight_scale * scale_2), both products rounded to fp32."""
    return ref.nvfp4_values(weight, weight_scale, scale_2)


def nvfp4_scale_2(amax: torch.Tensor) -> torch.Tensor:
    """scale_2 for a whole tensor whose largest magnitude is amax: amax / (6 * 448), at least 2 ** -126; fp32 []."""
    return ref.nvfp4_scale_2(amax)


def to_nvfp4(values: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The NVFP4 weight and weight_scale nearest to the values, as ModelOpt rounds them.

    values: [N, K] bf16 or fp32, finite; scale_2 from `nvfp4_scale_2` of the whole tensor, or larger: with a smaller
    one, values beyond 2688 * scale_2 are cut off. A block's scale is e4m3(amax / (6 * scale_2)), 1 for zeros and at
    least 2 ** -9; a code is the nearest to value / (scale * scale_2), ties to even.
    """
    return ref.to_nvfp4(values, scale_2)
