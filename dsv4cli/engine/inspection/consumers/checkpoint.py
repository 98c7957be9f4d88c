"""What the rules of every consumer look at: the identity of a folder, its configuration, what is wrong, its files."""

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
    """One thing that a rule found: a reason against, one that leaves it open, or only something to know.

    fix: what removes the reason, where that is less than a conversion.
    """

    kind: Literal["no", "not known", "note"]
    text: str
    fix: str = ""


@dataclass(frozen=True)
class InspectedCheckpoint:
    """A folder as the rules see it.

    name: what other programs call it, a path or a repository; revision: of that, '' for the usual one. config: of the
    root config.json, empty where there is none. inference: of inference/config.json. files: paths below the folder.
    index_metadata: whether the index has the key that transformers reads, true without an index.
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
        """How the matrices are stored."""
        return self.identity.formats

    @property
    def quantised(self) -> bool:
        """Whether any matrix is."""
        return any(map(is_quantised, (self.formats.linear, self.formats.output, self.formats.experts)))

    @cached_property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization_config, None where there is none."""
        values = self.config.get("quantization_config")
        return values if isinstance(values, Mapping) else None

    def quantization_says(self, key: str) -> Any:
        """A value of the quantization_config."""
        return (self.quantization or {}).get(key)

    @property
    def spares_layers(self) -> bool:
        """Whether the quantization_config names matrices that are not quantised."""
        return any(self.quantization_says(key) for key in ("ignored_layers", "modules_to_not_convert"))

    @property
    def ranks(self) -> int:
        """For how many processes the files are cut, 0 where they are whole."""
        naming = self.identity.naming
        return naming.ranks if isinstance(naming, MpNaming) else 0

    @property
    def has_transformers_names(self) -> bool:
        """Whether the tensors have transformers' names."""
        return isinstance(self.identity.naming, TransformersNaming)

    @cached_property
    def damage(self) -> list[str]:
        """Sentences about tensors of the main model that are not there, or not as they should be."""
        return list(_damage(self.coverage, drafter=False))

    @cached_property
    def drafter_damage(self) -> list[str]:
        """The same about the drafter."""
        return list(_damage(self.coverage, drafter=True))

    @cached_property
    def downcast(self) -> list[Difference]:
        """Plain tensors stored in another floating-point dtype than the release has."""
        return [item for item in self.coverage.mistyped if {item.found, item.expected} <= FLOATS]

    @property
    def has_index(self) -> bool:
        """Whether there is an index."""
        return bool(self.identity.checkpoint.index)


Rule = Callable[[InspectedCheckpoint], Iterable[Finding]]


def look_at(
    identity: FolderIdentity, coverage: Coverage, name: str, revision: str, folder: Path, files: Collection[str]
) -> InspectedCheckpoint:
    """What is known of a recognised checkpoint, whose configuration lies in `folder` and which has `files`."""
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
    """A JSON object of a file; empty where there is none."""
    try:
        values = json.loads(read_bytes(path).decode())
    except (CheckpointError, OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def listed(folder: Path) -> list[str]:
    """The files of a folder that a consumer may look for, by their paths below it."""
    paths = (*folder.glob("*"), *folder.glob("inference/*"))
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def is_drafter(name: str) -> bool:
    """Whether a stored tensor belongs to the drafter."""
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
    """The first sentence and how many others there are."""
    count = len(sentences) - 1
    return sentences[0] + ("" if not count else " (and 1 more)" if count == 1 else f" (and {count:,} more)")
