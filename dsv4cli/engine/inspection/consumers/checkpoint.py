"""The input of all consumer rules: a folder's identity, configuration, damage and files."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dsv4cli.engine.checkpoint.coverage import Coverage, Difference
from dsv4cli.engine.checkpoint.headers import INDEX
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.checkpoint.naming import MpNaming, TransformersNaming
from dsv4cli.engine.config.formats import is_quantised
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.system.regular_files import read_bytes
from dsv4cli.errors import CheckpointError

FLOATS = {"F16", "BF16", "F32"}
CONFIG, INFERENCE, TOKENIZER = "config.json", "inference/config.json", "tokenizer.json"


@dataclass(frozen=True)
class Finding:
    """The finding of a rule: a reason against loading, an open question, or a note.

    fix: what removes the reason, if that takes less than a conversion.
    """

    kind: Literal["no", "not known", "note"]
    text: str
    fix: str = ""


@dataclass(frozen=True)
class InspectedCheckpoint:
    """A folder as seen by the rules.

    Attributes:
        name: the path or repository that other programs are given.
        revision: the repository's revision, '' for the default.
        config: content of the root config.json, empty if there is none.
        inference: content of inference/config.json.
        files: paths relative to the folder.
        index_metadata: whether the index has the key that transformers reads; true without an index.
    """

    name: str
    identity: FolderIdentity
    coverage: Coverage
    config: Mapping[str, Any]
    inference: Mapping[str, Any]
    files: Collection[str]
    index_metadata: bool
    revision: str = ""

    @property
    def formats(self) -> Formats:
        """Storage formats of the matrices."""
        return self.identity.formats

    @property
    def quantised(self) -> bool:
        """Whether any matrix is quantized."""
        return any(map(is_quantised, (self.formats.linear, self.formats.output, self.formats.experts)))

    @cached_property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization_config, None if there is none."""
        values = self.config.get("quantization_config")
        return values if isinstance(values, Mapping) else None

    def quantization_says(self, key: str) -> Any:
        """Return a value of the quantization_config."""
        return (self.quantization or {}).get(key)

    @property
    def spares_layers(self) -> bool:
        """Whether the quantization_config lists matrices that are not quantized."""
        return any(self.quantization_says(key) for key in ("ignored_layers", "modules_to_not_convert"))

    @property
    def ranks(self) -> int:
        """Number of ranks that the files are sharded for, 0 for unsharded files."""
        naming = self.identity.naming
        return naming.ranks if isinstance(naming, MpNaming) else 0

    @property
    def has_transformers_names(self) -> bool:
        """Whether the tensors have transformers' names."""
        return isinstance(self.identity.naming, TransformersNaming)

    @cached_property
    def damage(self) -> list[str]:
        """Sentences on tensors of the main model that are missing or not as they should be."""
        return list(_damage(self.coverage, drafter=False))

    @cached_property
    def drafter_damage(self) -> list[str]:
        """Sentences on tensors of the drafter that are missing or not as they should be."""
        return list(_damage(self.coverage, drafter=True))

    @cached_property
    def downcast(self) -> list[Difference]:
        """Unquantized tensors whose floating-point dtype differs from the release's."""
        return [item for item in self.coverage.mistyped if {item.found, item.expected} <= FLOATS]

    @property
    def has_index(self) -> bool:
        """Whether there is an index."""
        return bool(self.identity.checkpoint.index)


Rule = Callable[[InspectedCheckpoint], Iterable[Finding]]


def look_at(
    identity: FolderIdentity, coverage: Coverage, name: str, revision: str, folder: Path, files: Collection[str]
) -> InspectedCheckpoint:
    """Return the rules' view of an identified checkpoint, with its configuration in `folder` and its `files`."""
    return InspectedCheckpoint(
        name=name,
        identity=identity,
        coverage=coverage,
        config=read_object(folder / CONFIG),
        inference=read_object(folder / INFERENCE),
        files=frozenset(files),
        revision=revision,
        index_metadata="metadata" in read_object(folder / INDEX) or not identity.checkpoint.index,
    )


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        values = json.loads(read_bytes(path).decode())
    except (CheckpointError, OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def listed(folder: Path) -> list[str]:
    """Return the files of a folder that a consumer may read, as relative paths."""
    paths = (*folder.glob("*"), *folder.glob("inference/*"))
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def is_drafter(name: str) -> bool:
    """Return whether a stored tensor belongs to the drafter."""
    return name.rpartition("/")[2].startswith("mtp.")


def _damage(coverage: Coverage, *, drafter: bool) -> Iterator[str]:
    yield from (f"{name} is missing" for name in coverage.missing if is_drafter(name) is drafter)
    yield from (f"{name} has no partner" for name in coverage.unpaired_scales if is_drafter(name) is drafter)
    for item in coverage.misshapen:
        if is_drafter(item.name) is drafter:
            yield f"{item.name} has shape {item.found} instead of {item.expected}"
    for item in coverage.mistyped:
        if is_drafter(item.name) is drafter and not {item.found, item.expected} <= FLOATS:
            yield f"{item.name} is {item.found} instead of {item.expected}"


def and_more(sentences: list[str]) -> str:
    """Return the first sentence and the number of others."""
    count = len(sentences) - 1
    return sentences[0] + ("" if not count else " (and 1 more)" if count == 1 else f" (and {count:,} more)")
