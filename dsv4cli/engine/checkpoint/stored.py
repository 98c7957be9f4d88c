"""Reads of the table's tensors from a folder in any layout, whole or by rows, as stored; numpy, no torch."""

from collections.abc import Iterator
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.files import Files
from dsv4cli.engine.checkpoint.headers import DTYPE_BITS, TensorInfo
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.checkpoint.remedies import look
from dsv4cli.engine.config.formats import Role
from dsv4cli.errors import CheckpointError

# dtype name in a header -> how its bytes are held; what numpy has no type for stays as bytes or bit patterns
NUMPY_DTYPES = {"BF16": np.uint16, "F32": np.float32, "I64": np.int64}
Raw = NDArray[Any]


class StoredModel:
    """The tensors of a checkpoint under their official names; reads are thread-safe."""

    def __init__(self, identity: FolderIdentity) -> None:
        self.identity = identity
        self.specs = identity.specs
        self._files = Files()

    def __enter__(self) -> "StoredModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def matrices(self) -> dict[str, dict[Role, TensorSpec]]:
        """Return the tensor table by matrix: each weight with its scales."""
        return matrices(self.specs.values())

    def read(self, spec: TensorSpec, rows: slice = slice(None), copy: int = 0) -> Raw:
        """Return rows of a tensor in its stored format.

        Args:
            spec: the tensor.
            rows: slice without a step along the first dimension.
            copy: which replica to read of a tensor that several ranks store whole.

        Returns an array with the shape in the table: FP8, e8m0 and packed FP4 as uint8, BF16 as uint16 (the bit
        pattern),
        F32 as float32, I64 as int64. Raises CheckpointError for a tensor that is missing, truncated, or has another
        dtype or
        shape.
        """
        locations = self.identity.naming.locations(spec)
        cut = locations[0].cut
        if cut is None:
            return self._rows(spec, locations[copy], rows)
        if cut.dim:
            return np.concatenate([self._rows(spec, location, rows) for location in locations], axis=cut.dim)
        return np.concatenate(
            [self._rows(spec, location, part) for location, part in _parts(locations, spec.shape[0], rows)]
        )

    def _rows(self, spec: TensorSpec, location: Location, rows: slice) -> Raw:
        info = self._info(location)
        shape = location.shape if location.cut else spec.shape
        if location.cut and location.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        start, stop, _ = rows.indices(shape[0]) if shape else (0, 1, 1)
        row = prod(shape[1:])
        kind = np.dtype(NUMPY_DTYPES.get(location.dtype, np.uint8))
        wanted = np.empty((stop - start, *shape[1:]) if shape else (), kind)
        begin = location.begin * DTYPE_BITS[location.dtype] // 8 + start * row * kind.itemsize
        self._files.read(info, begin, wanted.reshape(-1).view(np.uint8).data)
        if location.reciprocal:
            with np.errstate(divide="ignore"):  # invalid scales (0, NaN) stay invalid
                np.divide(1, wanted, out=wanted)
        return wanted

    def _info(self, location: Location) -> TensorInfo:
        info = self.identity.checkpoint.tensors.get(location.name)
        folder = self.identity.checkpoint.folder
        if info is None:
            raise CheckpointError(f"{folder}: tensor {location.name} is missing", f"{look(folder)} shows why")
        if (info.dtype, info.shape) != (location.dtype, location.shape):
            found, expected = f"{info.dtype} {list(info.shape)}", f"{location.dtype} {list(location.shape)}"
            raise CheckpointError(f"{folder}: {location.name} is {found} instead of {expected}")
        return info


def _parts(locations: tuple[Location, ...], count: int, rows: slice) -> Iterator[tuple[Location, slice]]:
    """Yield the locations along the first dimension, each with the requested rows relative to it, possibly none."""
    start, stop, _ = rows.indices(count)
    size = locations[0].shape[0]
    for part, location in enumerate(locations):
        low, high = (min(max(row - part * size, 0), size) for row in (start, stop))
        yield location, slice(low, high)
