"""The division of a row among programs, and the reductions over a part."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.sampling import ref

# the most parts of a row, and the fewest values per part
PARTS, PART = 128, 1024
NOWHERE = tl.constexpr(0x7FFFFFFF)
STEP, FIRST, SECOND = tl.constexpr(ref.STEP), tl.constexpr(ref.FACTORS[0]), tl.constexpr(ref.FACTORS[1])


def divided(width: int) -> tuple[int, int]:
    """Return the values per part of a row, a power of two, and the number of parts."""
    part = max(PART, next_power_of_2(cdiv(width, PARTS)))
    return part, cdiv(width, part)


def partial(rows: int, parts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate one fp32 number and one int32 number for each part."""
    number = torch.empty(rows, parts, dtype=torch.float32, device=device)
    return number, torch.empty(rows, parts, dtype=torch.int32, device=device)


@triton.jit
def best_of(values, column, known):
    """Return the largest of the values (fp32 [n]) where `known`, and its lowest column."""
    top = tl.max(tl.where(known, values, float("-inf")), 0)
    return top, tl.min(tl.where(known & (values == top), column, NOWHERE), 0)


@triton.jit
def mixed(x):
    """Return the output of splitmix64 in each state, uint64."""
    x += STEP
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)
