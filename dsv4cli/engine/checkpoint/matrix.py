"""One matrix of a checkpoint in any layout and format: its rows as bytes and as values; numpy, no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.stored import Raw, StoredModel
from dsv4cli.engine.checkpoint.values import PLAIN, Form, Values, decode, form_of, scale_rows
from dsv4cli.engine.config.formats import Role

# just below the largest size that glibc learns from, 32 MiB
LARGE_BLOCK = 31 * 2**20


@dataclass(frozen=True)
class MatrixRows:
    """Rows of a matrix. raw: the stored arrays by role. values: float32 or int64 [rows, columns]."""

    rows: slice
    form: Form
    raw: Mapping[Role, Raw]
    values: Values


@dataclass(frozen=True)
class MatrixReader:
    """A reader of a weight with its scales, or of another tensor; a vector counts as one row."""

    model: StoredModel
    parts: Mapping[Role, TensorSpec]

    @property
    def form(self) -> Form:
        """The storage format for `values.decode`, or i64."""
        return form_of(self.parts["weight"])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and unpacked columns."""
        weight = self.parts["weight"]
        rows = weight.shape[0] if len(weight.shape) > 1 else 1
        return rows, weight.columns or prod(weight.shape) // max(rows, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8 for spec in self.parts.values())

    def read(self, rows: slice) -> dict[Role, Raw]:
        """Return the stored rows of every part; for fp8 they start at a multiple of 128.

        Raises as `StoredModel.read`.
        """
        raw = {}
        for role, spec in self.parts.items():
            if len(spec.shape) > 1:
                raw[role] = self.model.read(spec, scale_rows(self.form, rows) if spec.is_scale else rows)
            else:
                whole = self.model.read(spec)
                raw[role] = whole if spec.is_scale else whole.reshape(1, -1)
        return raw

    def piece(self, rows: slice) -> MatrixRows:
        """Return the rows with their values. Raises as `read`."""
        raw = self.read(rows)
        return MatrixRows(rows, self.form, raw, raw["weight"] if self.form == "i64" else decode(self.form, raw))


def stored_matrices(model: StoredModel) -> Iterator[tuple[str, MatrixReader]]:
    """Yield every matrix of the table whose parts are all in the files, by its official name.

    A matrix stored in BF16 or F32, while the others are quantized, is read as stored.
    """
    stored = model.identity.checkpoint.tensors
    for name, parts in model.matrices().items():
        found = MatrixReader(model, _as_stored(model, parts))
        if all(
            location.name in stored
            for spec in found.parts.values()
            for location in model.identity.naming.locations(spec)
        ):
            yield name, found


def keep_freed_memory() -> None:
    """Make the C library reuse the memory of one chunk for the next; only glibc needs this.

    glibc returns large blocks to the system, so that half of the time goes into page faults, until a large block has
    been
    freed once (mallopt(3), M_MMAP_THRESHOLD).
    """
    np.empty(LARGE_BLOCK, np.uint8)


def _as_stored(model: StoredModel, parts: Mapping[Role, TensorSpec]) -> Mapping[Role, TensorSpec]:
    weight = parts["weight"]
    info = model.identity.checkpoint.tensors.get(model.identity.naming.locations(weight)[0].name)
    if info is None or info.dtype == weight.dtype or info.dtype not in PLAIN or weight.dtype == "I64":
        return parts
    shape = (*weight.shape[:-1], weight.columns or weight.shape[-1])
    return {"weight": replace(weight, dtype=info.dtype, shape=shape, form=PLAIN[info.dtype])}
