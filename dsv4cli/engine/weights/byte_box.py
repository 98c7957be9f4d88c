"""Ranges of rows and bytes: a tensor, a rank's shard of it, or the part that one stored tensor holds."""

from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.fill import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class ByteBox:
    """A range of rows of a tensor, and a range of bytes in each row."""

    rows: range
    columns: range

    def __and__(self, other: "ByteBox") -> "ByteBox":
        """Return the intersection."""
        rows, columns = (
            range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            for ours, theirs in ((self.rows, other.rows), (self.columns, other.columns))
        )
        return ByteBox(rows, columns)


def box_of(spec: TensorSpec, dim: int | None, part: int, parts: int) -> ByteBox:
    """Return one of `parts` equal parts of a tensor along a dimension, or the whole tensor if `dim` is None."""
    outer = spec.shard or 1  # number of leading dimensions that count rows
    rows, row = prod(spec.shape[:outer]), prod(spec.shape[outer:]) * TORCH_DTYPES[spec.dtype].itemsize
    if dim is None:
        return ByteBox(range(rows), range(row))
    if dim == 0:
        return ByteBox(range(part * rows // parts, (part + 1) * rows // parts), range(row))
    return ByteBox(range(rows), range(part * row // parts, (part + 1) * row // parts))
