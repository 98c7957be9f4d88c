"""Format conversions in plain PyTorch."""

import math
from collections.abc import Sequence

import torch

from dsv4cli.kernels.block_scale.ref import unpack_e2m1
from dsv4cli.kernels.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MAX_POWER,
    E4M3_MIN_POWER,
    E8M0_BIAS,
    E8M0_NAN,
    FP4_BLOCK,
    FP8_BLOCK,
    NVFP4_BLOCK,
)
from dsv4cli.kernels.recode.blocks import (
    GROUPS,
    MAX_SHIFT,
    MIN_SHIFT,
    NotRepresentable,
    are_e4m3,
    bands,
    block_amax,
    block_max,
    e8m0,
    e8m0_exponents,
    each_group,
    four_bf16,
    four_e4m3,
    look_up,
    multiply_blocks,
    pack_e2m1,
    power_of_two,
    refuse,
    refuse_infinite,
    scale_exponent,
)

# NVFP4 blocks of 16 columns per group of 32
HALVES = FP4_BLOCK // NVFP4_BLOCK
# difference of the exponent biases of bf16 and e4m3
E4M3_TO_BF16 = 127 - 7
# scale exponents for which one multiplication in bf16 is exact: for FP4, 6 * 2 ** 125 is the largest value in range;
# for FP8, 2 ** -124 maps the smallest code to the smallest bf16, and 2 ** (7 + 120) is the largest factor
FP4_EXPONENTS, FP8_EXPONENTS = (-127, 125), (-124, 7)
# 6 * 2 ** 6 <= 448 < 6 * 2 ** 7 (official convert.py)
OFFICIAL_SHIFT = 6
# the smallest shift for which every e2m1 value is exact in e4m3
EXACT_SHIFT = -8


def widen(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    fp8 = weight.dtype == torch.float8_e4m3fn
    block, usual = (FP8_BLOCK, FP8_EXPONENTS) if fp8 else (FP4_BLOCK, FP4_EXPONENTS)
    exponent, lowest, highest = e8m0_exponents(scale, FP8_BLOCK if fp8 else 1, block)
    if fp8:
        exponent = exponent.repeat_interleave(FP8_BLOCK, 0)[: len(weight)]
    if out is None:
        out = torch.empty(len(weight), weight.shape[1] * (1 if fp8 else 2), dtype=torch.bfloat16, device=weight.device)
    if lowest < usual[0] or highest > usual[1]:
        return widen_slowly(weight, exponent, block, out)
    if fp8:
        exponent = exponent + widen_e4m3(weight, out)
    else:
        look_up(four_bf16(weight.device), weight, None, out)
    return multiply_blocks(out, power_of_two(exponent, torch.bfloat16), block)


def widen_slowly(weight: torch.Tensor, exponent: torch.Tensor, block: int, out: torch.Tensor) -> torch.Tensor:
    """Compute the result of `widen` in fp64, for scales of any size."""
    values = (weight if weight.dtype == torch.float8_e4m3fn else unpack_e2m1(weight)).double()
    multiply_blocks(values, power_of_two(exponent, torch.float64), block)
    out.copy_(values)
    refuse(out.double() != values, "a value is NaN or beyond bf16")
    return out


def widen_e4m3(weight: torch.Tensor, out: torch.Tensor) -> int:
    """Write e4m3 values times 2 ** -120 to out, bf16; return 120."""
    magnitude = weight.view(torch.uint8) & 0x7F
    if magnitude.numel() and int(magnitude.max()) == 0x7F:
        refuse(magnitude == 0x7F, "a value is NaN")
    # sign to bit 15, exponent and mantissa to bits 10..4: an e4m3 subnormal becomes a bf16 subnormal
    out.view(torch.int16).copy_(weight.view(torch.int8)).bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
    return E4M3_TO_BF16


def fp4_to_fp8(
    weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    exponent, _, _ = e8m0_exponents(scale, 1, FP4_BLOCK)
    block = (block_max(exponent, FP8_BLOCK, GROUPS) - OFFICIAL_SHIFT).clamp_min(-E8M0_BIAS)
    shift = exponent - each_group(block, *exponent.shape)
    if shift.numel() and int(shift.min()) < EXACT_SHIFT:
        refit(block, weight, exponent, shift)
        shift = exponent - each_group(block, *exponent.shape)
    if out is None:
        out = torch.empty(len(weight), 2 * weight.shape[1], dtype=torch.float8_e4m3fn, device=weight.device)
    # only groups of zeros have a shift outside the table
    look_up(four_e4m3(weight.device), weight, shift.clamp_(MIN_SHIFT, MAX_SHIFT) - MIN_SHIFT, out)
    return out, e8m0(block)


def refit(block: torch.Tensor, weight: torch.Tensor, exponent: torch.Tensor, shift: torch.Tensor) -> None:
    """Give blocks that would lose values the smallest exponent that holds their largest value, or raise.

    block: [ceil(N/128), ceil(K/128)], changed in place; exponent, shift: [N, K/32], of the groups' scales and their
    ratios to the blocks' scales. A smaller scale keeps every value that a larger one keeps. Raises NotRepresentable.
    """
    packed = weight.unflatten(1, (-1, FP4_BLOCK // 2))  # [N, K/32, 16]
    far = (shift < EXACT_SHIFT).nonzero()
    row, group = far.unbind(1)
    # at the shift below the table and smaller ones, all nonzero values are lost
    factor = power_of_two(shift[row, group].clamp_min(MIN_SHIFT - 1), torch.float64)
    lossy = far[~are_e4m3(unpack_e2m1(packed[row, group]).double() * factor[:, None]).all(1)]
    for i, j in (lossy // torch.tensor((FP8_BLOCK, GROUPS), device=lossy.device)).unique(dim=0).tolist():
        tile = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * GROUPS, (j + 1) * GROUPS)
        values = unpack_e2m1(packed[tile]).double() * power_of_two(exponent[tile], torch.float64)[..., None]
        smallest = scale_exponent(values.abs().amax(), E4M3_MAX)
        if not are_e4m3(values * power_of_two(-smallest, torch.float64)).all():
            raise NotRepresentable("no scale holds all values of a block", i * FP8_BLOCK, j * FP8_BLOCK)
        block[i, j] = smallest


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, largest = torch.empty_like(values, dtype=torch.float8_e4m3fn), []
    for rows in bands(values, FP8_BLOCK):
        band = values[rows].to(torch.float32, copy=True)
        largest.append(block_amax(band, FP8_BLOCK, FP8_BLOCK))
        inverse = power_of_two(-scale_exponent(largest[-1], E4M3_MAX), torch.float32)
        codes[rows] = multiply_blocks(band, inverse.repeat_interleave(FP8_BLOCK, 0)[: len(band)], FP8_BLOCK)
    amax = torch.cat(largest)
    refuse_infinite(values, amax)
    return codes, e8m0(scale_exponent(amax, E4M3_MAX))


def to_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, largest = [], []
    for rows in bands(values):
        band = values[rows].to(torch.float32, copy=True)
        largest.append(block_amax(band, 1, FP4_BLOCK))
        inverse = power_of_two(-scale_exponent(largest[-1], E2M1_MAX), torch.float32)
        packed.append(pack_e2m1(multiply_blocks(band, inverse, FP4_BLOCK)))
    amax = torch.cat(largest)
    refuse_infinite(values, amax)
    return torch.cat(packed).view(torch.int8), e8m0(scale_exponent(amax, E2M1_MAX))


def are_e8m0(scale: torch.Tensor) -> bool:
    mantissa, exponent = torch.frexp(scale)  # a power of two is 0.5 * 2 ** exponent
    return bool(((mantissa == 0.5) & (exponent > -E8M0_BIAS) & (exponent <= E8M0_NAN - E8M0_BIAS)).all())


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    return e8m0(torch.frexp(scale).exponent - 1)


def nvfp4_exponent(matrices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    every = torch.cat([e8m0_exponents(scale, 1, FP4_BLOCK)[0].flatten() for _, scale in matrices])
    if not every.numel():
        return 0
    span = E4M3_MAX_POWER - E4M3_MIN_POWER
    highest = int(every.max())
    if highest - int(every.min()) > span:
        used = every[torch.cat([has_values(weight).flatten() for weight, _ in matrices])]
        if used.numel() and highest - int(used.min()) > span:
            return int(used.max())
    return highest


def has_values(weight: torch.Tensor) -> torch.Tensor:
    """Return which groups of packed codes [N, K/2] have a nonzero value: bool [N, K/32]."""
    return (weight.view(torch.uint8) & 0x77).unflatten(1, (-1, FP4_BLOCK // 2)).amax(2) > 0


def fp4_to_nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, k_max: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    exponent, lowest, highest = e8m0_exponents(scale, 1, FP4_BLOCK)
    top = k_max - E4M3_MAX_POWER
    shift = exponent - top
    if lowest - top < E4M3_MIN_POWER or highest > k_max:
        outside = (shift < E4M3_MIN_POWER) | (shift > E4M3_MAX_POWER)
        refuse(outside & has_values(weight), "no e4m3 scale for a group", 1, FP4_BLOCK)
    group = power_of_two(shift.clamp_(E4M3_MIN_POWER, E4M3_MAX_POWER), torch.float32).to(torch.float8_e4m3fn)
    block = group.view(torch.uint8).repeat_interleave(HALVES, 1).view(torch.float8_e4m3fn)
    return weight.view(torch.uint8), block, torch.tensor(2.0**top, dtype=torch.float32, device=weight.device)


def nvfp4_to_fp4(
    weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    # a power of two is 0.5 * 2 ** exponent
    mantissa, exponent = torch.frexp(weight_scale.float())
    mantissa_2, exponent_2 = math.frexp(scale_2.item())
    halves = (exponent + (exponent_2 - 2)).unflatten(1, (-1, HALVES))
    fits = (halves >= -E8M0_BIAS) & (halves < E8M0_NAN - E8M0_BIAS) & (halves == halves[..., :1])
    if mantissa_2 != 0.5 or not ((mantissa == 0.5).all() and fits.all()):
        return None
    return weight.view(torch.int8), e8m0(halves[..., 0])


def nvfp4_values(weight: torch.Tensor, weight_scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    block = weight_scale.float() * scale_2
    refuse(~(block * E2M1_MAX).isfinite(), "a scale is NaN or too large", 1, NVFP4_BLOCK)
    values = torch.empty(len(weight), 2 * weight.shape[1], device=weight.device)
    for rows in bands(values):
        codes = torch.empty_like(values[rows], dtype=torch.bfloat16)
        values[rows] = look_up(four_bf16(weight.device), weight[rows], None, codes)
        multiply_blocks(values[rows], block[rows], NVFP4_BLOCK)
    return values


def nvfp4_scale_2(amax: torch.Tensor) -> torch.Tensor:
    return (amax.float() / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)


def to_nvfp4(values: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, largest = [], []
    for rows in bands(values):
        band = values[rows].to(torch.float32, copy=True)
        largest.append(block_amax(band, 1, NVFP4_BLOCK))
        divisor = nvfp4_block_scale(largest[-1], scale_2).float() * scale_2
        packed.append(pack_e2m1(band.unflatten(1, (-1, NVFP4_BLOCK)).div_(divisor[..., None]).flatten(1)))
    amax = torch.cat(largest)
    refuse_infinite(values, amax)
    return torch.cat(packed), nvfp4_block_scale(amax, scale_2)


def nvfp4_block_scale(amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    scale = torch.where(amax == 0, 1.0, amax / (E2M1_MAX * scale_2))
    return scale.clamp_(2.0**E4M3_MIN_POWER, E4M3_MAX).to(torch.float8_e4m3fn)
