"""Survey of a checkpoint's values, in threads and a few rows at a time; numpy, no torch."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, Literal

from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.matrix import MatrixReader, stored_matrices
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.inspection.checks.findings import MeasuredMatrix, ValueFinding, compare, judge
from dsv4cli.engine.inspection.checks.measure import Measurement, sample_rows, whole_rows
from dsv4cli.engine.inspection.checks.statistics import Statistics
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError

Depth = Literal["sample", "full"]
ROWS: dict[Depth, Callable[[MatrixReader], Iterator[slice]]] = {"sample": sample_rows, "full": whole_rows}
# bytes between two reports of progress
STEP = 1 << 24


@dataclass(frozen=True)
class Family:
    """Statistics of all tensors of a family.

    exponents: the exponents of the power-of-two scales. largest_in: the tensor with the largest value.
    """

    name: str
    statistics: Statistics
    exponents: tuple[int, int] | None
    largest_in: str


@dataclass(frozen=True)
class ValueReport:
    """The result of a survey.

    tensors: number read, without scales. absent: number of missing tensors. nbytes: bytes read, of nbytes_all in the
    files. findings: errors first.
    """

    depth: Depth
    tensors: int
    absent: int
    nbytes: int
    nbytes_all: int
    seconds: float
    findings: tuple[ValueFinding, ...]
    families: tuple[Family, ...]

    @property
    def wrong(self) -> int:
        """Number of findings that report wrong values."""
        return sum(finding.severity == "wrong" for finding in self.findings)


def check_values(identity: FolderIdentity, depth: Depth, progress: Progress) -> ValueReport:
    """Read every tensor, or three samples of each, and judge the values; an unreadable tensor is a finding.

    progress: called with bytes read and total bytes. Missing tensors are skipped: `coverage` reports them.
    """
    start = time.monotonic()
    with open_stored(identity) as model:
        matrices = [matrix for _, matrix in stored_matrices(model)]
        absent = len(model.matrices()) - len(matrices)
        survey = _Survey(matrices, depth, identity.config.n_routed_experts, progress)
        found = survey.carry_out()
    findings = [*survey.unreadable, *(finding for item in found for finding in item.findings), *compare(found)]
    return ValueReport(
        depth=depth,
        tensors=len(found),
        absent=absent,
        nbytes=survey.done,
        nbytes_all=sum(matrix.nbytes for matrix in matrices),
        seconds=time.monotonic() - start,
        findings=tuple(sorted(findings, key=lambda finding: finding.severity != "wrong")),
        families=tuple(_families(found)),
    )


class _Survey:
    """The state that the threads share."""

    def __init__(self, matrices: list[MatrixReader], depth: Depth, experts: int, progress: Progress) -> None:
        self.rows, self.experts, self.progress = ROWS[depth], experts, progress
        self.order = sorted(range(len(matrices)), key=lambda number: _offset(matrices[number]))
        self.matrices = matrices
        self.total = sum(_share(matrix, self.rows) for matrix in matrices)
        self.unreadable: list[ValueFinding] = []
        self.done = self._reported = 0
        self._next = iter(self.order)
        self._lock = Lock()

    def carry_out(self) -> list[MeasuredMatrix]:
        """Measure every matrix; the results are in the order of the table."""
        workers = os.cpu_count() or 1
        pool = ThreadPoolExecutor(workers)
        try:
            parts = [pool.submit(self._work) for _ in range(workers)]
            found = {number: item for part in parts for number, item in part.result()}
        finally:
            # whatever ends this thread ends the others at their next matrix
            self._next = iter(())
            pool.shutdown()
        self.progress(self.total, self.total)
        return [found[number] for number in sorted(found)]

    def _work(self) -> list[tuple[int, MeasuredMatrix]]:
        found = []
        while (number := self._take()) is not None:
            matrix = self.matrices[number]
            measurement = Measurement(matrix, self.experts)
            try:
                for rows in self.rows(matrix):
                    raw = matrix.read(rows)
                    nbytes = sum(array.nbytes for array in raw.values())
                    measurement.take(rows, raw)
                    self._report(nbytes)
            except CheckpointError as error:
                name = measurement.weight.name
                self.unreadable.append(ValueFinding(name, "wrong", "unreadable", error.message))
            else:
                found.append((number, judge(measurement)))
        return found

    def _take(self) -> int | None:
        with self._lock:
            return next(self._next, None)

    def _report(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self.done - self._reported >= STEP:
                self._reported = self.done
                self.progress(self.done, self.total)


def _offset(matrix: MatrixReader) -> tuple[str, int]:
    """Return the file and offset of the weight, as a sort key."""
    model = matrix.model
    info = model.identity.checkpoint.tensors[model.identity.naming.locations(matrix.parts["weight"])[0].name]
    return str(info.file), info.begin


def _share(matrix: MatrixReader, rows: Callable[[MatrixReader], Iterator[slice]]) -> int:
    """Return the bytes of the rows to read."""
    count = sum(part.stop - part.start for part in rows(matrix))
    return matrix.nbytes * count // max(matrix.shape[0], 1)


def _families(found: list[MeasuredMatrix]) -> Iterator[Family]:
    groups: dict[str, list[MeasuredMatrix]] = {}
    for item in found:
        groups.setdefault(item.family, []).append(item)
    for name, items in groups.items():
        statistics = Statistics()
        for item in items:
            statistics.add(item.statistics)
        spans = [item.exponents for item in items if item.exponents]
        exponents = (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None
        largest = max(items, key=lambda item: item.statistics.largest)
        yield Family(name, statistics, exponents, largest.name)


def value_section(report: ValueReport) -> dict[str, Any]:
    """Return the section `values` of the document."""
    return {
        "depth": report.depth,
        "sound": not report.wrong,
        "tensors": report.tensors,
        "absent": report.absent,
        "nbytes": report.nbytes,
        "nbytes_all": report.nbytes_all,
        "seconds": round(report.seconds, 3),
        "counts": dict(Counter(finding.severity for finding in report.findings)),
        "findings": [asdict(finding) for finding in report.findings],
        "families": [_family_section(family) for family in report.families],
    }


def _family_section(family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        **statistics_section(family.statistics),
        "scale_exponents": family.exponents and list(family.exponents),
        "largest_in": family.largest_in,
    }


def statistics_section(statistics: Statistics) -> dict[str, Any]:
    """Return statistics for JSON, without infinities if there is no finite value."""
    some = statistics.finite and statistics.low <= statistics.high
    return {
        "count": statistics.count,
        "not_finite": statistics.not_finite,
        "zeros": statistics.zeros,
        "mean_magnitude": statistics.mean_magnitude,
        "rms": statistics.rms,
        "min": statistics.low if some else None,
        "max": statistics.high if some else None,
    }
