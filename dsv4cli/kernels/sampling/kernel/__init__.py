"""Sampling in Triton: a row is shared by many programs, a part each; every exchange between them is a launch."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.sampling import ref
from dsv4cli.kernels.sampling.kernel.split import NOWHERE, STEP, best_of, divided, mixed, partial
from dsv4cli.kernels.sampling.kernel.top_p import (
    BINS,
    CHUNK,
    COPIES,
    LEVELS,
    add_mass,
    find_smallest,
    key_of,
    race_of_nucleus,
)


def warps(rows: int) -> int:
    """Of a program that works on a part."""
    # H200, a nucleus: one row 24.6 us with eight and 32.6 with four, 16 rows 143 and 136
    return 8 if rows <= 4 else 4


def greedy(logits: torch.Tensor) -> torch.Tensor:
    check(logits)
    rows, width = logits.shape
    part, parts = divided(width)
    best, columns = partial(rows, parts, logits.device)
    if rows:
        _largest[(parts, rows)](
            logits, best, columns, logits.stride(0), width, part, num_warps=warps(rows), **overlap(logits)
        )
    return first_of_best(best, columns)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    check(logits)
    check(noise)
    rows, width = logits.shape
    device, (part, parts) = logits.device, divided(width)
    grid, padded = (parts, rows), max(2, triton.next_power_of_2(parts))
    best, columns = partial(rows, parts, device)
    if not rows:
        return first_of_best(best, columns)
    options = {"num_warps": warps(rows), **overlap(logits)}
    chances = torch.empty(rows, width, dtype=torch.float32, device=device)
    tops, sums = partial(rows, parts, device)[0], partial(rows, parts, device)[0]
    # the histograms of a row; what each level has found, some digits of a key and the sum of all above them
    mass = torch.empty(rows, LEVELS.value, COPIES.value, BINS.value, dtype=torch.int64, device=device)
    found = torch.empty(LEVELS.value + 1, rows, 2, dtype=torch.int64, device=device)
    cleared = triton.next_power_of_2(triton.cdiv(mass[:1].numel(), parts))
    _scaled[grid](logits, chances, tops, sums, mass, logits.stride(0), temperature, width, part, cleared, **options)
    within, limit = top_p < 1, ref.limit_of(top_p)
    # all that is less likely holds half of what the nucleus leaves out, at most; no such bound near 1, for fp32 errs
    least = (1 - top_p) / (2 * width) if top_p < 0.9999 else 0.0
    _chances[grid](chances, tops, sums, mass, least, parts, width, part, padded, within, **options)
    if not within:
        _race[grid](chances, noise, best, columns, noise.stride(0), width, part, **options)
        return first_of_best(best, columns)
    for level in range(1, LEVELS.value):
        find_smallest[grid](chances, mass, found, limit, least, rows, width, part, level, **options)
    race_of_nucleus[grid](
        chances, noise, mass, found, best, columns, noise.stride(0), limit, rows, width, part, **options
    )
    return first_of_best(best, columns)


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    if any(x.dtype != torch.int64 or (x.stride(0) != 1 and len(x) > 1) for x in (seeds, positions)):
        raise KernelUnsupported("Triton makes noise from seeds and positions in int64, one behind the other")
    made = torch.empty(len(seeds), width, dtype=torch.float32, device=seeds.device)
    part, parts = divided(width)
    if len(seeds):
        _noise[(parts, len(seeds))](seeds, positions, made, width, part, num_warps=4, **overlap(seeds))
    return made


def check(x: torch.Tensor) -> None:
    """Raises KernelUnsupported for what the kernels do not take."""
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise KernelUnsupported(f"Triton samples from fp32 with consecutive columns, not {x.dtype}, {x.stride()}")


def first_of_best(best: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The column of the largest of each row's parts [R, parts] -> int64 [R]."""
    rows, parts = best.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=best.device)
    if rows:
        padded = triton.next_power_of_2(parts)
        _first_of_best[(rows,)](best, columns, chosen, parts, padded, num_warps=1, **overlap(best))
    return chosen


@triton.jit
def _largest(logits, best, columns, stride, WIDTH: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + row * stride + column, column < WIDTH, other=float("-inf"))
    top, best_column = best_of(values, column, column < WIDTH)
    tl.store(best + row * tl.num_programs(0) + part, top)
    tl.store(columns + row * tl.num_programs(0) + part, best_column)


@triton.jit
def _first_of_best(best, columns, chosen, PARTS: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    wait_for_inputs(OVERLAP)
    values = tl.load(best + row * PARTS + part, part < PARTS, other=float("-inf"))
    column = tl.load(columns + row * PARTS + part, part < PARTS, other=NOWHERE)
    tl.store(chosen + row, best_of(values, column, part < PARTS)[1].to(tl.int64))


@triton.jit
def _scaled(
    logits,  # [rows, WIDTH]
    scaled,  # [rows, WIDTH]: logits / temperature
    tops,  # [rows, parts]: the largest of a part
    sums,  # [rows, parts]: of exp(scaled - top)
    mass,  # int64 [rows, LEVELS, COPIES, BINS], cleared
    stride,
    temperature,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    CLEARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + row * stride + column, column < WIDTH, other=float("-inf"))
    values = tl.div_rn(values, temperature)
    tl.store(scaled + row * WIDTH + column, values, column < WIDTH)
    number = part * CLEARED + tl.arange(0, CLEARED)
    total: tl.constexpr = LEVELS * COPIES * BINS
    tl.store(mass + row * total + number, tl.zeros([CLEARED], tl.int64), number < total)
    top = tl.max(values, 0)
    tl.store(tops + row * tl.num_programs(0) + part, top)
    tl.store(sums + row * tl.num_programs(0) + part, tl.sum(tl.exp(values - top), 0))


@triton.jit
def _chances(
    chances,  # [rows, WIDTH]: logits / temperature, made chances
    tops,
    sums,
    mass,
    least,  # what is less likely is not in the nucleus
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PADDED: tl.constexpr,
    NUCLEUS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.arange(0, PADDED)
    wait_for_inputs(OVERLAP)
    highs = tl.load(tops + row * PARTS + part, part < PARTS, other=float("-inf"))
    parts = tl.load(sums + row * PARTS + part, part < PARTS, other=0.0)
    top = tl.max(highs, 0)
    share = 1.0 / tl.sum(parts * tl.exp(highs - top), 0)
    for chunk in tl.static_range(PART // CHUNK):
        column = tl.program_id(0) * PART + chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(chances + row * WIDTH + column, column < WIDTH, other=float("-inf"))
        chance = tl.exp(values - top) * share
        tl.store(chances + row * WIDTH + column, chance, column < WIDTH)
        if NUCLEUS:
            known = (column < WIDTH) & (chance > least)
            add_mass(mass + row * LEVELS * COPIES * BINS, key_of(chance), known, 0, 1)


@triton.jit
def _race(chances, noise, best, columns, stride, WIDTH: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    chance = tl.load(chances + row * WIDTH + column, column < WIDTH, other=0.0)
    race = chance / tl.load(noise + row * stride + column, column < WIDTH, other=1.0)
    top, best_column = best_of(race, column, column < WIDTH)
    tl.store(best + row * tl.num_programs(0) + part, top)
    tl.store(columns + row * tl.num_programs(0) + part, best_column)


@triton.jit
def _noise(seeds, positions, noise, WIDTH: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr):
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    state = mixed(mixed(tl.load(seeds + row).to(tl.uint64)) + tl.load(positions + row).to(tl.uint64) * STEP)
    bits = mixed(state + column.to(tl.uint64) * STEP) >> 12
    # exact in fp64
    share = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.0**-52
    tl.store(noise + row * WIDTH + column, (-tl.log(share)).to(tl.float32), column < WIDTH)
