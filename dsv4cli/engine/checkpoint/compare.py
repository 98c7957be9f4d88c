"""How far two versions of the same values are apart: counts, errors and the first difference; numpy, no torch."""

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
    """Where two matrices differ for the first time, row by row, and the values there."""

    row: int
    column: int
    first: float
    second: float


class Comparison:
    """Two matrices compared piece by piece; the first is the reference.

    values: compared so far. different: those whose numbers differ. zero_signs: zeros of different sign, which are equal
    as numbers. largest: the largest absolute error. NaN equals NaN, whatever its payload; where one of two different
    values is not finite, the errors are infinite.
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
        """Whether every value is the same bit for bit, -0 included."""
        return not self.different and not self.zero_signs

    @property
    def equal(self) -> bool:
        """Whether every number is the same, with -0 equal to 0."""
        return not self.different

    @property
    def relative_error(self) -> float:
        """L2 norm of the difference over that of the reference; infinite against a reference of zeros."""
        if self.equal:
            return 0.0
        if not self._squared_reference or not isfinite(self._squared_error):
            return inf
        return sqrt(self._squared_error / self._squared_reference)

    @property
    def share(self) -> float:
        """The share of the values that differ."""
        return self.different / self.values if self.values else 0.0

    def add(self, first: Values, second: Values, row0: int) -> None:
        """Compares the rows from `row0` on: both arrays [rows, columns], float32 (as `values.decode` gives) or int64,
        C-contiguous."""
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
        """indices: flat indices of the values whose bits differ."""
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
    """The rows of a matrix in pieces of about CHUNK values that begin at multiples of 128, as fp8 scales need them."""
    step = max(CHUNK // (FP8_BLOCK * max(columns, 1)), 1) * FP8_BLOCK
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _bits(array: Values) -> Values:
    return array.view(np.uint32 if array.itemsize == 4 else np.uint64)


def _sum_of_squares(array: Values) -> float:
    """Of the finite values; in float32 where its range is enough."""
    low, high = SAFE_SQUARES
    if array.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            # by rows: a float32 sum over all of them would be too coarse
            squares = float(np.einsum("ij,ij->i", array, array).sum(dtype=np.float64))
        if low * array.size < squares < high:
            return squares
    wide = array[np.isfinite(array)].astype(np.float64)
    return float(np.einsum("i,i->", wide, wide))
