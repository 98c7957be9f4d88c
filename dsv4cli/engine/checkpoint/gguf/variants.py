"""The GGUF variants of a repository: grouping of file names into models, and selection of one by name; no torch."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4cli.engine.checkpoint.gguf.files import PART, SUFFIX
from dsv4cli.errors import CheckpointError, UsageError

# where the quantization begins in a file name, as llama.cpp, unsloth, bartowski, mradermacher and ds4 write it
QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-|i1-)?(?:I?Q\d|MXFP4|NVFP4|TQ\d|BF16|F16|F32).*)", re.IGNORECASE)
# files next to models: drafters, image encoders
COMPANIONS = re.compile(r"(^|[-._])(mtp|dspark|dflash|draft|mmproj)([-._]|$)", re.IGNORECASE)
IMPORTANCE = re.compile(r"(^|[-._])imatrix([-._]|$)", re.IGNORECASE)
LISTED = 40


class ChoiceNeeded(UsageError):
    """Several GGUF models, of which the user must choose one."""


@dataclass(frozen=True)
class Variant:
    """One GGUF model of a repository.

    Attributes:
        name: what selects it, unique in the repository: the quantization, the folder, or the path.
        files: all its files in order, by their names in the repository.
        missing: files of a split model that the repository lacks.
    """

    name: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The path in the repository without `.gguf` and without the number of a split file."""
        first = self.files[0]
        match = PART.fullmatch(first)
        return match["stem"] if match else first.removesuffix(SUFFIX)

    @property
    def folder(self) -> str:
        """The name of the folder that holds the files, '' at the top of the repository."""
        return self.path.rpartition("/")[0].rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The file name without `.gguf` and without the number of a split file."""
        return self.path.rpartition("/")[2]


def variants_of(names: Iterable[str]) -> list[Variant]:
    """Return the GGUF models among the file names of a repository by name: no drafters, image encoders and imatrix."""
    groups: dict[tuple[str, int], set[str]] = {}
    for name in names:
        if name.endswith(SUFFIX) and not _is_companion(name):
            match = PART.fullmatch(name)
            groups.setdefault((match["stem"], int(match["count"])) if match else (name, 0), set()).add(name)
    found = [_variant(stem, count, files) for (stem, count), files in groups.items()]
    shared = Counter(one.name.casefold() for one in found)
    named = (one if shared[one.name.casefold()] == 1 else replace(one, name=one.path) for one in found)
    return sorted(named, key=lambda one: one.name.casefold())


def choose_variant(variants: Sequence[Variant], wanted: str, repository: str) -> Variant:
    """Return the variant that `wanted` names, in any case.

    A variant matches by its name, folder, file name or path; otherwise, by words of its path: `Q4_K_XL` selects
    `UD-Q4_K_XL`, but `Q4` does not.

    Raises UsageError, listing the variants, if none or several match; CheckpointError if the repository lacks a file of
    the variant.
    """
    word = wanted.casefold().removesuffix(SUFFIX)
    exact = [one for one in variants if word in _names(one)]
    # between these separators, not at `_`: Q2_K must not select Q2_K_L
    whole = re.compile(rf"(^|[-./]){re.escape(word)}([-./]|$)")
    found = exact or [one for one in variants if whole.search(one.path.casefold())]
    if len(found) != 1:
        problem = "names several GGUF models" if found else "names no GGUF model"
        remedy = choose_one(found or variants, repository)
        raise UsageError(f"{wanted!r} {problem} of {repository}", remedy)
    if found[0].missing:
        others = f" and {len(found[0].missing) - 1} more files" if found[0].missing[1:] else ""
        raise CheckpointError(
            f"{repository} lacks {found[0].missing[0]}{others} of {found[0].name}", "choose another model or revision"
        )
    return found[0]


def choose_one(variants: Sequence[Variant], repository: str) -> str:
    """Return the remedy that lists the variants."""
    if not variants:
        return "it holds no GGUF model"
    names = [one.name for one in variants[:LISTED]]
    more = f" and {len(variants) - LISTED} more" if len(variants) > LISTED else ""
    return f"write it as {repository}:NAME with NAME one of {', '.join(names)}{more}"


def _names(variant: Variant) -> set[str]:
    names = (variant.name, variant.folder, variant.stem, variant.path, variant.files[0].removesuffix(SUFFIX))
    return {name.casefold() for name in names if name}


def _is_companion(name: str) -> bool:
    stem = name.removesuffix(SUFFIX).rpartition("/")[2]
    match = QUANTIZATION.search(stem)
    # in the name of a model, these words come after the quantization: it has a drafter, or used an importance matrix
    before = stem[: match.start() + 1] if match else stem
    return bool(COMPANIONS.search(before) or IMPORTANCE.search(before))


def _variant(stem: str, count: int, files: set[str]) -> Variant:
    wanted = [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)] if count else sorted(files)
    folder, _, base = stem.removesuffix(SUFFIX).rpartition("/")
    match = QUANTIZATION.search(base)
    name = match[1] if match else folder.rpartition("/")[2] or base
    return Variant(name, tuple(wanted), tuple(file for file in wanted if file not in files))
