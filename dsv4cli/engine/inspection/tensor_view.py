"""One tensor of a checkpoint: its location, storage format and value statistics; numpy, no torch."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS, Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.matrix import MatrixReader, stored_matrices
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.checkpoint.remedies import look
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.inspection.checks.findings import MeasuredMatrix, ValueFinding, judge
from dsv4cli.engine.inspection.checks.measure import Measurement, whole_rows
from dsv4cli.engine.inspection.checks.statistics import Statistics, of_values
from dsv4cli.engine.inspection.checks.survey import statistics_section
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import UsageError

# an odd number: zero is in the middle of one
BINS = 17
# a histogram reaches this many times the RMS to both sides
REACH = 4.0
FIRST_VALUES = 8
# the number of a layer or an expert
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class StoredPart:
    """Bytes `begin` to `end` of a file.

    role: role of the tensor in the matrix. note: where the matrix is in a sharded or stacked tensor.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    note: str = ""


@dataclass(frozen=True)
class MatrixValues:
    """Statistics of a matrix.

    Attributes:
        exponents: count of each exponent among its power-of-two scales.
        first: first values of the first row.
        histogram: [low, high, count] of equal bins; the outer bins include the values beyond them.
    """

    statistics: Statistics
    exponents: dict[int, int]
    histogram: tuple[tuple[float, float, int], ...]
    first: tuple[float, ...]
    findings: tuple[ValueFinding, ...]


@dataclass(frozen=True)
class TensorView:
    """A tensor with its scales.

    Attributes:
        shape: shape of its values.
        holds: names of the table's tensors that a stacked tensor contains.
        family: '' if the table has no such tensor.
        values: None if the files are not local or the tensor contains several matrices.
    """

    name: str
    family: str
    form: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    holds: tuple[str, ...] = ()
    values: MatrixValues | None = None


def view_tensor(identity: FolderIdentity, name: str, progress: Progress | None) -> TensorView:
    """Return the matrix that `name` belongs to: its official name, that of its weight or scale, or a stored name.

    progress: called with bytes read and total bytes; None reads headers only. Raises UsageError for an unknown name,
    with
    the most similar names, and CheckpointError for what cannot be read.
    """
    checkpoint = identity.checkpoint
    with open_stored(identity) as model:
        owners = _owners(identity, model.specs, name)
        if not owners or len({spec.matrix for spec in owners}) > 1:
            if name not in checkpoint.tensors:
                matrices = {spec.matrix for spec in model.specs.values()}
                raise _not_there(name, checkpoint, matrices.union(checkpoint.tensors, model.specs))
            return _header_only(checkpoint.tensors[name], owners)
        matrix = dict(stored_matrices(model)).get(owners[0].matrix)
        if matrix is None:
            lost = next(part for part in _stored_names(identity, model, owners[0]) if part not in checkpoint.tensors)
            raise UsageError(
                f"{checkpoint.folder} lacks {lost}", f"{look(checkpoint.folder)} shows all that is missing"
            )
        weight = matrix.parts["weight"]
        return TensorView(
            name=weight.name,
            family=weight.family,
            form=matrix.form,
            shape=(*weight.shape[:-1], weight.columns or weight.shape[-1]),
            parts=tuple(_parts(identity, matrix)),
            values=progress and _look(matrix, identity.config.n_routed_experts, progress),
        )


def view_header(checkpoint: Checkpoint, name: str) -> TensorView:
    """Return a tensor of files without a configuration. Raises UsageError for an unknown name."""
    if name not in checkpoint.tensors:
        raise _not_there(name, checkpoint, checkpoint.tensors.keys())
    return _header_only(checkpoint.tensors[name], [])


def _owners(identity: FolderIdentity, specs: Mapping[str, TensorSpec], name: str) -> list[TensorSpec]:
    """Return the table's tensors for a name: one by its official name, or all that are stored under it."""
    for known in (name, f"{name}.weight"):
        if known in specs:
            return [specs[known]]
    if name not in identity.checkpoint.tensors:
        return []
    return [
        spec for spec in specs.values() if any(location.name == name for location in identity.naming.locations(spec))
    ]


def _stored_names(identity: FolderIdentity, model: StoredModel, spec: TensorSpec) -> Iterator[str]:
    """Yield the names under which the parts of a matrix should be stored."""
    for part in model.matrices()[spec.matrix].values():
        yield from (location.name for location in identity.naming.locations(part))


def _header_only(info: TensorInfo, owners: Collection[TensorSpec]) -> TensorView:
    part = StoredPart(info.name, "weight", info.dtype, info.shape, info.file, info.begin, info.end)
    family = next((spec.family for spec in owners), "")
    return TensorView(info.name, family, info.dtype, info.shape, (part,), tuple(spec.name for spec in owners))


def _parts(identity: FolderIdentity, matrix: MatrixReader) -> Iterator[StoredPart]:
    for role, spec in matrix.parts.items():
        for location in identity.naming.locations(spec):
            info = identity.checkpoint.tensors[location.name]
            begin, end, note = _extent(info, location, spec)
            yield StoredPart(info.name, role, info.dtype, info.shape, info.file, begin, end, note)


def _extent(info: TensorInfo, location: Location, spec: TensorSpec) -> tuple[int, int, str]:
    if location.cut:
        return (
            info.begin,
            info.end,
            f"part {location.cut.part + 1} of {location.cut.parts} along dimension {location.cut.dim}",
        )
    nbytes = stored_bytes(spec)
    if info.nbytes == nbytes:
        return info.begin, info.end, ""
    begin = info.begin + location.begin * DTYPE_BITS[location.dtype] // 8
    return begin, begin + nbytes, f"inside {list(info.shape)}"


def _look(matrix: MatrixReader, experts: int, progress: Progress) -> MatrixValues:
    """Read a matrix twice: for the statistics, then for the histogram with bounds from the statistics."""
    measurement = Measurement(matrix, experts)
    table, total, done = Statistics(), 2 * matrix.nbytes, 0
    for rows in whole_rows(matrix):
        raw = matrix.read(rows)
        done += sum(array.nbytes for array in raw.values())
        if matrix.form == "i64":
            table.add(of_values(raw["weight"].astype(np.float32)))
        measurement.take(rows, raw)
        progress(done, total)
    measured = judge(measurement)
    statistics = table if matrix.form == "i64" else measured.statistics
    edges = _edges(statistics, whole=matrix.form == "i64")
    counts, first = np.zeros(len(edges) - 1, np.int64), ()
    for rows in whole_rows(matrix):
        values = matrix.piece(rows).values.reshape(-1)
        first = first or tuple(values[:FIRST_VALUES].tolist())
        finite = values[np.isfinite(values)]
        counts += np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0]
        done += matrix.nbytes * (rows.stop - rows.start) // matrix.shape[0]
        progress(done, total)
    bins = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return MatrixValues(statistics, _exponents(measurement, measured), tuple(bins), first, measured.findings)


def _edges(statistics: Statistics, *, whole: bool) -> NDArray[np.float64]:
    """Return the bin edges: the range of the values, without tails that have almost no values."""
    if not statistics.finite:
        return np.array([0.0, 1.0])
    low, high = statistics.low, statistics.high
    if whole:
        return np.linspace(low - 0.5, high + 0.5, int(min(BINS, high - low + 1)) + 1)
    reach = REACH * statistics.rms
    low, high = max(low, -reach), min(high, reach)
    return np.linspace(low, high, BINS + 1) if low < high else np.array([low, low + abs(low) + 1.0])


def _exponents(measurement: Measurement, measured: MeasuredMatrix) -> dict[int, int]:
    if measured.exponents is None:
        return {}
    low, high = measured.exponents
    return {exponent: int(measurement.scale[exponent + 127]) for exponent in range(low, high + 1)}


def _not_there(name: str, checkpoint: Checkpoint, names: Collection[str]) -> UsageError:
    near = nearest(name, names)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"{look(checkpoint.folder, '--tree')} lists the names"
    return UsageError(f"{checkpoint.folder} has no tensor {name!r}", remedy)


def nearest(name: str, names: Collection[str], count: int = 2) -> list[str]:
    """Return the most similar names, ranked by the tensor's own name, then its layer and expert."""
    kinds: dict[str, list[str]] = {}
    for other in names:
        kinds.setdefault(NUMBER.sub("#", other), []).append(other)
    wanted = [int(number) for number in NUMBER.findall(name)]

    def distance(other: str) -> list[int]:
        return [abs(int(number) - mine) for number, mine in zip(NUMBER.findall(other), wanted, strict=False)]

    close = get_close_matches(NUMBER.sub("#", name), kinds, count)
    return [min(kinds[kind], key=distance) for kind in close]


def tensor_section(view: TensorView) -> dict[str, Any]:
    """Return the section `tensor` of the document."""
    values = view.values
    return {
        "name": view.name,
        "family": view.family or None,
        "form": view.form,
        "shape": list(view.shape),
        "parts": [asdict(part) | {"file": str(part.file), "shape": list(part.shape)} for part in view.parts],
        "holds": list(view.holds),
        "values": values
        and {
            "statistics": statistics_section(values.statistics),
            "scale_exponents": {str(exponent): count for exponent, count in values.exponents.items()},
            "histogram": [list(step) for step in values.histogram],
            "first": [value if np.isfinite(value) else str(value) for value in values.first],
            "findings": [asdict(finding) for finding in values.findings],
        },
    }
