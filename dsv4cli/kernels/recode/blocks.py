"""Packed codes, scales and blocks of weights, shared by all format conversions."""

import math
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F

from dsv4cli.kernels.formats import E2M1_VALUES, E8M0_BIAS, E8M0_NAN, FP4_BLOCK, FP8_BLOCK

# groups of 32 columns in a block of 128
GROUPS = FP8_BLOCK // FP4_BLOCK
# values per band of rows, so that its temporaries stay in a core's cache
BAND = 2**18
# range of shifts for e2m1 * 2 ** shift in e4m3: below it, all nonzero values underflow; above it, all overflow
MIN_SHIFT, MAX_SHIFT = -11, 9


class NotRepresentable(ValueError):
    """The target format cannot represent a value.

    reason: why. row, column: position in the argument of the value, or of the first value of its block.
    """

    def __init__(self, reason: str, row: int, column: int) -> None:
        super().__init__(f"{reason} at row {row}, column {column}")
        self.reason, self.row, self.column = reason, row, column


def refuse(bad: torch.Tensor, reason: str, rows: int = 1, columns: int = 1) -> None:
    """Raise NotRepresentable for the first true element of bad [n, m]; an element stands for rows x columns values."""
    where = bad.nonzero()
    if len(where):
        row, column = where[0].tolist()
        raise NotRepresentable(reason, row * rows, column * columns)


@cache
def four_bf16(device: torch.device) -> torch.Tensor:
    """Return the table of the four bf16 values of each 16-bit index, packed in int64 [65536]."""
    return fours(torch.tensor(E2M1_VALUES, dtype=torch.bfloat16, device="cpu")).view(torch.int64).flatten().to(device)


@cache
def four_e4m3(device: torch.device) -> torch.Tensor:
    """Return the table of the four e4m3 codes of an index's values times 2 ** shift, packed in int32 [21 * 65536].

    Shifts are -11 to 9 in order.
    """
    values = torch.tensor(
        [[value * 2.0**shift for value in E2M1_VALUES] for shift in range(MIN_SHIFT, MAX_SHIFT + 1)], device="cpu"
    )
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)  # [21, 16]
    return fours(codes).view(torch.int32).flatten().to(device)


def fours(sixteen: torch.Tensor) -> torch.Tensor:
    """Expand a table over one 4-bit code, [..., 16], to a table over four codes, [..., 65536, 4]."""
    index = torch.arange(65536, dtype=torch.int32, device="cpu")
    return sixteen[..., (index[:, None] >> torch.tensor((0, 4, 8, 12), device="cpu")) & 15]


def look_up(table: torch.Tensor, weight: torch.Tensor, part: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write the table's values for packed codes to out [N, K]. part: table part [N, K/32] per group of 32, or None."""
    index = weight.view(torch.uint16).int()  # [N, K/4]
    if part is not None:
        high = part.long() << 16
        high |= high << 32  # for two indices at a time
        index.view(torch.int64).unflatten(1, (-1, FP4_BLOCK // 8)).add_(high[..., None])
    torch.index_select(table, 0, index.flatten(), out=out.view(-1).view(table.dtype))
    return out


def pack_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 codes of fp32 [N, K], ties to even, clipped to 6, packed: uint8 [N, K/2]."""
    # codes are 0.5 apart up to code 4, then 1, and 2 from code 6 on; the smallest of the three candidates is correct
    magnitude = scaled.abs()
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.div_(2).round_().add_(4), out=code)
    nibble = (scaled.view(torch.int32) >> 28).bitwise_and_(8).bitwise_or_(code.clamp_max_(7).int())
    pair = nibble.view(torch.int64)  # the even column is in the low half
    return pair.bitwise_or_(pair >> 28).bitwise_and_(0xFF).to(torch.uint8)


def multiply_blocks(values: torch.Tensor, factor: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply values [N, K] in place by a factor [N, ceil(K / block)] per `block` columns."""
    whole = values.shape[1] // block
    values[:, : whole * block].unflatten(1, (whole, block)).mul_(factor[:, :whole, None])
    if whole < factor.shape[1]:
        values[:, whole * block :].mul_(factor[:, whole:])
    return values


def each_group(block: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Repeat a per-block tensor for each group of the block: [ceil(N/128), ceil(K/128)] -> [N, K/32]."""
    return block.repeat_interleave(GROUPS, 1)[:, :groups].repeat_interleave(FP8_BLOCK, 0)[:rows]


def block_max(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the maximum of each block of rows x columns, over integers >= -127.

    [N, K] -> [ceil(N/rows), ceil(K/columns)].
    """
    if x.shape[0] % rows or x.shape[1] % columns:
        x = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows), value=-E8M0_BIAS)
    return x.unflatten(0, (-1, rows)).amax(1).unflatten(1, (-1, columns)).amax(2)


def block_amax(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest magnitude of each block of fp32 values, by bit pattern; not finite if a value is not."""
    return block_max(values.view(torch.int32) & 0x7FFFFFFF, rows, columns).view(torch.float32)


def refuse_infinite(values: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise NotRepresentable for the first value that is not finite. amax: largest magnitude of each block."""
    if not amax.isfinite().all():
        refuse(~values.isfinite(), "a value is NaN or infinite")


def bands(matrix: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Yield the matrix's rows in bands of a multiple of `multiple` rows; one band on a GPU or for an empty matrix."""
    rows, columns = matrix.shape
    height = rows if matrix.is_cuda else max(1, BAND // (multiple * columns)) * multiple
    for start in range(0, max(1, rows), max(1, height)):
        yield slice(start, start + height)


def are_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return which of these fp64 values e4m3 can represent."""
    return x.to(torch.float8_e4m3fn).double() == x


def scale_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the smallest e8m0 exponent p with amax <= largest * 2 ** p, 0 if amax is 0: int32."""
    mantissa, exponent = torch.frexp(amax)
    limit, power = math.frexp(largest)
    return torch.where(amax == 0, 0, (exponent - power + (mantissa > limit)).clamp_min(-E8M0_BIAS))


def power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 2 ** exponent, built from its bit pattern. The lowest exponent is -127, subnormal in bf16 and fp32."""
    integer, bits, bias = {
        torch.bfloat16: (torch.int16, 7, 127),
        torch.float32: (torch.int32, 23, 127),
        torch.float64: (torch.int64, 52, 1023),
    }[dtype]
    return ((exponent.to(integer) + bias) << bits).clamp_min_(1 << (bits - 1)).view(dtype)


def e8m0(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_exponents(scale: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, int, int]:
    """Return the int16 exponents of e8m0 scales, with their minimum and maximum. Raises for NaN.

    rows, columns: the block of values that a scale belongs to, for the error message.
    """
    byte = scale.view(torch.uint8)
    exponent = byte.to(torch.int16) - E8M0_BIAS
    if not byte.numel():
        return exponent, 0, 0
    lowest, highest = (int(end) for end in byte.aminmax())
    if highest == E8M0_NAN:
        refuse(byte == E8M0_NAN, "a scale is NaN", rows, columns)
    return exponent, lowest - E8M0_BIAS, highest - E8M0_BIAS
