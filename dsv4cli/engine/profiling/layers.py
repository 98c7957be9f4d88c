"""Times a layer of each kind, kernel by kernel, with the GPU's idle time."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from dsv4cli.engine.profiling.ranges import ATTENTION


class Owner(NamedTuple):
    """The owner of a kernel or copy: its class, and the number of its block (None outside blocks)."""

    name: str
    block: int | None


@dataclass(frozen=True)
class KernelTime:
    """The time of one kernel.

    Attributes:
        seconds: from the end of all kernels before it to its own end; 0 if it ends before them.
        idle: the part of `seconds` before the kernel begins.
    """

    name: str
    seconds: float
    idle: float


@dataclass(frozen=True)
class LayerTime:
    """The mean of all layers with this kind of attention that launch the most common sequence of kernels."""

    kind: str
    layers: int
    kernels: list[KernelTime]

    @property
    def seconds(self) -> float:
        """Seconds from the end of what ran before the layer to the end of its last kernel."""
        return sum(one.seconds for one in self.kernels)

    @property
    def idle(self) -> float:
        """Seconds of these in which nothing ran."""
        return sum(one.idle for one in self.kernels)

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        kernels = [{"name": one.name, "seconds": one.seconds, "idle_seconds": one.idle} for one in self.kernels]
        head = {"kind": self.kind, "layers": self.layers, "seconds": self.seconds, "idle_seconds": self.idle}
        return {**head, "kernels": kernels}


def layer_times(names: Sequence[str], spans: Sequence[tuple[float, float]], owners: Sequence[Owner]) -> list[LayerTime]:
    """Return the time of a layer of each kind.

    Args:
        names: kernel names, in the order in which they began.
        spans: begin and end of each, in microseconds.
        owners: owner of each.
    """
    blocks: defaultdict[int, list[KernelTime]] = defaultdict(list)
    kinds: dict[int, str] = {}
    until = spans[0][0] if spans else 0.0
    for name, (start, end), owner in zip(names, spans, owners, strict=True):
        if owner.block is not None:
            times = max(end - until, 0.0) / 1e6, max(start - until, 0.0) / 1e6
            blocks[owner.block].append(KernelTime(name, *times))
            if owner.name in ATTENTION.values():
                kinds[owner.block] = owner.name
        until = max(until, end)
    return [
        _layer(kind, [blocks[block] for block in kinds if kinds[block] == kind])
        for kind in dict.fromkeys(kinds.values())
    ]


def _layer(kind: str, layers: list[list[KernelTime]]) -> LayerTime:
    [(usual, count)] = Counter(tuple(one.name for one in layer) for layer in layers).most_common(1)
    alike = [layer for layer in layers if tuple(one.name for one in layer) == usual]
    kernels = [
        KernelTime(name, mean(one.seconds for one in times), mean(one.idle for one in times))
        for name, times in zip(usual, zip(*alike, strict=True), strict=True)
    ]
    return LayerTime(kind, count, kernels)
