"""What the linears of few rows share: descriptions of their products, and the values of FP4 and FP8 codes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import round_to_code
from dsv4cli.kernels.stored_matrix import StoredMatrix


@dataclass(frozen=True)
class Product:
    """One linear of a launch.

    Attributes:
        rounded: whether its input is rounded to FP8.
        dtype: the result's dtype.
    """

    matrix: StoredMatrix
    rounded: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Norm:
    """The RMS norm that is applied to a launch's input first."""

    weight: torch.Tensor
    eps: float


def runs_alike(products: Sequence[Product]) -> tuple[int, ...]:
    """Return the first index of each run of products that need the same instructions, then the number of products."""
    kinds = [(*(part is not None and part.dtype for part in p.matrix), p.rounded, p.dtype) for p in products]
    return *(i for i in range(len(kinds)) if not i or kinds[i] != kinds[i - 1]), len(kinds)


def first_programs(counts: Iterable[int]) -> tuple[int, ...]:
    """Return the first program of each product, and the number of all programs, given how many each product has."""
    return tuple(accumulate(counts, initial=0))


def bits(stored: torch.Tensor | None) -> torch.Tensor | None:
    """Return FP8 codes and e8m0 scales as bytes, which every GPU can load. int8 (FP4) is unchanged."""
    if stored is None or stored.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        return stored
    return stored.view(torch.uint8)


@triton.jit
def one_of(given, program, STARTS: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """Return the item of the program's product, one of FIRST .. END - 1. STARTS: the first program of each product."""
    chosen = given[FIRST]
    for i in tl.static_range(FIRST + 1, END):
        chosen = tl.where(program >= STARTS[i], given[i], chosen)
    return chosen


@triton.jit
def block_scales(stored):
    """Return the fp32 values of an FP8 weight's scales: converted from e8m0 bytes; fp32 is unchanged."""
    return stored if stored.dtype == tl.float32 else e8m0_values(stored)


@triton.jit
def e8m0_values(byte):
    """Return the fp32 values of e8m0 scales: subnormal for 0, infinite for 255."""
    return tl.maximum(byte.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_values(byte, HAS_FP8: tl.constexpr):
    """Return the fp32 values of e4m3 codes."""
    if HAS_FP8:
        values = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = byte.to(tl.int32)
        values = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return values


@triton.jit
def e4m3_rounded(values, HAS_FP8: tl.constexpr):
    """Round fp32 values of up to 448 to the nearest e4m3 value."""
    return values.to(tl.float8e4nv).to(tl.float32) if HAS_FP8 else round_to_code(values, 3, -6)


@triton.jit
def e2m1_values(code):
    """Return the fp32 values of the e2m1 codes in the low four bits."""
    low = code.to(tl.int32)
    return (((low & 8) << 28) | ((low & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def add_exact_products(values, given, sums):
    """Add the products of values [.., N, K], bf16 or fp16, and inputs bf16 [.., K, T] to fp32 sums [.., N, T]."""
    if values.dtype == tl.float16:
        # two bf16 numbers have all bits of an fp16 number
        wide = values.to(tl.float32)
        values = wide.to(tl.bfloat16)
        sums = tl.dot((wide - values.to(tl.float32)).to(tl.bfloat16), given, sums)
    return tl.dot(values, given, sums)


@triton.jit
def read_once(matrix, place, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows of a matrix, 0 beyond its WIDTH, without evicting other data from the cache."""
    column = tl.arange(0, COLUMNS)[None]
    return tl.load(matrix + place * WIDTH + column, inside & (column < WIDTH), other=0, eviction_policy="evict_first")
