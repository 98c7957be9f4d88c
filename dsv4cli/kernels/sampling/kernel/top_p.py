"""Top-p without sorting: finds the smallest probability of the nucleus, then the best token in it.

Histograms of probabilities yield the smallest probability, six bits per level. Their sums are integers: exact in any
order.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs
from dsv4cli.kernels.sampling import ref
from dsv4cli.kernels.sampling.kernel.split import best_of

LEVELS, BINS = tl.constexpr(5), tl.constexpr(64)
EVERYTHING = tl.constexpr(ref.EVERYTHING)
# in units of 1 / `ref.UNIT`: WHOLE - limit is what a nucleus excludes; up to LITTLE, fp32 rounding is not negligible
WHOLE, LITTLE = tl.constexpr(ref.UNIT - ref.SLACK), tl.constexpr(ref.UNIT // 10_000)
# copies of each level's histogram, summed later, so that programs do not all add to the same few addresses
COPIES = tl.constexpr(8)
MASS = tl.constexpr(LEVELS.value * COPIES.value * BINS.value)
# CHUNK: values processed together; the sum of that many 24-bit mantissas fits 32 bits
# MANY: with more valid values than this, a program sums them before its atomic additions (constant cost)
# CROWDED: the last level that can have so many
CHUNK, MANY, CROWDED = tl.constexpr(256), tl.constexpr(96), tl.constexpr(2)


@triton.jit
def limit_at(temperatures, limits, row):
    """Return a row's limit, as ref.limit_of. A greedy row needs no search."""
    return tl.where(tl.load(temperatures + row) == 0, EVERYTHING, tl.load(limits + row))


@triton.jit
def least_of(limit, WIDTH: tl.constexpr):
    """Return a lower bound of the nucleus: all tokens below it sum to at most half of what the nucleus excludes."""
    left = WHOLE - limit
    return tl.where(left > LITTLE, left.to(tl.float32) * (2.0**-63 / WIDTH), 0.0)


@triton.jit
def load_part(row, first, WIDTH: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, OTHER: tl.constexpr):
    """Load a part of a row as a tuple of blocks of SIZE values, all loads in flight at once; OTHER beyond its end."""
    values = ()
    for chunk in tl.static_range(PART // SIZE):
        column = first + chunk * SIZE + tl.arange(0, SIZE)
        values += (tl.load(row + column, column < WIDTH, other=OTHER),)
    return values


@triton.jit
def key_of(chance):
    """Return an int32 key that grows with the probability: five digits of six bits.

    The first digit is the exponent, 0 below the unit.
    """
    bits = chance.to(tl.int32, bitcast=True)
    return (tl.maximum((bits >> 23) - 64, 0) << 24) | ((bits & 0x7FFFFF) << 1)


@triton.jit
def in_units(mantissas, exponent):
    """Convert a sum of mantissas whose keys share the first digit to units of 1 / `ref.UNIT`, int64."""
    up = (exponent - 24).to(tl.int64)
    sums = tl.where(up >= 0, mantissas << tl.maximum(up, 0), mantissas >> tl.maximum(-up, 0))
    return tl.where(exponent > 0, sums, 0)


@triton.jit
def mantissa_of(key):
    return (((key >> 1) & 0x7FFFFF) | 0x800000).to(tl.uint32)


@triton.jit
def add_mass(bins, key, known, first, LEVEL: tl.constexpr):
    """Add the probabilities of these keys (int32 [n], at levels up to CROWDED n is CHUNK) to the bins of a level.

    first: the first digit of all known keys; unused at the level of that digit.
    """
    number, digit = tl.arange(0, BINS), (key >> (LEVELS - LEVEL) * 6) & (BINS - 1)
    mantissa, crowded = mantissa_of(key), False
    if LEVEL <= CROWDED:
        crowded = tl.sum(known.to(tl.int32), 0) > MANY
    if crowded:
        inside = tl.where(known, digit, -1)[:, None] == number[None]
        sums = tl.sum(tl.where(inside, mantissa[:, None], 0), 0).to(tl.int64)
        units = in_units(sums, number if LEVEL == 1 else first)
        tl.atomic_add(bins + tl.program_id(0) % COPIES * BINS + number, units, sums > 0, sem="relaxed")
    else:
        each = in_units(mantissa.to(tl.int64), key >> (LEVELS - 1) * 6)
        tl.atomic_add(bins + tl.arange(0, key.shape[0]) % COPIES * BINS + digit, each, known, sem="relaxed")


@triton.jit
def lowest_bin(mass, found, row, count, limit, first, LEVEL: tl.constexpr):
    """Find the next digit of the smallest key in the nucleus. Return its known digits and the sum above them.

    The sum is that of all probabilities whose keys have higher leading digits. first: whether this program stores the
    result.
    """
    prefix, above = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    if LEVEL > 1:
        prefix = tl.load(found + ((LEVEL - 1) * count + row) * 2).to(tl.int32)
        above = tl.load(found + ((LEVEL - 1) * count + row) * 2 + 1)
    copy, number = tl.arange(0, COPIES)[:, None], tl.arange(0, BINS)[None]
    inside = tl.sum(tl.load(mass + ((row * LEVELS + LEVEL - 1) * COPIES + copy) * BINS + number), 0)
    higher = above + tl.sum(inside, 0) - tl.cumsum(inside, 0)
    # the sum above a bin decreases with the bin
    prefix = prefix * BINS + tl.sum((higher >= limit).to(tl.int32), 0)
    above = tl.max(tl.where(higher < limit, higher, 0), 0)
    tl.store(found + (LEVEL * count + row) * 2, prefix.to(tl.int64), first)
    tl.store(found + (LEVEL * count + row) * 2 + 1, above, first)
    return prefix, above


@launched(do_not_specialize=["count", "together"], do_not_specialize_on_alignment=["temperatures", "limits"])
def find_smallest(
    chances,
    temperatures,
    limits,
    mass,  # int64 [count, LEVELS, COPIES, BINS]
    found,  # int64 [LEVELS + 1, count, 2]: known digits of the nucleus's smallest key, sum of all above them
    count,
    together,  # parts per program
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    LEVEL: tl.constexpr,  # number of complete levels
    OVERLAP: tl.constexpr,
):
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * together
    SIZE: tl.constexpr = CHUNK if LEVEL < CROWDED else PART
    wait_for_inputs(OVERLAP)
    limit = limit_at(temperatures, limits, row)
    prefix, _ = lowest_bin(mass, found, row, count, limit, first == 0, LEVEL)
    least = least_of(limit, WIDTH)
    if limit < EVERYTHING:
        for part in tl.range(first, first + together):
            values = load_part(chances + row * WIDTH, part * PART, WIDTH, PART, SIZE, 0.0)
            for chunk in tl.static_range(PART // SIZE):
                key = key_of(values[chunk])
                same = ((key >> (LEVELS - LEVEL) * 6) == prefix) & (values[chunk] > least)
                add_mass(mass + row * MASS + LEVEL * COPIES * BINS, key, same, prefix >> (LEVEL - 1) * 6, LEVEL + 1)


@launched(do_not_specialize=["count", "together"], do_not_specialize_on_alignment=["temperatures", "limits"])
def race_of_nucleus(
    chances,
    noise,
    temperatures,
    limits,
    mass,
    found,
    best,  # [count, parts]: the best value in the nucleus
    columns,
    stride,  # of noise
    count,
    together,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * together
    wait_for_inputs(OVERLAP)
    smallest, _ = lowest_bin(mass, found, row, count, limit_at(temperatures, limits, row), False, LEVELS)
    greedy = tl.load(temperatures + row) == 0
    for part in tl.range(first, tl.minimum(first + together, tl.cdiv(WIDTH, PART))):
        column = part * PART + tl.arange(0, PART)
        inside = column < WIDTH
        chance = tl.load(chances + row * WIDTH + column, inside, other=0.0)
        race = chance / tl.load(noise + row * stride + column, inside, other=1.0)
        # a greedy row passes the filter: its smallest key is 0, and the key of any logit is at least 0
        top, best_column = best_of(tl.where(greedy, chance, race), column, inside & (key_of(chance) >= smallest))
        slot = row * tl.cdiv(WIDTH, PART) + part
        tl.store(best + slot, top)
        tl.store(columns + slot, best_column)
