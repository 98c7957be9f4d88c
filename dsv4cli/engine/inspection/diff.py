"""Comparison of two checkpoints of any layout and format, matrix by matrix; numpy, no torch."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.compare import Comparison, FirstDifference, row_chunks
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.matrix import MatrixReader, keep_freed_memory, stored_matrices
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.checkpoint.stored import Raw
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.inspection.patterns import explain
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError

SCHEMA = "dsv4.diff/1"
# identical: the same bytes. equal: the same values in other bytes. zero_signs: the same except for the sign of zeros.
# unreadable: the values of one side cannot be read, or the shapes differ
MatrixVerdict = Literal["identical", "equal", "zero_signs", "different", "unreadable"]
# matrices that a converter may mix up
TWINS = {".w1": ".w3", ".w3": ".w1"}


@dataclass(frozen=True)
class MatrixDiff:
    """The difference of one matrix between A (the reference) and B.

    Attributes:
        forms: storage formats in A and B.
        relative_error: L2 norm of the difference divided by that of A.
        largest: largest absolute error.
        first: the first value that differs.
        pattern: the known mistake that explains the difference, '' for none.
        problem: why the matrix cannot be compared.
    """

    name: str
    forms: tuple[str, str]
    verdict: MatrixVerdict
    values: int = 0
    different: int = 0
    zero_signs: int = 0
    relative_error: float = 0.0
    largest: float = 0.0
    first: FirstDifference | None = None
    pattern: str = ""
    problem: str = ""


@dataclass(frozen=True)
class FieldDiff:
    """A configuration field with different values in A and B."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Diff:
    """The result of comparing two models.

    Attributes:
        matrices: in the order of the tensor table.
        only_a, only_b: matrices that only one of the checkpoints has.
        nbytes: total bytes of the compared matrices in A and B.
    """

    a: FolderIdentity
    b: FolderIdentity
    fields: tuple[FieldDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    matrices: tuple[MatrixDiff, ...]
    nbytes: int

    @property
    def same(self) -> bool:
        """Whether both models are the same: no tensor is missing, and all fields and values are equal (-0 equals 0)."""
        return not (self.fields or self.only_a or self.only_b or self.worst)

    @property
    def worst(self) -> list[MatrixDiff]:
        """The matrices that cannot be compared, then those that differ, largest error first."""
        found = [matrix for matrix in self.matrices if matrix.verdict in ("different", "unreadable")]
        return sorted(found, key=lambda matrix: (matrix.verdict == "different", -matrix.relative_error))

    @property
    def counts(self) -> dict[MatrixVerdict, int]:
        """Number of matrices per verdict."""
        census = Counter(matrix.verdict for matrix in self.matrices)
        order: tuple[MatrixVerdict, ...] = ("identical", "equal", "zero_signs", "different", "unreadable")
        return {verdict: census[verdict] for verdict in order}


def diff_models(
    a: FolderIdentity, b: FolderIdentity, progress: Progress, wanted: Callable[[str], bool] = lambda name: True
) -> Diff:
    """Compare two checkpoints matrix by matrix under their official names, in threads, a few rows at a time.

    progress: called with bytes read and total bytes. wanted: filter on matrix names. A matrix that cannot be read does
    not raise: it is reported in the result.
    """
    keep_freed_memory()
    with open_stored(a) as model_a, open_stored(b) as model_b:
        ours, theirs = (
            {name: matrix for name, matrix in stored_matrices(model) if wanted(name)} for model in (model_a, model_b)
        )
        pairs = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
        nbytes = sum(matrix.nbytes for pair in pairs.values() for matrix in pair)
        found = _compare_all(pairs, lambda done: progress(done, nbytes))
    return Diff(
        a=a,
        b=b,
        fields=tuple(_field_diffs(a.config, b.config)),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
        matrices=tuple(found[name] for name in pairs),
        nbytes=nbytes,
    )


def _compare_all(
    pairs: dict[str, tuple[MatrixReader, MatrixReader]], progress: Callable[[int], None]
) -> dict[str, MatrixDiff]:
    found: dict[str, MatrixDiff] = {}
    done = 0
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        work: dict[Future[MatrixDiff], str] = {
            pool.submit(diff_matrices, name, *pair, _twin(name, pairs)): name for name, pair in pairs.items()
        }
        for future in as_completed(work):
            name = work[future]
            found[name] = future.result()
            done += sum(matrix.nbytes for matrix in pairs[name])
            progress(done)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _twin(name: str, pairs: dict[str, tuple[MatrixReader, MatrixReader]]) -> MatrixReader | None:
    pair = pairs.get(name[:-3] + TWINS[name[-3:]]) if name[-3:] in TWINS else None
    return pair and pair[0]


def diff_matrices(name: str, a: MatrixReader, b: MatrixReader, twin: MatrixReader | None = None) -> MatrixDiff:
    """Compare one matrix of two checkpoints.

    twin: the matrix of A that B may have stored under this name by mistake.
    """
    forms = (a.form, b.form)
    if a.shape != b.shape:
        return MatrixDiff(name, forms, "unreadable", problem=f"the shape is {_shape(a)} in A, {_shape(b)} in B")
    try:
        if a.form == b.form and all(_same_bytes(a, b, rows) for rows in row_chunks(*a.shape)):
            return MatrixDiff(name, forms, "identical", a.shape[0] * a.shape[1])
        found = compare_matrices(a, b)
        pattern = explain(a, b, found.first.row, twin) if found.first else ""
    except CheckpointError as error:
        return MatrixDiff(name, forms, "unreadable", problem=error.message)
    return MatrixDiff(
        name=name,
        forms=forms,
        verdict="equal" if found.exact else "zero_signs" if found.equal else "different",
        values=found.values,
        different=found.different,
        zero_signs=found.zero_signs,
        relative_error=found.relative_error,
        largest=found.largest,
        first=found.first,
        pattern=pattern,
    )


def _shape(matrix: MatrixReader) -> list[int]:
    return list(matrix.shape[-len(matrix.parts["weight"].shape) :])


def compare_matrices(a: MatrixReader, b: MatrixReader) -> Comparison:
    """Compare all values of two matrices of one shape, a few rows at a time; A is the reference."""
    found = Comparison()
    for rows in row_chunks(*a.shape):
        found.add(a.piece(rows).values, b.piece(rows).values, rows.start)
    return found


def _same_bytes(a: MatrixReader, b: MatrixReader, rows: slice) -> bool:
    ours, theirs = a.read(rows), b.read(rows)
    return all(np.array_equal(_bytes(ours[role]), _bytes(theirs[role])) for role in ours)


def _bytes(array: Raw) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _field_diffs(a: ModelConfig, b: ModelConfig) -> Iterator[FieldDiff]:
    # a checkpoint that does not tell its release does not contradict one that does
    ours, theirs = (asdict(replace(one, release=one.release or other.release)) for one, other in ((a, b), (b, a)))
    yield from (FieldDiff(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name])


def diff_document(found: Diff) -> dict[str, Any]:
    """Return the comparison as a JSON document of schema SCHEMA; non-finite numbers become strings."""
    return {
        "schema": SCHEMA,
        "same": found.same,
        **{
            side: {"folder": str(identity.checkpoint.folder), "layout": identity.layout}
            for side, identity in (("a", found.a), ("b", found.b))
        },
        "config": [asdict(field) for field in found.fields],
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "counts": found.counts,
        "nbytes": found.nbytes,
        "worst": [_numbers(asdict(matrix)) for matrix in found.worst],
        "zero_signs": {matrix.name: matrix.zero_signs for matrix in found.matrices if matrix.zero_signs},
    }


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by strings, because JSON has no NaN and no infinity."""
    return {
        key: _numbers(value)
        if isinstance(value, dict)
        else str(value)
        if isinstance(value, float) and not isfinite(value)
        else value
        for key, value in values.items()
    }
