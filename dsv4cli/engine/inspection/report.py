"""Inspection of a model without reading weights: its identity, whether it would load, its size; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsv4cli.engine.checkpoint.contents import Contents, add_up
from dsv4cli.engine.checkpoint.coverage import Coverage, check_coverage
from dsv4cli.engine.checkpoint.gguf.files import is_gguf
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.identify import FolderIdentity, Identity
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import OfficialNaming
from dsv4cli.engine.checkpoint.sizes import Sizes, measure
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.prompts import prompt_problems
from dsv4cli.engine.inspection.sources import FileSource, Inspectable, RemoteSource
from dsv4cli.errors import CheckpointError, Dsv4Error, UnsupportedCheckpoint, UsageError

SCHEMA = "dsv4.inspect/1"
# sections of the document that an option adds; null otherwise
SECTIONS = ("values", "tensor", "layer", "tree", "template", "verdict", "fit", "diff")
CONFIGS = ("config.json", "inference/config.json")
# maximum list entries or characters shown of a value in a GGUF file's metadata
LONGEST = 200


@dataclass(frozen=True)
class Inspection:
    """What is known about a model.

    Attributes:
        identity, sizes: None if the folder does not identify a model.
        coverage: tensors compared with the stored layout (for a file, only its own); None for random weights.
        contents: what a single file contains.
        problem: why the model would not load, or why a file is damaged.
        refused: whether the problem concerns the whole model, so that no list of tensors would show it.
        prompt_problems: why prompts would fail although the tensors load.
    """

    source: Inspectable
    identity: Identity | None = None
    sizes: Sizes | None = None
    coverage: Coverage | None = None
    contents: Contents | None = None
    files: int = 0
    problem: Dsv4Error | None = None
    refused: bool = False
    prompt_problems: tuple[str, ...] = ()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the checkpoint is complete, in a layout that other programs run and dsv4 does not."""
        return self.refused and self.coverage is not None and self.coverage.complete

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on a checkpoint that dsv4 can load."""
        return self.identity.notes if isinstance(self.identity, FolderIdentity) else ()


def inspect_model(source: Inspectable) -> Inspection:
    """Identify the model and compare its headers with the tensor table; a problem is part of the result.

    A layout that only `dsv4 convert` reads is described too. Raises HubError for a repository whose headers the hub
    does
    not serve.
    """
    if isinstance(source, FileSource):
        return _inspect_file(source)
    refusal: Dsv4Error | None = None
    if isinstance(source, RemoteSource):
        try:
            _ = source.headers
        except (CheckpointError, UnsupportedCheckpoint) as error:
            # a second question would ask the hub again
            return Inspection(source, problem=error, refused=True)
    try:
        found: Identity = source.identity
    except (CheckpointError, UnsupportedCheckpoint) as error:
        refusal = error
        assert not isinstance(source, RandomSource)
        try:
            found = source.recognised
        except (CheckpointError, UnsupportedCheckpoint) as deeper:
            # GGUF is refused before anything of it is read
            unread = isinstance(source, FolderSource) and is_gguf(source.folder)
            return Inspection(source, problem=deeper if unread else error, refused=True)
    if not isinstance(found, FolderIdentity):
        return Inspection(source, found, measure(found.config, expected_tensors(found.config, found.formats).values()))
    specs = found.specs
    # the types of GGUF are not those in which the table sees them, and codes may have another dtype
    as_stored = isinstance(found, GgufIdentity) or isinstance(found.naming, OfficialNaming)
    sizes = measure(found.config, (found.stored_table if as_stored else specs).values())
    try:
        coverage = check_coverage(found.checkpoint, found.stored_table)
    except UsageError as error:
        # files for a number of ranks that the configuration cannot be split across
        return Inspection(source, found, sizes, problem=refusal or error, refused=True)
    files = len(found.checkpoint.files)
    problem = refusal or coverage.problem()
    prompts = tuple(prompt_problems(source)) if problem is None and isinstance(source, FolderSource) else ()
    return Inspection(source, found, sizes, coverage, None, files, problem, refusal is not None, prompts)


def _inspect_file(source: FileSource) -> Inspection:
    """Inspect the header of a file, and compare its tensors with the model if a configuration is in the same folder."""
    try:
        infos = source.checkpoint.tensors
        has_config = any((source.file.parent / name).is_file() for name in CONFIGS)
        found = source.identity if has_config else None
        table = found.stored_table if found else {}
    except (CheckpointError, UnsupportedCheckpoint, UsageError) as error:
        return Inspection(source, problem=error, refused=True)
    contents = add_up(infos.values(), table)
    if found is None:
        return Inspection(source, contents=contents, files=1)
    coverage = check_coverage(found.checkpoint, dict(_present(table, infos)))
    problem = coverage.problem()
    return Inspection(source, found, None, coverage, contents, 1, problem)


def _present(table: Mapping[str, TensorSpec], names: Mapping[str, object]) -> list[tuple[str, TensorSpec]]:
    """Return the tensors of the table that a file contains.

    A weight or scale whose partner is in another file counts as a tensor of its own.
    """
    kept: list[tuple[str, TensorSpec]] = []
    for parts in matrices(table.values()).values():
        present = [spec for spec in parts.values() if spec.name in names]
        together = len(present) == len(parts)
        kept += [(spec.name, spec if together else replace(spec, columns=0, role="weight")) for spec in present]
    return kept


def schedule(ratios: tuple[int, ...]) -> str:
    """Return the compression ratios of the layers with repeated pairs counted, as in `0 0 (4 128)×20 4`."""
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


def document(result: Inspection, sections: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the inspection as a JSON document of schema SCHEMA; unknown or unrequested fields are null."""
    source, problem = result.source, result.problem
    return {
        "schema": SCHEMA,
        "model": source.name,
        "folder": str(source.folder) if isinstance(source, FolderSource) else None,
        "file": str(source.file) if isinstance(source, FileSource) else None,
        # a file is a part of a model
        "loads": None if isinstance(source, FileSource) else problem is None,
        "problem": problem and {"kind": _kind(problem), "message": problem.message, "remedy": problem.remedy},
        "notes": [*result.notes, *result.prompt_problems],
        "identity": result.identity and _identity(result.identity),
        "gguf": _gguf(result.identity) if isinstance(result.identity, GgufIdentity) else None,
        "coverage": result.coverage and {**asdict(result.coverage), "complete": result.coverage.complete},
        "sizes": result.sizes and asdict(result.sizes),
        "contents": result.contents and asdict(result.contents),
        **dict.fromkeys(SECTIONS),
        **(sections or {}),
    }


def _kind(problem: Dsv4Error) -> str:
    return "unsupported" if isinstance(problem, UnsupportedCheckpoint) else "damaged"


def _identity(identity: Identity) -> dict[str, Any]:
    config = identity.config
    return {
        "size": identity.size,
        "layout": identity.layout if isinstance(identity, FolderIdentity) else None,
        "release": identity.release,
        "release_known": config.release is not None,
        "drafter": config.drafter,
        "draft_stages": config.draft_stages,
        "layers": list(config.layer_ratios),
        "schedule": schedule(config.layer_ratios),
        "formats": _formats(identity.formats),
        "config": asdict(config),
    }


def _gguf(identity: GgufIdentity) -> dict[str, Any]:
    """Return GGUF metadata for the document: a long list as its length, a long text as its beginning."""

    def short(value: Any) -> Any:
        if isinstance(value, list) and len(value) > LONGEST:
            return {"length": len(value)}
        return f"{value[:LONGEST]}…" if isinstance(value, str) and len(value) > LONGEST else value

    files = [path.name for path in identity.checkpoint.files]
    return {"files": files, "metadata": {key: short(value) for key, value in identity.metadata.items()}}


def _formats(formats: Formats) -> dict[str, str]:
    return {**asdict(formats), "wo_a": formats.output, "draft_experts": formats.drafter}
