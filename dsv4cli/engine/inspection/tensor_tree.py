"""The tensor table of a model in readable form: by layer, with experts and equal layers grouped. No torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.checkpoint.values import form_of
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import UsageError

KINDS = {0: "window", 4: "CSA", 128: "HCA"}
LAYER = re.compile(r"(layers|mtp)\.(\d+)\.")
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Entry:
    """A matrix with its scales, or the equal matrices of a layer's experts; sizes are totals.

    name: without the layer. shape: the values' shape. dtypes: dtypes of the weight and its scales.
    """

    name: str
    form: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    tensors: int
    experts: int = 0


@dataclass(frozen=True)
class Layers:
    """Equal layers: their numbers, their kind and the entries of each. part: layers or mtp."""

    part: str
    numbers: tuple[int, ...]
    kind: str
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one layer."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def tensors(self) -> int:
        """Number of tensors of one layer, scales included."""
        return sum(entry.tensors for entry in self.entries)

    @property
    def title(self) -> str:
        """Title of the group, as in `layers.3, 5, ..., 41: HCA, scored`."""
        return f"{self.part}.{numbers_text(self.numbers)}: {self.kind}"


@dataclass(frozen=True)
class Tree:
    """The tensors outside the layers, and the layers, equal ones grouped."""

    outside: tuple[Entry, ...]
    layers: tuple[Layers, ...]


def make_tree(config: ModelConfig, specs: Iterable[TensorSpec]) -> Tree:
    """Group the tensor table of a model, `expected_tensors(config, …).values()`."""
    outside: dict[str, Mapping[Role, TensorSpec]] = {}
    blocks: dict[tuple[str, int], dict[str, Mapping[Role, TensorSpec]]] = {}
    for name, parts in matrices(specs).items():
        match = LAYER.match(name)
        if match:
            blocks.setdefault((match[1], int(match[2])), {})[name[match.end() :]] = parts
        else:
            outside[name] = parts
    folded: dict[tuple[str, str, tuple[Entry, ...]], list[int]] = {}
    for (part, number), found in blocks.items():
        key = (part, layer_kind(config, part, number), tuple(_entries(found)))
        folded.setdefault(key, []).append(number)
    layers = (Layers(part, tuple(numbers), kind, entries) for (part, kind, entries), numbers in folded.items())
    return Tree(tuple(_entries(outside)), tuple(layers))


def one_layer(config: ModelConfig, specs: Iterable[TensorSpec], name: str) -> Layers:
    """Return the layer that a user names as `3` or `mtp.0`. Raises UsageError for an unknown layer."""
    part, _, number = name.removeprefix("layers.").rpartition(".")
    part = part or "layers"
    for layers in make_tree(config, specs).layers:
        if layers.part == part and number in map(str, layers.numbers):
            return Layers(part, (int(number),), layers.kind, layers.entries)
    last = config.draft_stages - 1
    stages = "" if last < 0 else f", and mtp.0 to mtp.{last}" if last else ", and mtp.0"
    raise UsageError(f"there is no layer {name}", f"layers are 0 to {config.num_hidden_layers - 1}{stages}")


def layer_kind(config: ModelConfig, part: str, number: int) -> str:
    """Describe the attention of a layer and how it selects experts."""
    is_main = part == "layers"
    ratio = config.layer_ratios[number] if is_main else 0
    return f"{KINDS[ratio]}, {'hash' if is_main and config.is_hash_layer(number) else 'scored'}"


def numbers_text(numbers: tuple[int, ...]) -> str:
    """Abbreviate ascending numbers: `0-2`, `3, 5, ..., 41`, `1, 4`."""
    words, at = [], 0
    while at < len(numbers):
        run = [numbers[at]]
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        while at + len(run) < len(numbers) and numbers[at + len(run)] - run[-1] == step:
            run.append(numbers[at + len(run)])
        if step == 1 and len(run) > 2:
            words.append(f"{run[0]}-{run[-1]}")
        elif len(run) > 3:
            words.append(f"{run[0]}, {run[1]}, ..., {run[-1]}")
        else:
            run = run[:1]
            words.append(str(run[0]))
        at += len(run)
    return ", ".join(words)


def _entries(found: Mapping[str, Mapping[Role, TensorSpec]]) -> Iterator[Entry]:
    experts: dict[str, list[Entry]] = {}
    for name, parts in found.items():
        experts.setdefault(EXPERT.sub("*", name), []).append(_entry(name, parts))
    for pattern, entries in experts.items():
        first, count = entries[0], len(entries)
        if first.name == pattern:
            yield first
            continue
        name = pattern.replace("*", f"0-{count - 1}" if count > 1 else "0")
        yield Entry(
            name, first.form, first.dtypes, first.shape, count * first.nbytes, count * first.tensors, experts=count
        )


def _entry(name: str, parts: Mapping[Role, TensorSpec]) -> Entry:
    weight = parts["weight"]
    shape = (*weight.shape[:-1], weight.columns or weight.shape[-1])
    nbytes = sum(prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8 for spec in parts.values())
    dtypes = tuple(spec.dtype for spec in parts.values())
    return Entry(name, form_of(weight), dtypes, shape, nbytes, len(parts))


def tree_section(tree: Tree) -> dict[str, Any]:
    """Return the section `tree` of the document."""
    return {
        "outside": [asdict(entry) for entry in tree.outside],
        "layers": [layers_section(layers) for layers in tree.layers],
    }


def layers_section(layers: Layers) -> dict[str, Any]:
    """Return the section `layer` of the document, also used in `tree`; sizes are those of one layer."""
    return {
        "part": layers.part,
        "numbers": list(layers.numbers),
        "kind": layers.kind,
        "tensors": layers.tensors,
        "nbytes": layers.nbytes,
        "entries": [asdict(entry) for entry in layers.entries],
    }
