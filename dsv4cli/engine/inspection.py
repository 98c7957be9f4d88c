"""One look at a model without reading a weight: what it is, whether it would load, how large it is; no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from dsv4cli.engine.coverage import Coverage, check_coverage
from dsv4cli.engine.identify import FolderIdentity, Identity
from dsv4cli.engine.layout import expected_tensors
from dsv4cli.engine.sizes import Sizes, measure
from dsv4cli.engine.source import FolderSource, RandomSource
from dsv4cli.errors import CheckpointError, Dsv4Error, UnsupportedCheckpoint

SCHEMA = "dsv4.inspect/1"


@dataclass(frozen=True)
class Inspection:
    """What is known about a model. `problem`: why it would not load. A model of random weights has no coverage.

    identity and sizes are None when the folder does not even tell which model it holds.
    """

    source: FolderSource | RandomSource
    identity: Identity | None = None
    sizes: Sizes | None = None
    coverage: Coverage | None = None
    files: int = 0
    problem: Dsv4Error | None = None


def inspect_model(source: FolderSource | RandomSource) -> Inspection:
    """Identifies the model and compares its headers with the table; a problem is part of the answer, not an error."""
    try:
        found = source.identity
    except (CheckpointError, UnsupportedCheckpoint) as error:
        return Inspection(source, problem=error)
    specs = expected_tensors(found.config, found.formats)
    sizes = measure(found.config, specs.values())
    if not isinstance(found, FolderIdentity):
        return Inspection(source, found, sizes)
    coverage = check_coverage(found.checkpoint, specs)
    return Inspection(source, found, sizes, coverage, len(found.checkpoint.files), coverage.problem())


def schedule(ratios: tuple[int, ...]) -> str:
    """The ratios of the layers with repeated pairs counted, as in `0 0 (4 128)×20 4`."""
    words, at = [], 0
    while at < len(ratios):
        pair, repeats, equal = ratios[at : at + 2], 1, 1
        while ratios[at + equal : at + equal + 1] == ratios[at : at + 1]:
            equal += 1
        while ratios[at + 2 * repeats : at + 2 * repeats + 2] == pair:
            repeats += 1
        if equal > 2:
            words.append(f"{ratios[at]}×{equal}")
            at += equal
        elif equal == 1 and repeats > 1:
            words.append(f"({pair[0]} {pair[1]})×{repeats}")
            at += 2 * repeats
        else:
            words += [str(ratios[at])] * equal
            at += equal
    return " ".join(words)


def document(result: Inspection) -> dict[str, Any]:
    """The inspection as one JSON document of schema SCHEMA; sections that are not known are null."""
    source, problem = result.source, result.problem
    return {
        "schema": SCHEMA,
        "model": source.name,
        "folder": str(source.folder) if isinstance(source, FolderSource) else None,
        "loads": problem is None,
        "problem": problem and {"kind": _kind(problem), "message": problem.message, "remedy": problem.remedy},
        "identity": result.identity and _identity(result.identity),
        "coverage": result.coverage and {**asdict(result.coverage), "complete": result.coverage.complete},
        "sizes": result.sizes and asdict(result.sizes),
    }


def _kind(problem: Dsv4Error) -> str:
    return "unsupported" if isinstance(problem, UnsupportedCheckpoint) else "damaged"


def _identity(identity: Identity) -> dict[str, Any]:
    config = identity.config
    return {
        "size": identity.size,
        "release": identity.release,
        "drafter": config.drafter,
        "draft_stages": config.draft_stages,
        "layers": list(config.layer_ratios),
        "schedule": schedule(config.layer_ratios),
        "formats": {**asdict(identity.formats), "wo_a": identity.formats.output},
        "config": asdict(config),
    }
