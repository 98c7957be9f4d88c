"""Mergeable statistics of values: count, range, mean magnitude and RMS."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
# squares of fp32 values within these magnitudes neither overflow nor vanish
SAFE = (1e-12, 1e12)
# values whose products are added in fp32, before the sums are added in fp64; BLAS starts its own threads above 10^4
ROW = 4096


@dataclass(slots=True)
class Statistics:
    """Statistics of `count` values; all others cover the finite values. total: sum of |x|. squares: sum of x²."""

    count: int = 0
    not_finite: int = 0
    zeros: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def finite(self) -> int:
        """Number of finite values."""
        return self.count - self.not_finite

    @property
    def mean_magnitude(self) -> float:
        """Mean of |x|."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def largest(self) -> float:
        """Largest |x|."""
        return max(-self.low, self.high) if self.finite else 0.0

    @property
    def is_constant(self) -> bool:
        """Whether there are several values and all are equal."""
        return self.count > 1 and not self.not_finite and self.low == self.high

    def add(self, other: "Statistics") -> None:
        """Merge the statistics of other values."""
        self.count += other.count
        self.not_finite += other.not_finite
        self.zeros += other.zeros
        self.total += other.total
        self.squares += other.squares
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


def of_values(values: Values) -> Statistics:
    """Return the statistics of fp32 values of any shape; the array is overwritten with their magnitudes."""
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
    """Return the dot product of two fp32 vectors."""
    whole = left.size // ROW * ROW
    rows = left[:whole].reshape(-1, 1, ROW) @ right[:whole].reshape(-1, ROW, 1)
    return float(rows.sum(dtype=np.float64)) + float(left[whole:] @ right[whole:])
