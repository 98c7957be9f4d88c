"""Count, range, mean magnitude and RMS of values; sums of parts add up to those of the whole."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
# squares of fp32 values within these magnitudes neither overflow nor vanish
SAFE = (1e-12, 1e12)
# values whose products are added in fp32, before the sums are added in fp64; BLAS begins threads of its own above 10^4
ROW = 4096


@dataclass(slots=True)
class Statistics:
    """Of `count` values; the others describe the finite ones. total: the sum of magnitudes; squares: of squares."""

    count: int = 0
    not_finite: int = 0
    zeros: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.count - self.not_finite

    @property
    def mean_magnitude(self) -> float:
        """The mean of |x|."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def rms(self) -> float:
        """The root of the mean of x²."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def largest(self) -> float:
        """The largest |x|."""
        return max(-self.low, self.high) if self.finite else 0.0

    @property
    def is_constant(self) -> bool:
        """Whether several values are there and all are the same."""
        return self.count > 1 and not self.not_finite and self.low == self.high

    def add(self, other: "Statistics") -> None:
        """Takes in the statistics of further values."""
        self.count += other.count
        self.not_finite += other.not_finite
        self.zeros += other.zeros
        self.total += other.total
        self.squares += other.squares
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


def of_values(values: Values) -> Statistics:
    """The statistics of fp32 values of any shape, which are lost: the array becomes their magnitudes."""
    flat = values.reshape(-1)
    if not flat.size:
        return Statistics()
    low, high = float(flat.min()), float(flat.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        found = of_values(flat[np.isfinite(flat)])
        found.not_finite, found.count = flat.size - found.count, flat.size
        return found
    largest = max(-low, high)
    zeros = flat.size - int(np.count_nonzero(flat != 0))
    np.abs(flat, out=flat)
    if largest and not SAFE[0] < largest < SAFE[1]:
        wide = flat.astype(np.float64)
        return Statistics(flat.size, 0, zeros, float(wide.sum()), float((wide * wide).sum()), low, high)
    return Statistics(flat.size, 0, zeros, float(flat.sum()), dot(flat, flat), low, high)


def dot(left: Values, right: Values) -> float:
    """The sum of products of two vectors of fp32."""
    whole = left.size // ROW * ROW
    rows = left[:whole].reshape(-1, 1, ROW) @ right[:whole].reshape(-1, ROW, 1)
    return float(rows.sum(dtype=np.float64)) + float(left[whole:] @ right[whole:])
