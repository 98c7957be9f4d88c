"""The nucleus without sorting: the smallest chance that has a place in it, and the best of what is in it.

Three histograms of chances, ten bits of their pattern each, lead to the smallest chance. Their sums are integers,
2 ** -62 the unit: exact, so that no order of adding matters.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.sampling.parts import NOWHERE, best_of

# the bits of a chance from 0 to 1 in as many levels
LEVELS, BITS = tl.constexpr(3), tl.constexpr(10)
BINS, UNIT = tl.constexpr(1 << BITS.value), tl.constexpr(2.0**62)


@triton.jit
def add_mass(bins, number, chance, known):
    """Adds chances to the bins of these numbers."""
    tl.atomic_add(bins + number, (chance * UNIT).to(tl.int64), known, sem="relaxed")


@triton.jit
def lowest_bin(mass, found, row, count, limit, first, LEVEL: tl.constexpr):
    """The lowest bin of a level above which lies less than limit: all bits known with it, and what lies above.

    first: whether this program writes down what it has found.
    """
    prefix, above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if LEVEL > 1:
        prefix = tl.load(found + ((LEVEL - 1) * count + row) * 2)
        above = tl.load(found + ((LEVEL - 1) * count + row) * 2 + 1)
    inside = tl.load(mass + ((LEVEL - 1) * count + row) * BINS + tl.arange(0, BINS))
    higher = above + tl.sum(inside, 0) - tl.cumsum(inside, 0)
    # the higher the bin, the less is above
    prefix = (prefix << BITS) | tl.sum((higher >= limit).to(tl.int32), 0)
    above = tl.max(tl.where(higher < limit, higher, 0), 0)
    tl.store(found + (LEVEL * count + row) * 2, prefix, first)
    tl.store(found + (LEVEL * count + row) * 2 + 1, above, first)
    return prefix, above


@triton.jit(do_not_specialize=["limit", "count"])
def find_smallest(
    chances,
    mass,
    found,  # int64 [LEVELS + 1, count, 2]: bits known of the smallest chance of the nucleus, sum of all above these
    limit,  # top_p in units
    least,
    count,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    LEVEL: tl.constexpr,  # histograms that are complete
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    chance = tl.load(chances + row * WIDTH + column, column < WIDTH, other=0.0)
    prefix, _ = lowest_bin(mass, found, row, count, limit, part == 0, LEVEL)
    bits = chance.to(tl.int32, bitcast=True)
    same = ((bits >> (LEVELS - LEVEL) * BITS) == prefix) & (chance > least)
    number = (bits >> (LEVELS - 1 - LEVEL) * BITS) & (BINS - 1)
    add_mass(mass + (LEVEL * count + row) * BINS, number, chance, same)


@triton.jit(do_not_specialize=["limit", "count"])
def race_of_nucleus(
    chances,
    noise,
    mass,
    found,  # the last level: the smallest chance, and how many that have it there is room for
    best,  # [count, parts]: the best of those above the smallest chance
    places,
    tied,  # the same of those that have it
    tie_places,
    ties,  # int32 [count, parts]: how many do
    stride,  # of noise
    limit,
    count,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * PART + tl.arange(0, PART)
    inside = column < WIDTH
    chance = tl.load(chances + row * WIDTH + column, inside, other=0.0)
    race = chance / tl.load(noise + row * stride + column, inside, other=1.0)
    smallest, above = lowest_bin(mass, found, row, count, limit, False, LEVELS)
    bits = chance.to(tl.int32, bitcast=True)
    slot = row * tl.num_programs(0) + part
    top, place = best_of(race, column, inside & (bits > smallest))
    tl.store(best + slot, top)
    tl.store(places + slot, place)
    tie = inside & (bits == smallest)
    top, place = best_of(race, column, tie)
    tl.store(tied + slot, top)
    tl.store(tie_places + slot, place)
    tl.store(ties + slot, tl.sum(tie.to(tl.int32), 0))
    # as many of equals as there are with less than top_p before them
    weight = tl.maximum((smallest.to(tl.int32).to(tl.float32, bitcast=True) * UNIT).to(tl.int64), 1)
    tl.store(found + (LEVELS * count + row) * 2, smallest, part == 0)
    tl.store(found + (LEVELS * count + row) * 2 + 1, (limit - above + weight - 1) // weight, part == 0)


@triton.jit(do_not_specialize=["count"])
def first_of_nucleus(
    chances,
    noise,
    found,  # these six as in race_of_nucleus
    best,
    places,
    tied,
    tie_places,
    ties,
    chosen,  # int64 [count]
    stride,
    count,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PADDED: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    known, slot = part < PARTS, row * PARTS + part
    smallest = tl.load(found + (LEVELS * count + row) * 2)
    room = tl.load(found + (LEVELS * count + row) * 2 + 1)
    top, place = best_of(tl.load(best + slot, known, other=0.0), tl.load(places + slot, known, other=0), known)
    here = tl.load(ties + slot, known, other=0)
    before = tl.cumsum(here, 0) - here
    whole = known & (before + here <= room)
    tie, tie_place = tl.load(tied + slot, known, other=0.0), tl.load(tie_places + slot, known, other=0)
    tie, tie_place = best_of(tie, tie_place, whole)
    # the part in which the room ends; where there is none the row's end, of which nothing is looked at
    split = tl.min(tl.where(known & (before < room) & (before + here > room), part, PARTS), 0)
    room -= tl.sum(tl.where(part == split, before, 0), 0)
    column = split * PART + tl.arange(0, PART)
    chance = tl.load(chances + row * WIDTH + column, column < WIDTH, other=0.0)
    race = chance / tl.load(noise + row * stride + column, column < WIDTH, other=1.0)
    equal = (column < WIDTH) & (chance.to(tl.int32, bitcast=True) == smallest)
    last, last_place = best_of(race, column, equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    largest = tl.maximum(tl.maximum(top, tie), last)
    place = tl.minimum(tl.where(top == largest, place, NOWHERE), tl.where(tie == largest, tie_place, NOWHERE))
    tl.store(chosen + row, tl.minimum(place, tl.where(last == largest, last_place, NOWHERE)).to(tl.int64))
