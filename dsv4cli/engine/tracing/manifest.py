"""What a recording is of: tokens, layers, numerics, machine; a JSON file beside its tensors; no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4cli.engine.tracing.stages import GROUPS, Group
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word

SCHEMA = "dsv4.trace/1"
FILE = "manifest.json"
# of a recording, each rank's part of each layer
PARTS = "layer-*-rank-*.safetensors"


@dataclass(frozen=True)
class Text:
    """Tokens that go through the model: the first `prompt` of them as a prompt, the others one by one; those below 0
    are what the model draws."""

    ids: tuple[int, ...]
    prompt: int

    @property
    def logits(self) -> int:
        """How many rows of logits it has: of the prompt's last token and of each later one."""
        return len(self.ids) - self.prompt + 1


@dataclass(frozen=True)
class TraceManifest:
    """What a recording is of.

    model: as the user called it. weights: what identifies them, None where unknown. texts: in the order of the rows.
    layers: the first and the one behind the last; the streams that this one takes are recorded too. layers_of_model:
    how many it has. ratios: of each of its layers. hidden, streams: the width of an activation, and of how many streams
    there are. dtype, simulate: the numerics. rounded: the weights whose inputs are rounded to FP8. short_sums: the most
    prompt tokens of a step where FP8 tensor cores sum up linears of many rows shortly (`gemm.SHORT_SUM`), 0 where none
    do. what: groups of stages. fed: whether each half of a block was given the streams of another recording. drafter:
    whether the model has one, of which nothing is recorded. how: backend, device, versions and the like, for people.
    """

    model: str
    texts: tuple[Text, ...]
    layers: tuple[int, int]
    layers_of_model: int
    ratios: tuple[int, ...]
    hidden: int
    streams: int
    dtype: str
    simulate: bool
    rounded: tuple[str, ...] = ()
    short_sums: int = 0
    what: tuple[Group, ...] = GROUPS
    ranks: int = 1
    fed: bool = False
    drafter: bool = False
    weights: str | None = None
    how: dict[str, Any] = field(default_factory=dict)

    def rows(self, per: str, layer: int) -> int:
        """How many rows a stage of a layer has in all texts."""
        return sum(self.rows_of(text, per, layer) for text in self.texts)

    def rows_of(self, text: Text, per: str, layer: int) -> int:
        """How many rows a text has of a stage of a layer."""
        if per == "token":
            return len(text.ids)
        return text.logits if per == "logits" else len(text.ids) // self.ratios[layer]

    def place(self, row: int, per: str, layer: int) -> tuple[int, int]:
        """The text of a row, and the position of its token: of an entry that of its last one."""
        number = 0
        while row >= self.rows_of(self.texts[number], per, layer):
            row -= self.rows_of(self.texts[number], per, layer)
            number += 1
        if per == "entry":
            return number, (row + 1) * self.ratios[layer] - 1
        return number, row + (self.texts[number].prompt - 1 if per == "logits" else 0)

    def write(self, folder: Path) -> None:
        """Completes a recording. Raises OSError."""
        from dsv4cli.engine.system.atomic import write_file

        files = {path.name: path.stat().st_size for path in sorted(folder.glob(PARTS))}
        content = json.dumps({"schema": SCHEMA, "files": files, **asdict(self)}, indent=1).encode()
        write_file(folder / FILE, content, folder / f".{FILE}")


def read_manifest(folder: Path) -> TraceManifest:
    """What the recording in a folder is of. Raises UsageError for a folder without one, or one of another version."""
    remedy = _remedy(folder)
    try:
        given = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if given.pop("schema") != SCHEMA:
            raise ValueError(SCHEMA)
        given.pop("files", None)
        texts = tuple(Text(tuple(map(int, one["ids"])), int(one["prompt"])) for one in given.pop("texts"))
        tuples: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("layers", "ratios", "rounded", "what")}
        return TraceManifest(texts=texts, **tuples, **given)
    except OSError as error:
        raise UsageError(f"{folder} holds no whole recording: {FILE}: {error.strerror}", remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{folder / FILE} is not of this version of dsv4 trace", remedy) from None


def check_files(folder: Path) -> None:
    """Raises UsageError where a file of a recording is gone or of another length: a comparison would pass over what it
    held. For its tokens alone the manifest is enough."""
    files: Mapping[str, int] = json.loads((folder / FILE).read_text(encoding="utf-8")).get("files", {})
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise UsageError(f"{path} {'has changed' if path.is_file() else 'is missing'}", _remedy(folder))


def _remedy(folder: Path) -> str:
    return f"record it: dsv4 trace record MODEL --out {shell_word(folder)}"


def check_same_shapes(one: TraceManifest, other: TraceManifest) -> None:
    """Raises UsageError for models of other shapes."""
    shapes = [(side.layers_of_model, side.hidden, side.streams, side.ratios) for side in (one, other)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"{one.model} and {other.model} are models of other shapes: {shapes[0][0]} layers of {one.hidden} and "
            f"{shapes[1][0]} of {other.hidden}",
            "compare two of the same: dsv4 inspect MODEL shows them",
        )


def check_same_tokens(one: Sequence[Text], other: Sequence[Text], names: tuple[str, str]) -> None:
    """Raises UsageError where two recordings are not of the same tokens at the same positions."""
    remedy = f"record the same tokens: dsv4 trace record MODEL --like {shell_word(Path(names[0]))} --out DIR"
    if len(one) != len(other):
        raise UsageError(f"{names[0]} has {len(one)} texts, {names[1]} {len(other)}", remedy)
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        pairs = zip(left.ids, right.ids, strict=False)
        differs = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if differs is not None:
            what = f"token {left.ids[differs]} and {right.ids[differs]} at position {differs}"
        elif len(left.ids) != len(right.ids) or left.prompt != right.prompt:
            what = f"{len(left.ids)} and {len(right.ids)} tokens, {left.prompt} and {right.prompt} of them the prompt"
        else:
            continue
        raise UsageError(f"{names[0]} and {names[1]} are not of the same text {number}: {what}", remedy)
