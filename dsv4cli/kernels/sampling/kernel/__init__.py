"""Sampling in Triton: many programs share a row, one part each, and exchange results only between launches."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.sampling.kernel.filters import ban_below, find_threshold, penalize_part
from dsv4cli.kernels.sampling.kernel.split import NOWHERE, STEP, best_of, divided, mixed, partial
from dsv4cli.kernels.sampling.kernel.top_p import (
    BINS,
    CHUNK,
    COPIES,
    EVERYTHING,
    LEVELS,
    MASS,
    add_mass,
    find_smallest,
    key_of,
    least_of,
    limit_at,
    load_part,
    race_of_nucleus,
)

# warps of a program with floating-point sums: fixed, so that a row's bits do not depend on the number of rows
SUMMING = {"num_warps": 8}
# warps of the program that searches a whole row for its threshold
SEARCHING = 16
# programs of a nucleus kernel: each first reads the state of the search, which takes longer than one part of a row
PROGRAMS = 1024


def warps(rows: int) -> dict[str, int]:
    """Return the warps of a program that works on one part and has no floating-point sums."""
    # H200, nucleus sampling: one row 24.6 us with eight warps and 32.6 with four, 16 rows 143 and 136
    return {"num_warps": 8 if rows <= 4 else 4}


def together(rows: int, parts: int) -> int:
    """Return the parts of a row per program of the nucleus kernels: about PROGRAMS programs keep a GPU busy."""
    return max(1, (rows * parts + PROGRAMS // 2) // PROGRAMS)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    check(logits)
    rows, width = logits.shape
    part, parts = divided(width)
    best, columns = partial(rows, parts, logits.device)
    if rows:
        _largest[(parts, rows)](logits, best, columns, logits.stride(0), width, part, **warps(rows), **overlap(logits))
    return first_of_best(best, columns)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, places: torch.Tensor, drafts: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    check(logits)
    check_numbers(places, torch.int64)
    rows, width = logits.shape
    if seen.dtype != torch.int32 or not (seen.is_contiguous() and drafts.is_contiguous() and penalties.is_contiguous()):
        raise KernelUnsupported("the Triton kernel requires contiguous int32 counts, draft tokens and penalties")
    penalized = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    part, parts = divided(width)
    if rows:
        penalize_part[(parts, rows)](
            logits, seen, places, drafts, penalties, penalized, logits.stride(0), len(drafts), rows, width, part,
            num_warps=4, **overlap(logits),
        )  # fmt: skip
    return penalized


def keep_likeliest(logits: torch.Tensor, counts: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    check(logits)
    check_numbers(counts, torch.int64)
    check_numbers(gaps, torch.float32)
    rows, width = logits.shape
    kept = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    part, parts = divided(width)
    if rows:
        find_threshold[(rows,)](
            logits, counts, gaps, thresholds, logits.stride(0), width, num_warps=SEARCHING, **overlap(logits)
        )
        ban_below[(parts, rows)](
            logits, thresholds, kept, logits.stride(0), width, part, num_warps=4, **overlap(logits)
        )
    return kept


def draw(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    check(logits, noise)
    check_numbers(temperatures, torch.float32)
    rows, width = logits.shape
    part, parts = divided(width)
    best, columns = partial(rows, parts, logits.device)
    if rows:
        sums = sums_of(logits, temperatures, None)
        strides, padded = (logits.stride(0), noise.stride(0)), padding(parts)
        _race[(parts, rows)](
            logits,
            noise,
            temperatures,
            *sums,
            best,
            columns,
            *strides,
            width,
            part,
            padded,
            **SUMMING,
            **overlap(logits),
        )
    return first_of_best(best, columns)


def draw_nucleus(
    logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    check(logits, noise)
    check_numbers(temperatures, torch.float32)
    check_numbers(limits, torch.int64)
    rows, width = logits.shape
    device, (part, parts) = logits.device, divided(width)
    each, overlapped = together(rows, parts), overlap(logits)
    grid = cdiv(parts, each), rows
    best, columns = partial(rows, parts, device)
    if not rows:
        return first_of_best(best, columns)
    # a row's histograms; the result of each level: some digits of a key, and the sum of all above them
    mass = torch.empty(rows, LEVELS.value, COPIES.value, BINS.value, dtype=torch.int64, device=device)
    found = torch.empty(LEVELS.value + 1, rows, 2, dtype=torch.int64, device=device)
    tops, sums = sums_of(logits, temperatures, mass)
    chances = torch.empty(rows, width, dtype=torch.float32, device=device)
    numbers, shape = (temperatures, limits), (each, width, part)
    _chances[grid](
        logits, *numbers, chances, tops, sums, mass, logits.stride(0), *shape, padding(parts), **SUMMING, **overlapped
    )
    for level in range(1, LEVELS.value):
        find_smallest[grid](chances, *numbers, mass, found, rows, *shape, level, **warps(rows), **overlapped)
    race_of_nucleus[grid](
        chances,
        noise,
        *numbers,
        mass,
        found,
        best,
        columns,
        noise.stride(0),
        rows,
        *shape,
        **warps(rows),
        **overlapped,
    )
    return first_of_best(best, columns)


def chance_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    check(logits)
    check_numbers(tokens, torch.int64)
    rows, width = logits.shape
    parts = divided(width)[1]
    chances = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        sums = sums_of(logits, None, None)
        _chance_of[(rows,)](
            logits, tokens, *sums, chances, logits.stride(0), parts, padding(parts), num_warps=1, **overlap(logits)
        )
    return chances


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    check(logits)
    rows, width = logits.shape
    parts = divided(width)[1]
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        sums = sums_of(logits, None, None)
        _logsumexp[(rows,)](*sums, totals, parts, padding(parts), num_warps=1, **overlap(logits))
    return totals


def sums_of(
    logits: torch.Tensor, temperatures: torch.Tensor | None, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each part of logits / temperature, and its sum of exp(value - maximum): [R, parts].

    Clears `mass`.
    """
    rows, width = logits.shape
    part, parts = divided(width)
    tops, sums = (partial(rows, parts, logits.device)[0] for _ in range(2))
    cleared = next_power_of_2(cdiv(MASS.value, parts))
    _sums[(parts, rows)](
        logits, temperatures, tops, sums, mass, logits.stride(0), width, part, cleared, **SUMMING, **overlap(logits)
    )
    return tops, sums


def padding(parts: int) -> int:
    """Return the padded number of parts for kernels that reduce over parts."""
    return max(2, next_power_of_2(parts))


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    check_numbers(seeds, torch.int64)
    check_numbers(positions, torch.int64)
    made = torch.empty(len(seeds), width, dtype=torch.float32, device=seeds.device)
    part, parts = divided(width)
    if len(seeds):
        _noise[(parts, len(seeds))](seeds, positions, made, width, part, num_warps=4, **overlap(seeds))
    return made


def check(*tensors: torch.Tensor) -> None:
    """Raise KernelUnsupported for logits or noise that the kernels do not support."""
    for x in tensors:
        if x.dtype != torch.float32 or x.stride(1) != 1:
            raise KernelUnsupported(f"Triton samples from fp32 with consecutive columns, not {x.dtype}, {x.stride()}")


def check_numbers(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise KernelUnsupported for per-row numbers that the kernels do not support."""
    if x.dtype != dtype or (x.stride(0) != 1 and len(x) > 1):
        raise KernelUnsupported(f"the Triton kernel requires contiguous {dtype} numbers, not {x.dtype}")


def first_of_best(best: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the column of the largest part of each row: [R, parts] -> int64 [R]."""
    rows, parts = best.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=best.device)
    if rows:
        padded = next_power_of_2(parts)
        _first_of_best[(rows,)](best, columns, chosen, parts, padded, num_warps=1, **overlap(best))
    return chosen


@launched
def _largest(logits, best, columns, stride, WIDTH: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + row * stride + column, column < WIDTH, other=float("-inf"))
    top, best_column = best_of(values, column, column < WIDTH)
    tl.store(best + row * tl.num_programs(0) + part, top)
    tl.store(columns + row * tl.num_programs(0) + part, best_column)


@launched
def _first_of_best(best, columns, chosen, PARTS: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    wait_for_inputs(OVERLAP)
    values = tl.load(best + row * PARTS + part, part < PARTS, other=float("-inf"))
    column = tl.load(columns + row * PARTS + part, part < PARTS, other=NOWHERE)
    tl.store(chosen + row, best_of(values, column, part < PARTS)[1].to(tl.int64))


@launched(do_not_specialize_on_alignment=["temperatures"])
def _sums(
    logits,  # [rows, WIDTH]
    temperatures,  # [rows], or None for 1
    tops,  # [rows, parts]: the largest of a part of logits / temperature
    sums,  # [rows, parts]: of exp(logits / temperature - top)
    mass,  # int64 [rows, LEVELS, COPIES, BINS], to be cleared, or None
    stride,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    CLEARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + row * stride + column, column < WIDTH, other=float("-inf"))
    if temperatures is not None:
        values = scaled(values, tl.load(temperatures + row))
    if mass is not None:
        number = part * CLEARED + tl.arange(0, CLEARED)
        tl.store(mass + row * MASS + number, tl.zeros([CLEARED], tl.int64), number < MASS)
    top = tl.max(values, 0)
    # 0, or NaN if a logit is not finite
    strange = tl.where(column < WIDTH, values - values, 0.0)
    tl.store(tops + row * tl.num_programs(0) + part, top)
    tl.store(sums + row * tl.num_programs(0) + part, tl.sum(tl.exp(values - top) + strange, 0))


@triton.jit
def scaled(values, temperature):
    """Return values / temperature, or the values if the temperature is 0."""
    return tl.div_rn(values, tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def scale_of(tops, sums, row, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Return a row's maximum and 1 / sum(exp(value - maximum)), over values = logits / temperature."""
    part = tl.arange(0, PADDED)
    highs = tl.load(tops + row * PARTS + part, part < PARTS, other=float("-inf"))
    parts = tl.load(sums + row * PARTS + part, part < PARTS, other=0.0)
    top = tl.max(highs, 0)
    return top, 1.0 / tl.sum(parts * tl.exp(highs - top), 0)


@launched(do_not_specialize_on_alignment=["temperatures"])
def _race(
    logits,
    noise,
    temperatures,
    tops,
    sums,
    best,  # [rows, parts]: the best of a part
    columns,
    stride,
    noise_stride,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    temperature = tl.load(temperatures + row)
    top, share = scale_of(tops, sums, row, tl.cdiv(WIDTH, PART), PADDED)
    values = tl.load(logits + row * stride + column, inside, other=float("-inf"))
    chance = tl.exp(scaled(values, temperature) - top) * share
    race = chance / tl.load(noise + row * noise_stride + column, inside, other=1.0)
    first, best_column = best_of(tl.where(temperature == 0, values, race), column, inside)
    tl.store(best + row * tl.num_programs(0) + part, first)
    tl.store(columns + row * tl.num_programs(0) + part, best_column)


@launched(do_not_specialize=["together"], do_not_specialize_on_alignment=["temperatures", "limits"])
def _chances(
    logits,
    temperatures,
    limits,
    chances,  # [rows, WIDTH]; of a row with temperature 0, its logits
    tops,
    sums,
    mass,
    stride,
    together,  # parts per program
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    wait_for_inputs(OVERLAP)
    temperature, limit = tl.load(temperatures + row), limit_at(temperatures, limits, row)
    top, share = scale_of(tops, sums, row, tl.cdiv(WIDTH, PART), PADDED)
    least = least_of(limit, WIDTH)
    first = tl.program_id(0) * together
    for part in tl.range(first, first + together):
        given = load_part(logits + row * stride, part * PART, WIDTH, PART, CHUNK, float("-inf"))
        for chunk in tl.static_range(PART // CHUNK):
            column = part * PART + chunk * CHUNK + tl.arange(0, CHUNK)
            values, inside = given[chunk], column < WIDTH
            chance = tl.exp(scaled(values, temperature) - top) * share
            tl.store(chances + row * WIDTH + column, tl.where(temperature == 0, values, chance), inside)
            if limit < EVERYTHING:
                add_mass(mass + row * MASS, key_of(chance), inside & (chance > least), 0, 1)


@launched(do_not_specialize_on_alignment=["tokens"])
def _chance_of(
    logits, tokens, tops, sums, chances, stride, PARTS: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    top, share = scale_of(tops, sums, row, PARTS, PADDED)
    value = tl.load(logits + row * stride + tl.load(tokens + row))
    tl.store(chances + row, tl.exp(value - top) * share)


@launched
def _logsumexp(tops, sums, totals, PARTS: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    top, share = scale_of(tops, sums, row, PARTS, PADDED)
    tl.store(totals + row, top - tl.log(share))


@launched(do_not_specialize_on_alignment=["seeds", "positions"])
def _noise(seeds, positions, noise, WIDTH: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr):
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * PART + tl.arange(0, PART)
    wait_for_inputs(OVERLAP)
    state = mixed(mixed(tl.load(seeds + row).to(tl.uint64)) + tl.load(positions + row).to(tl.uint64) * STEP)
    bits = mixed(state + column.to(tl.uint64) * STEP) >> 12
    # exact in fp64
    share = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.0**-52
    tl.store(noise + row * WIDTH + column, (-tl.log(share)).to(tl.float32), column < WIDTH)
