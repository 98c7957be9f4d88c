"""Plan of a conversion: the exact bytes of its files, and the work in order. No torch."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.checkpoint.naming import Location, MpNaming, Naming, stored_table
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.config.formats import STORAGE, Role
from dsv4cli.kernels.formats import FP8_BLOCK

# output bytes between two lines of the journal, synced while the next batch is written: the most that an interruption
# loses, and the most that the end of a file waits for
BATCH = 1 << 28
# the order of the work in a file: a journal with another order cannot be continued
ORDER = "by offset, 256 MiB"


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored part of a matrix.

    Attributes:
        offset: file offset of its first byte.
        rows_each: number of the weight's rows that one of its rows covers.
    """

    role: Role
    location: Location
    offset: int
    rows_each: int


@dataclass(frozen=True)
class Item:
    """A matrix with its scales, or the part of it that one file holds.

    Attributes:
        rows: begin and end of the weight's rows.
        slots: where the parts are stored, the weight's slots first.
        nbytes: bytes written.
        encoding: GGUF tensor type in whose blocks the matrix is written, '' for none.
    """

    matrix: str
    rows: tuple[int, int]
    slots: tuple[Slot, ...]
    nbytes: int
    encoding: str = ""


@dataclass(frozen=True)
class FilePlan:
    """One output file.

    Attributes:
        keys: names of its tensors in the file.
        batches: its work, in order: the items sorted by the offsets of their weights.
        gaps: begin and end of the zeros between tensors.
    """

    name: str
    header: bytes
    nbytes: int
    keys: tuple[str, ...]
    batches: tuple[tuple[Item, ...], ...]
    gaps: tuple[tuple[int, int], ...] = ()


def plan_files(specs: Mapping[str, TensorSpec], naming: Naming, max_file: int) -> tuple[FilePlan, ...]:
    """Return the files that store the tensors of a table under a naming.

    Files for ranks are divided as the official convert.py divides them. Others have at most max_file bytes each, but a
    tensor is never split and a matrix stays with its scales.
    """
    parts = matrices(specs.values())
    stored = stored_table(naming, specs.values())
    owners: dict[str, list[str]] = {}
    for matrix, roles in parts.items():
        for spec in roles.values():
            for location in naming.locations(spec):
                owners.setdefault(location.name, []).append(matrix)
    groups = list(_by_rank(stored) if isinstance(naming, MpNaming) else _by_size(naming, parts, stored, max_file))
    found = []
    for number, (name, keys) in enumerate(groups, 1):
        file = name or f"model-{number:05}-of-{len(groups):05}.safetensors"
        here = {matrix: parts[matrix] for key in keys for matrix in owners[key]}
        found.append(_Writer(file, {key: stored[key] for key in keys}).plan(naming, here))
    return tuple(found)


def _by_rank(stored: Mapping[str, TensorSpec]) -> Iterator[tuple[str, list[str]]]:
    files: dict[str, list[str]] = {}
    for key in stored:
        files.setdefault(key.partition("/")[0], []).append(key)
    for stem in sorted(files, key=lambda stem: int(stem.removeprefix("model").partition("-")[0])):
        yield f"{stem}.safetensors", files[stem]


def _by_size(
    naming: Naming, parts: Mapping[str, Mapping[Role, TensorSpec]], stored: Mapping[str, TensorSpec], max_file: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of each file, in the order of the table. Names follow when the number of files is known."""
    keys: list[str] = []
    size, seen = 0, set[str]()
    for roles in parts.values():
        new = [
            location.name for spec in roles.values() for location in naming.locations(spec) if location.name not in seen
        ]
        nbytes = sum(stored_bytes(stored[key]) for key in new)
        if keys and size + nbytes > max_file:
            yield "", keys
            keys, size = [], 0
        keys += new
        size += nbytes
        seen.update(new)
    yield "", keys


class _Writer:
    """Lays out one safetensors file."""

    def __init__(self, name: str, stored: Mapping[str, TensorSpec]) -> None:
        # wide values first, so that every tensor begins at a multiple of its width
        ordered = sorted(stored, key=lambda key: -DTYPE_BITS[stored[key].dtype])
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self.name, self.offsets, position = name, dict[str, int](), 0
        for key in ordered:
            spec, self.offsets[key] = stored[key], position
            position += stored_bytes(spec)
            offsets = [self.offsets[key], position]
            entries[key.rpartition("/")[2]] = {
                "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets
            }  # fmt: skip
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text
        self.nbytes = len(self.header) + position
        self.keys = tuple(key.rpartition("/")[2] for key in ordered)

    def plan(self, naming: Naming, parts: Mapping[str, Mapping[Role, TensorSpec]]) -> FilePlan:
        items = (self._item(naming, matrix, roles) for matrix, roles in parts.items())
        # from the first byte of the file to the last, which is the order of its hash; but nvfp4 and mp have scales of
        # all matrices before the first weight: their hash begins when the last matrix is written
        ordered = sorted((item for item in items if item is not None), key=lambda item: item.slots[0].offset)
        return FilePlan(self.name, self.header, self.nbytes, self.keys, tuple(in_batches(ordered)))

    def _item(self, naming: Naming, matrix: str, roles: Mapping[Role, TensorSpec]) -> Item | None:
        slots, nbytes = [], 0
        for role, spec in roles.items():
            for location in naming.locations(spec):
                if location.name in self.offsets:
                    begin = (
                        len(self.header)
                        + self.offsets[location.name]
                        + location.begin * DTYPE_BITS[location.dtype] // 8
                    )
                    each = STORAGE[spec.form].rows if spec.form and spec.is_scale and spec.shape else 1
                    slots.append(Slot(role, location, begin, each))
                    shape = location.shape if location.cut else spec.shape
                    bits = DTYPE_BITS[location.dtype if location.cut else spec.dtype]
                    nbytes += prod(shape) * bits // 8
        if not slots:
            return None
        weight = roles["weight"]
        cut = slots[0].location.cut
        along = cut.of(weight.shape) if cut and cut.dim == 0 else slice(None)
        start, stop, _ = along.indices(weight.shape[0])
        return Item(matrix, (start, stop), tuple(slots), nbytes)


def in_batches(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield the work of a file in batches; the journal gets a line after each."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.nbytes
        if size >= BATCH:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def chunks(item: Item, size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the weight's rows for each step: about `size` bytes, cut at multiples of 128 rows."""
    start, stop = item.rows
    row_bytes = max(item.nbytes // max(stop - start, 1), 1)
    step = max(size // row_bytes // FP8_BLOCK, 1) * FP8_BLOCK
    low = start
    while low < stop:
        high = min(low - low % FP8_BLOCK + step, stop)
        yield low, high
        low = high
