"""Statistics of FP4 values from a lookup table of four codes at a time, without decoding them."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.inspection.checks.statistics import Statistics, Values, dot
from dsv4cli.kernels.formats import E2M1_MAX, E2M1_VALUES

Raw = NDArray[Any]
Words = NDArray[np.uint64]
# bytes of codes looked up together: the results stay in the cache
BLOCK = 1 << 19
# groups looked at together in search of the largest value
PIECE = 1024
# fields of an entry of the table, wide enough for 32 codes: their squares x 4, magnitudes x 2, how many are not zero
MAGNITUDES, NONZERO, END = 13, 22, 32


def of_codes(packed: Raw, scale: Raw, factors: Values, present: Raw) -> Statistics:
    """Return the statistics of e2m1 codes multiplied by the factor of their group.

    Args:
        packed: uint8 [rows, columns / 2].
        scale: uint8 [rows, groups], for groups of 16 or 32 codes.
        factors: fp32 [256], the value of each byte of `scale`: not negative, NaN for an invalid byte.
        present: the bytes that occur in `scale`.
    """
    scale, count = scale.reshape(-1), 2 * packed.size
    groups = np.ascontiguousarray(packed).view(np.uint64).reshape(scale.size, -1)
    found = Statistics(count)
    if not (factors[present] > 0).all():
        factor, codes = factors[scale], 2 * groups.nbytes // max(scale.size, 1)
        found.not_finite = codes * int(np.isnan(factor).sum())
        found.zeros = codes * int((factor == 0).sum())
        groups, scale = groups[factor > 0], scale[factor > 0]
        present = present[factors[present] > 0]
    if found.zeros:
        found.low = found.high = 0.0
    if not scale.size:
        return found
    top = float(factors[present].max())
    # relative to the largest factor: squares of fp32 numbers
    shares = np.zeros(256, np.float32)
    shares[present] = factors[present] / np.float32(top)
    step = BLOCK // groups[0].nbytes
    for begin in range(0, scale.size, step):
        share = np.take(shares, scale[begin : begin + step])
        sums = _sums(groups[begin : begin + step])
        found.zeros -= int((sums >> NONZERO).sum(dtype=np.int64))
        found.total += dot(_field(sums, MAGNITUDES, NONZERO), share) * top / 2
        found.squares += dot(_field(sums, 0, MAGNITUDES), share * share) * top * top / 4
    found.zeros += 2 * groups.nbytes
    low, high = _range(groups, scale, factors, present)
    found.low, found.high = min(found.low, low), max(found.high, high)
    return found


def _sums(groups: Words) -> NDArray[np.uint32]:
    """Return the sum of the table's entries over each group."""
    entries = np.take(_table(), groups.view(np.uint16)).view(np.uint64)
    pairs = entries[:, 0] + entries[:, 1]
    for column in range(2, entries.shape[1]):
        pairs += entries[:, column]
    return (pairs + (pairs >> np.uint64(END))).astype(np.uint32)


def _field(sums: NDArray[np.uint32], begin: int, end: int) -> Values:
    return ((sums >> begin) & ((1 << (end - begin)) - 1)).astype(np.float32)


@cache
def _table() -> NDArray[np.uint32]:
    """Return the contribution of four codes to the sums, indexed by their 16 bits."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    table = np.zeros(1 << 16, np.uint32)
    halves = (2 * np.abs(np.array(E2M1_VALUES))).astype(np.uint32)
    for shift in (0, 4, 8, 12):
        magnitude = halves[(codes >> shift) & 15]
        table += magnitude * magnitude + (magnitude << MAGNITUDES) + ((magnitude > 0).astype(np.uint32) << NONZERO)
    return table


def _range(groups: Words, scale: Raw, factors: Values, present: Raw) -> tuple[float, float]:
    """Return the smallest and the largest value.

    Groups are read from the largest factor down, until no other group can contain a larger value.
    """
    low, high = np.inf, -np.inf
    # in fp64: with the largest scales a value is no fp32 number
    codes = np.array(E2M1_VALUES)
    for byte in present[np.argsort(factors[present])[::-1]].tolist():
        factor = float(factors[byte])
        rows = np.flatnonzero(scale == byte)
        for begin in range(0, rows.size, PIECE):
            if min(-low, high) >= factor * E2M1_MAX:
                return low, high
            packed = np.bincount(groups[rows[begin : begin + PIECE]].view(np.uint8).reshape(-1), minlength=256)
            found = packed.nonzero()[0]
            values = codes[np.concatenate((found & 15, found >> 4))] * factor
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    return low, high
