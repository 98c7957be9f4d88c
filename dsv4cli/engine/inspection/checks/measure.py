"""Measurement of one matrix by rows: statistics, and properties of its bytes; numpy, no torch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.matrix import MatrixReader
from dsv4cli.engine.checkpoint.values import decode, e4m3_values, e8m0_values
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.inspection.checks.codes import of_codes
from dsv4cli.engine.inspection.checks.statistics import Statistics, of_values
from dsv4cli.kernels.formats import E8M0_BIAS, E8M0_NAN, FP8_BLOCK

Raw = NDArray[Any]
# values of a chunk: FP4 is looked up in its bytes, the others are decoded, which takes eight times the memory
CHUNK = {"fp4": 1 << 22, "nvfp4": 1 << 22}
DECODED_CHUNK = 1 << 18
# a sample is three runs of this many values
SAMPLE = 1 << 17
# distinct values that are enough to judge by
ENOUGH = 8
BLOCK_ROLES: tuple[Role, ...] = ("scale", "weight_scale")
NUMBER_ROLES: tuple[Role, ...] = ("weight_scale_2", "input_scale")


@dataclass(frozen=True)
class ScaleCodes:
    """The bytes of a scale format that mean NaN, zero (for e8m0: nearly zero) and one."""

    nan: tuple[int, ...]
    zero: tuple[int, ...]
    one: int


SCALE_CODES = {
    "F8_E8M0": ScaleCodes((E8M0_NAN,), (0,), E8M0_BIAS),
    "F8_E4M3": ScaleCodes((0x7F, 0xFF), (0, 0x80), 0x38),
}


@dataclass
class ScaleNumbers:
    """Counts of fp32 block scales: all, invalid ones (not above 0, or not finite), and those equal to 1."""

    count: int = 0
    wrong: int = 0
    ones: int = 0

    def add(self, scale: Raw) -> None:
        """Add fp32 scales."""
        self.count += scale.size
        self.wrong += int(np.count_nonzero(~((scale > 0) & (scale < np.inf))))
        self.ones += int(np.count_nonzero(scale == 1))


@dataclass
class BadRows:
    """Rows of a table that are wrong in one way: their count, and the number and content of the first."""

    count: int = 0
    row: int = 0
    ids: tuple[int, ...] = ()

    def add(self, first: int, ids: Raw, wrong: Any) -> None:
        """Add the rows of `ids` that are wrong; `first` is the number of the first row in `ids`."""
        rows = np.flatnonzero(wrong)
        if rows.size and not self.count:
            self.row, self.ids = first + int(rows[0]), tuple(ids[rows[0]].tolist())
        self.count += rows.size


class Measurement:
    """The measurements of the rows read so far.

    Attributes:
        scale: count of each byte among the block scales.
        scale_numbers: counts for fp32 block scales.
        hidden: number of zero scales of blocks with nonzero codes.
        codes: for FP8, counts of the NaN codes and, until the first -0, of both zeros and of the smallest number.
        distinct: up to ENOUGH values of a tensor that is F32 in the official layout.
        narrow: whether all of these are BF16 numbers.
        outside, twice: rows of an expert lookup table with an invalid expert, or with a duplicate.
    """

    def __init__(self, matrix: MatrixReader, experts: int) -> None:
        self.matrix = matrix
        self.weight: TensorSpec = matrix.parts["weight"]
        self.statistics = Statistics()
        self.scale = np.zeros(256, np.int64)
        self.scale_numbers = ScaleNumbers()
        self.hidden = 0
        self.codes: Counter[str] = Counter()
        self.distinct: set[float] = set()
        self.narrow = True
        self.numbers: dict[Role, float] = {}
        self.outside, self.twice = BadRows(), BadRows()
        self._experts = experts

    @property
    def block_scale(self) -> TensorSpec | None:
        """The scale tensor with a byte, or a number, per block."""
        return next((self.matrix.parts[role] for role in BLOCK_ROLES if role in self.matrix.parts), None)

    @property
    def is_kept_wide(self) -> bool:
        """Whether the tensor is F32 in the official layout; weight matrices never are."""
        return self.weight.dtype == "F32" and not self.weight.name.endswith(".weight")

    def take(self, rows: slice, raw: Mapping[Role, Raw]) -> None:
        """Add rows as returned by `MatrixReader.read`; the arrays are overwritten."""
        form = self.matrix.form
        if form == "i64":
            self._take_table(rows.start, raw["weight"])
            return
        self.numbers |= {role: float(raw[role]) for role in NUMBER_ROLES if role in raw}
        scale = next((raw[role] for role in BLOCK_ROLES if role in raw), None)
        if form == "fp8_f32":
            self.scale_numbers.add(raw["scale"])
        elif scale is not None:
            present = self._take_scale(scale, raw["weight"])
            if form != "fp8":
                self.statistics.add(of_codes(raw["weight"], scale, self._factors(), present))
                return
        if form in ("fp8", "fp8_f32"):
            self._take_codes(raw["weight"])
        if self.is_kept_wide:
            self._take_wide(raw["weight"])
        # an absurd scale shows in the result
        with np.errstate(over="ignore", invalid="ignore"):
            self.statistics.add(of_values(decode(form, raw)))

    def _factors(self) -> NDArray[np.float32]:
        if self.matrix.form == "fp4":
            return e8m0_values()
        return np.abs(e4m3_values()) * np.float32(abs(self.numbers["weight_scale_2"]))

    def _take_scale(self, scale: Raw, weight: Raw) -> Raw:
        """Add scales and return the bytes that occur."""
        counts = np.bincount(scale.reshape(-1), minlength=256)
        self.scale += counts
        assert self.block_scale is not None
        zero = list(SCALE_CODES[self.block_scale.dtype].zero)
        if counts[zero].any():
            blocks = np.isin(scale, zero)
            if self.matrix.form == "fp8":
                mask = blocks.repeat(FP8_BLOCK, 0)[: weight.shape[0]].repeat(FP8_BLOCK, 1)[:, : weight.shape[1]]
                held = mask & (weight & 0x7F != 0)
            else:
                held = blocks.repeat(weight.shape[1] // blocks.shape[1], 1) & (weight & 0x77 != 0)
            self.hidden += int(counts[zero].sum()) if held.any() else 0
        return counts.nonzero()[0]

    def _take_codes(self, codes: Raw) -> None:
        self.codes["nan"] += int(np.count_nonzero((codes & 0x7F) == 0x7F))
        if not self.codes["-0"]:
            self.codes["-0"] = int(np.count_nonzero(codes == 0x80))
            self.codes["+0"] += int(np.count_nonzero(codes == 0))
            self.codes["smallest"] += int(np.count_nonzero((codes & 0x7F) == 1))

    def _take_wide(self, values: Raw) -> None:
        if self.narrow:
            self.narrow = not (values.view(np.uint32) & 0xFFFF).any()
        if self.narrow and len(self.distinct) < ENOUGH:
            self.distinct |= set(np.unique(values[values != 0])[:ENOUGH].tolist())

    def _take_table(self, first: int, ids: Raw) -> None:
        ordered = np.sort(ids, axis=1)
        self.outside.add(first, ids, ((ids < 0) | (ids >= self._experts)).any(axis=1))
        self.twice.add(first, ids, (ordered[:, 1:] == ordered[:, :-1]).any(axis=1))


def whole_rows(matrix: MatrixReader) -> Iterator[slice]:
    """Yield all rows, in chunks that start at multiples of 128, as FP8 scales require."""
    rows, columns = matrix.shape
    values = CHUNK.get(matrix.form, DECODED_CHUNK)
    step = max(values // (FP8_BLOCK * max(columns, 1)), 1) * FP8_BLOCK
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def sample_rows(matrix: MatrixReader) -> Iterator[slice]:
    """Yield the first, middle and last rows, or all rows of a small matrix."""
    rows, columns = matrix.shape
    step = max(SAMPLE // (FP8_BLOCK * max(columns, 1)), 1) * FP8_BLOCK
    if matrix.form == "i64" or rows <= 3 * step:
        yield from whole_rows(matrix)
        return
    for start in (0, (rows - step) // 2, rows - step):
        begin = -(-start // FP8_BLOCK) * FP8_BLOCK
        yield slice(begin, min(begin + step, rows))
