"""Block scales in plain PyTorch."""

from functools import cache

import torch
import torch.nn.functional as F

from dsv4cli.kernels.formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    FP4_AMAX_FLOOR,
    FP4_BLOCK,
    FP8_AMAX_FLOOR,
    FP8_BLOCK,
    NVFP4_BLOCK,
)
from dsv4cli.kernels.scalars import scalar

# bits of an fp32 number: the mantissa, and the exponent (the sign bit is left out)
MANTISSA = torch.tensor(0x007FFFFF, dtype=torch.int32, device="cpu")
EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32, device="cpu")


def power_of_two_ceil(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= x, computed on the bit pattern. x: fp32, positive and normal."""
    # any bit of the mantissa carries into the exponent
    return ((x.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)


def block_scale(blocks: torch.Tensor, floor: float, largest: float) -> torch.Tensor:
    """Return the scale of each block: blocks fp32 [..., n, block] -> fp32 [..., n, 1]."""
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(floor)
    # the official kernel multiplies by the reciprocal, rounded to fp32
    return power_of_two_ceil(amax * scalar(1.0 / largest))


def fp8_round(x: torch.Tensor, block: int) -> torch.Tensor:
    codes, scale = _fp8(x, block)
    return (codes.float() * scale).view(x.shape).to(x.dtype)


def fp8_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = _fp8(x, block)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // block)
    return codes.view(x.shape), exponents.view(torch.float8_e8m0fnu)


def _fp8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes e4m3 [n, block] and scales fp32 [n, 1] of the n blocks of x."""
    blocks = x.float().reshape(-1, block)
    scale = block_scale(blocks, FP8_AMAX_FLOOR, E4M3_MAX)
    # needs no clamp: amax / scale exceeds E4M3_MAX by a rounding error at most, and e4m3 rounds that down
    return (blocks / scale).to(torch.float8_e4m3fn), scale


def fp4_round(x: torch.Tensor, block: int) -> torch.Tensor:
    values, scale = _fp4(x, block)
    return (values * scale).flatten(-2).type_as(x)


def fp4_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = _fp4(x, block)
    magnitudes = torch.tensor(E2M1_VALUES[:8], dtype=torch.float32, device=x.device)
    codes = torch.bucketize(values.abs(), magnitudes, out_int32=True).clamp_max(7) | (values.signbit().int() << 3)
    even, odd = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    exponents = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
    return (even | (odd << 4)).to(torch.uint8).view(torch.int8), exponents.view(torch.float8_e8m0fnu)


def _fp4(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes as e2m1 values in fp32 [..., n, block] and scales fp32 [..., n, 1] of the blocks of x."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = block_scale(blocks, FP4_AMAX_FLOOR, E2M1_MAX)
    return round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)), scale


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round x to the nearest e2m1 value, ties to the even code. x: fp32 within +-6."""
    # spacing of the codes: 0.5 below 2, 1 below 4, 2 up to 6: half the power of two below, at least 0.5
    step = ((x.view(torch.int32) & EXPONENT).view(torch.float32) * scalar(0.5)).clamp_min(0.5)
    return torch.copysign((x / step).round() * step, x)  # round() rounds ties to even


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None or weight.dtype == torch.float32:
        return weight.float()
    if weight.dtype in (torch.int8, torch.uint8):
        values = unpack_e2m1(weight)
        block, factor = (FP4_BLOCK, e8m0(scale)) if weight.dtype == torch.int8 else (NVFP4_BLOCK, scale.float())
        values.unflatten(-1, (-1, block)).mul_(factor[..., None])
        return values
    rows, columns = weight.shape[-2:]
    padded = widen_e4m3(weight)
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        padded = F.pad(padded, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))  # [..., N/128, 128, K/128, 128]
    factor = scale if scale.dtype == torch.float32 else e8m0(scale)
    blocks.mul_(factor[..., :, None, :, None])
    return padded[..., :rows, :columns]


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes: int8 or uint8 [..., K/2] -> fp32 [..., K], low nibble first."""
    pairs = torch.index_select(_e2m1_pairs(packed.device), 0, packed.reshape(-1).view(torch.uint8).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def widen_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of e4m3 codes, fp32 of the same shape."""
    if codes.device.type != "cpu" or codes.shape[-1] % 2:
        return codes.float()
    # PyTorch converts float8 one value at a time on a CPU; a table lookup of two values takes a third of the time
    pairs = torch.index_select(_e4m3_pairs(), 0, codes.reshape(-1).view(torch.uint16).int())
    return pairs.view(torch.float32).view(codes.shape)


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """Return int64 [256]: the two fp32 values of each byte."""
    values, byte = torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu"), torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).view(torch.int64).flatten().to(device)


@cache
def _e4m3_pairs() -> torch.Tensor:
    """Return int64 [65536]: the two fp32 values of each pair of bytes."""
    values, both = (
        torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float(),
        torch.arange(65536, device="cpu"),
    )
    return torch.stack((values[both & 255], values[both >> 8]), -1).view(torch.int64).flatten()


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values 2 ** (byte - 127) of e8m0 scales. Byte 0 is subnormal in fp32; 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1]
    y, half = x.float().contiguous(), 1
    # one butterfly per bit of the index, which is Sylvester order
    while half < width:
        first, second = y.view(-1, 2, half).unbind(1)
        y = torch.stack((first + second, first - second), 1)
        half *= 2
    return (y * scalar(width**-0.5)).view(x.shape).type_as(x)
