"""Comparison of two versions of the same values: counts, errors and the first difference; numpy, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.kernels.formats import FP8_BLOCK

Values = NDArray[Any]
# values decoded at once: two float32 arrays of them stay in a core's cache
CHUNK = 2**18
# a float32 sum of squares between these limits has neither overflowed nor lost small values
SAFE_SQUARES = (1e-20, 1e30)


@dataclass(frozen=True)
class FirstDifference:
    """The first position, in row order, at which two matrices differ, and both values."""

    row: int
    column: int
    first: float
    second: float


class Comparison:
    """A chunked comparison of two matrices; the first is the reference.

    NaN equals NaN with any payload. If one of two different values is not finite, the errors are infinite.

    Attributes:
        values: number of values compared so far.
        different: number of values that differ as numbers.
        zero_signs: number of zeros with different signs, which are equal as numbers.
        largest: largest absolute error.
    """

    def __init__(self) -> None:
        self.values = 0
        self.different = 0
        self.zero_signs = 0
        self.largest = 0.0
        self.first: FirstDifference | None = None
        self._squared_error = 0.0
        self._squared_reference = 0.0

    @property
    def exact(self) -> bool:
        """Whether all values are bit-exact, -0 included."""
        return not self.different and not self.zero_signs

    @property
    def equal(self) -> bool:
        """Whether all values are equal as numbers (-0 equals 0)."""
        return not self.different

    @property
    def relative_error(self) -> float:
        """L2 norm of the difference divided by that of the reference; infinite for a zero reference."""
        if self.equal:
            return 0.0
        if not self._squared_reference or not isfinite(self._squared_error):
            return inf
        return sqrt(self._squared_error / self._squared_reference)

    @property
    def share(self) -> float:
        """Fraction of the values that differ."""
        return self.different / self.values if self.values else 0.0

    def add(self, first: Values, second: Values, row0: int) -> None:
        """Compare the rows starting at `row0`.

        first, second: C-contiguous arrays [rows, columns], float32 (from `values.decode`) or int64.
        """
        assert first.shape == second.shape, (first.shape, second.shape)
        assert first.dtype == second.dtype, (first.dtype, second.dtype)
        self.values += first.size
        self._squared_reference += _sum_of_squares(first)
        differs = _bits(first) != _bits(second)
        if differs.any():
            self._add_different(first, second, row0, np.flatnonzero(differs))

    # values may be NaN or infinite
    @np.errstate(over="ignore", invalid="ignore")
    def _add_different(self, first: Values, second: Values, row0: int, indices: NDArray[np.intp]) -> None:
        """Add the values whose bits differ. indices: their flat indices."""
        ours, theirs = (array.reshape(-1)[indices].astype(np.float64) for array in (first, second))
        if first.dtype == np.float32:
            signs = (ours == 0) & (theirs == 0)
            self.zero_signs += int(np.count_nonzero(signs))
            wanted = ~signs & ~(np.isnan(ours) & np.isnan(theirs))
            indices, ours, theirs = indices[wanted], ours[wanted], theirs[wanted]
        if not indices.size:
            return
        self.different += indices.size
        error = np.abs(ours - theirs)
        error[np.isnan(error)] = inf
        self.largest = max(self.largest, float(error.max()))
        self._squared_error += float(np.einsum("i,i->", error, error))
        row, column = divmod(int(indices[0]), first.shape[1])
        if self.first is None or row0 + row < self.first.row:
            self.first = FirstDifference(row0 + row, column, float(ours[0]), float(theirs[0]))


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield row slices of about CHUNK values that start at multiples of 128, as fp8 scales require."""
    step = max(CHUNK // (FP8_BLOCK * max(columns, 1)), 1) * FP8_BLOCK
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _bits(array: Values) -> Values:
    return array.view(np.uint32 if array.itemsize == 4 else np.uint64)


def _sum_of_squares(array: Values) -> float:
    """Return the sum of squares of the finite values, in float32 if its range suffices."""
    low, high = SAFE_SQUARES
    if array.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            # by rows: a float32 sum over all of them would be too coarse
            squares = float(np.einsum("ij,ij->i", array, array).sum(dtype=np.float64))
        if low * array.size < squares < high:
            return squares
    wide = array[np.isfinite(array)].astype(np.float64)
    return float(np.einsum("i,i->", wide, wide))
