"""The manifest of a recording (tokens, layers, numerics, machine): a JSON file next to its tensors. No torch."""

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
# files of a recording: each rank's part of each layer
PARTS = "layer-*-rank-*.safetensors"


@dataclass(frozen=True)
class Text:
    """Tokens that go through the model: the first `prompt` of them in prefill, the others one by one.

    An id below 0 means a token that the model samples.
    """

    ids: tuple[int, ...]
    prompt: int

    @property
    def logits(self) -> int:
        """The number of rows of logits: of the prompt's last token and of each later token."""
        return len(self.ids) - self.prompt + 1


@dataclass(frozen=True)
class TraceManifest:
    """What a recording contains, and how it was made.

    Attributes:
        model: the model as the user named it.
        texts: the texts, in the order of the rows.
        layers: first layer and end (exclusive). The input streams of the end are recorded too.
        layers_of_model: number of the model's layers.
        ratios: compression ratio of each layer of the model.
        hidden: width of an activation.
        streams: number of residual streams.
        dtype, simulate: the numerics.
        rounded: kinds of weights whose inputs are rounded to FP8.
        short_sums: maximum number of prompt tokens in a step, if FP8 tensor cores compute linears of many rows with
            short sums (`gemm.SHORT_SUM`); 0 otherwise.
        what: recorded groups of stages.
        fed: whether each half of a block was fed the streams of another recording.
        drafter: whether the model has a drafter, which is not recorded.
        weights: identifies the weights; None if unknown.
        how: backend, device, versions and the like, for information only.
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
        """Return how many rows a stage of a layer has in all texts."""
        return sum(self.rows_of(text, per, layer) for text in self.texts)

    def rows_of(self, text: Text, per: str, layer: int) -> int:
        """Return how many rows a stage of a layer has in one text."""
        if per == "token":
            return len(text.ids)
        return text.logits if per == "logits" else len(text.ids) // self.ratios[layer]

    def place(self, row: int, per: str, layer: int) -> tuple[int, int]:
        """Return the text of a row and the position of its token; for an entry, of its last token."""
        number = 0
        while row >= self.rows_of(self.texts[number], per, layer):
            row -= self.rows_of(self.texts[number], per, layer)
            number += 1
        if per == "entry":
            return number, (row + 1) * self.ratios[layer] - 1
        return number, row + (self.texts[number].prompt - 1 if per == "logits" else 0)

    def write(self, folder: Path) -> None:
        """Write the manifest, which completes a recording. Raises OSError."""
        from dsv4cli.engine.system.atomic import write_file

        files = {path.name: path.stat().st_size for path in sorted(folder.glob(PARTS))}
        content = json.dumps({"schema": SCHEMA, "files": files, **asdict(self)}, indent=1).encode()
        write_file(folder / FILE, content, folder / f".{FILE}")


def read_manifest(folder: Path) -> TraceManifest:
    """Return the manifest of a recording. Raises UsageError if there is none, or it is of another version."""
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
        raise UsageError(f"{folder} has no complete recording: {FILE}: {error.strerror}", remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{folder / FILE} was not written by this version of dsv4 trace", remedy) from None


def check_files(folder: Path) -> None:
    """Raise UsageError if a file of a recording is missing or has another size.

    A comparison would skip its contents. To read only the tokens of a recording, the manifest suffices.
    """
    files: Mapping[str, int] = json.loads((folder / FILE).read_text(encoding="utf-8")).get("files", {})
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise UsageError(f"{path} {'has changed' if path.is_file() else 'is missing'}", _remedy(folder))


def _remedy(folder: Path) -> str:
    return f"record it again: dsv4 trace record MODEL --out {shell_word(folder)}"


def check_same_shapes(one: TraceManifest, other: TraceManifest) -> None:
    """Raise UsageError if the models have different shapes."""
    shapes = [(side.layers_of_model, side.hidden, side.streams, side.ratios) for side in (one, other)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"{one.model} and {other.model} have different shapes: {shapes[0][0]} layers of {one.hidden} and "
            f"{shapes[1][0]} of {other.hidden}",
            "compare models of the same shape, as dsv4 inspect MODEL shows it",
        )


def check_same_tokens(one: Sequence[Text], other: Sequence[Text], names: tuple[str, str]) -> None:
    """Raise UsageError if two recordings do not have the same tokens at the same positions."""
    remedy = f"record the same tokens: dsv4 trace record MODEL --like {shell_word(Path(names[0]))} --out DIR"
    if len(one) != len(other):
        raise UsageError(f"{names[0]} has {len(one)} texts, {names[1]} {len(other)}", remedy)
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        pairs = zip(left.ids, right.ids, strict=False)
        differs = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if differs is not None:
            what = f"token {left.ids[differs]} and {right.ids[differs]} at position {differs}"
        elif len(left.ids) != len(right.ids) or left.prompt != right.prompt:
            what = f"{len(left.ids)} and {len(right.ids)} tokens, with {left.prompt} and {right.prompt} prompt tokens"
        else:
            continue
        raise UsageError(f"{names[0]} and {names[1]} differ in text {number}: {what}", remedy)
