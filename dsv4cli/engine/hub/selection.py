"""Selection of a repository's files by kind and by layer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dsv4cli.engine.checkpoint.headers import INDEX
from dsv4cli.engine.hub.cached import check_cache
from dsv4cli.engine.hub.files import Listing, RemoteFile
from dsv4cli.errors import CheckpointError, UsageError

FileKind = Literal["config", "tokenizer", "index", "weights", "other"]
KINDS: tuple[FileKind, ...] = get_args(FileKind)
# the first pattern that a file name matches tells its kind
PATTERNS: dict[FileKind, str] = {
    "index": r"\.safetensors\.index\.json$",
    "weights": r"\.safetensors$",
    "tokenizer": r"(^|/)(tokenizer|vocab\.|merges\.|special_tokens_map\.|added_tokens\.|chat_template)|^encoding/",
    "config": r"(^|/)(\w+_)?config\.json$|(^|/)configuration_\w+\.py$",
}
# official names, transformers' names, and those of the files cut for ranks, which begin with their file
OWNER = re.compile(r"(?:^|[./])(layers|mtp)\.(\d{1,9})\.", re.ASCII)


@dataclass(frozen=True)
class Selection:
    """The part of a model to download: kinds of files, main layers, and whether to include mtp.*.

    Weights outside the layers are always included.
    """

    layers: range | None = None
    mtp: bool = True
    kinds: frozenset[FileKind] = frozenset(KINDS)

    @property
    def is_whole(self) -> bool:
        """Whether the selection is the whole repository."""
        return self == Selection()

    @property
    def is_all_weights(self) -> bool:
        """Whether all tensors are selected, if weights are selected at all."""
        return self.layers is None and self.mtp

    def takes(self, tensor: str) -> bool:
        """Return whether a tensor, by its name in any layout, is selected."""
        owner = OWNER.search(tensor)
        if owner is None:
            return True
        if owner[1] == "mtp":
            return self.mtp
        return self.layers is None or int(owner[2]) in self.layers


def parse_kinds(text: str) -> frozenset[FileKind]:
    """Return the file kinds in a list such as `config,tokenizer`. Raises UsageError for an unknown kind."""
    words = [word.strip() for word in text.split(",")]
    kinds = frozenset(kind for kind in KINDS if kind in words)
    unknown = next((word for word in words if word not in KINDS), None)
    if unknown is not None:
        raise UsageError(f"--only {text!r}: there is no kind {unknown!r}", f"choose from {', '.join(KINDS)}")
    return kinds


def kind_of(name: str) -> FileKind:
    """Return the kind of a file, judged by its name."""
    return next((kind for kind, pattern in PATTERNS.items() if re.search(pattern, name)), "other")


def select_files(listing: Listing, selection: Selection, index: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """Return the selected files of the listing.

    index: file of each tensor, needed only if some weights are left out or the listing comes from the cache. Raises
    UsageError for layers that the model does not have, weights that cannot be split by layer, and an empty selection;
    HubError for weights that the cache lacks.
    """
    if listing.cached and "weights" in selection.kinds:
        of_index = {file for name, file in index.items() if selection.takes(name)}
        check_cache(listing, of_index or {file.name for file in listing.files if kind_of(file.name) == "weights"})
    chosen = [file for file in listing.files if kind_of(file.name) in selection.kinds]
    if not selection.is_all_weights:
        shards = _shards(listing, selection, index)
        chosen = [file for file in chosen if file.name in shards or kind_of(file.name) != "weights"]
    if not chosen:
        raise UsageError(
            f"{listing.repository} has no files of the kind {' or '.join(sorted(selection.kinds))}",
            f"it contains {', '.join(sorted({kind_of(file.name) for file in listing.files})) or 'no file'}",
        )
    return tuple(chosen)


def _shards(listing: Listing, selection: Selection, index: Mapping[str, str]) -> set[str]:
    if "weights" not in selection.kinds:
        raise UsageError("--layers and --no-mtp choose weights, which --only leaves out", "add weights to --only")
    if not index:
        raise UsageError(
            f"{listing.repository} has no {INDEX}: its weights can only be downloaded as a whole",
            "leave out --layers and --no-mtp",
        )
    owners = [OWNER.search(name) for name in index]
    count = 1 + max((int(owner[2]) for owner in owners if owner and owner[1] == "layers"), default=-1)
    if selection.layers is not None and selection.layers.stop > count:
        last = selection.layers.stop - 1
        raise UsageError(f"there is no layer {last}: {listing.repository} has {count}", f"choose from 0-{count - 1}")
    shards = {file for name, file in index.items() if selection.takes(name)}
    absent = sorted(shards - listing.by_name.keys())
    if absent:
        raise CheckpointError(
            f"{listing.repository}: {INDEX} names {absent[0]}, which the repository does not contain",
            "choose another --revision",
        )
    return shards
