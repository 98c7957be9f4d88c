"""Comparison of a folder's tensors with the model's: missing, unexpected and mismatched tensors; no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.headers import INDEX, Checkpoint
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.remedies import download_again, look
from dsv4cli.errors import CheckpointError


@dataclass(frozen=True)
class Difference:
    """A tensor with a wrong dtype or shape; `found` and `expected` are that dtype or shape."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True)
class Coverage:
    """The problems with a checkpoint's tensors; it loads if every list is empty.

    Attributes:
        missing, unexpected: tensor names.
        unpaired_scales: scales without their weight, and missing scales of existing weights (not in `missing`).
        index_problems: disagreements between index and files about existing tensors.
        repair: the file to download again for the first problem, '' if unknown.
    """

    folder: str
    expected: int
    missing: tuple[str, ...]
    unpaired_scales: tuple[str, ...]
    misshapen: tuple[Difference, ...]
    mistyped: tuple[Difference, ...]
    unexpected: tuple[str, ...]
    index_problems: tuple[str, ...]
    repair: str

    @property
    def complete(self) -> bool:
        """Whether the checkpoint has exactly the tensors of the model."""
        return not self.count

    @property
    def count(self) -> int:
        """Number of problems."""
        lists = (self.missing, self.unpaired_scales, self.misshapen, self.mistyped, self.unexpected)
        return sum(map(len, lists)) + len(self.index_problems)

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for every problem."""
        yield from (f"tensor {name} is missing" for name in self.missing)
        weights = set(self.missing)
        for name in self.unpaired_scales:
            is_orphan = _weight(name) in weights
            yield f"{name} is there without its weight" if is_orphan else f"{name} is missing, but its weight is there"
        yield from (f"{item.name} has shape {item.found} instead of {item.expected}" for item in self.misshapen)
        yield from (f"{item.name} is {item.found} instead of {item.expected}" for item in self.mistyped)
        yield from (f"{name} is not a tensor of this model" for name in self.unexpected)
        yield from self.index_problems

    def problem(self) -> CheckpointError | None:
        """Return the first problem, with the number of others and a remedy; None if the checkpoint loads."""
        if self.complete:
            return None
        others = {0: "", 1: " (and 1 more problem)"}.get(self.count - 1, f" (and {self.count - 1:,} more problems)")
        remedy = download_again(Path(self.folder), self.repair)
        return CheckpointError(f"{self.folder}: {next(self.sentences())}{others}", remedy)

    def raise_if_incomplete(self) -> None:
        """Raise the first problem, if any."""
        problem = self.problem()
        if problem:
            remedy = f"{problem.remedy}; {look(self.folder)} shows all that is wrong"
            raise CheckpointError(problem.message, remedy)


def check_coverage(checkpoint: Checkpoint, specs: Mapping[str, TensorSpec]) -> Coverage:
    """Compare the headers with the model's tensor table (`expected_tensors`).

    Checks names, dtypes, shapes, pairs of weight and scale, and the index.
    """
    infos = checkpoint.tensors
    weights = {spec.matrix: name for name, spec in specs.items() if spec.columns and not spec.is_scale}
    of_scale = {name: weights[spec.matrix] for name, spec in specs.items() if spec.is_scale and spec.matrix in weights}
    unpaired = {name: None for name, weight in of_scale.items() if (name in infos) != (weight in infos)}
    known = [(info, specs[name]) for name, info in infos.items() if name in specs]
    mistyped = [Difference(info.name, info.dtype, spec.dtype) for info, spec in known if info.dtype != spec.dtype]
    misshapen = [
        Difference(info.name, str(list(info.shape)), str(list(spec.shape)))
        for info, spec in known
        if info.shape != spec.shape and info.dtype == spec.dtype
    ]
    missing = [name for name in specs if name not in infos and name not in unpaired]
    unexpected = [name for name in infos if name not in specs]
    # missing tensors are already reported above
    index = {name: text for name, text in checkpoint.index_problems.items() if name in infos or name not in specs}
    names = [*missing, *unpaired, *(item.name for item in misshapen + mistyped), *unexpected]
    return Coverage(
        folder=str(checkpoint.folder),
        expected=len(specs),
        missing=tuple(missing),
        unpaired_scales=tuple(unpaired),
        misshapen=tuple(misshapen),
        mistyped=tuple(mistyped),
        unexpected=tuple(unexpected),
        index_problems=tuple(index.values()),
        repair=next((_file_of(name, checkpoint) for name in names), INDEX if index else ""),
    )


def _weight(scale: str) -> str:
    return scale.rpartition(".")[0] + ".weight"


def _file_of(name: str, checkpoint: Checkpoint) -> str:
    info = checkpoint.tensors.get(name)
    return info.file.name if info else checkpoint.index.get(name, "")
