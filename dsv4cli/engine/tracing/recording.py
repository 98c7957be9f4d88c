"""Recordings on disk: a safetensors file per layer and rank, written row by row during the steps.

Row r of a tensor is token r of the concatenated texts, or entry r, or row r of the logits. A file is created with space
for all rows when the first step has completed its layer. So only one layer's output is in memory at a time.
"""

import json
import struct
from collections import defaultdict
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from dsv4cli.engine.tracing.manifest import TraceManifest, check_files, read_manifest
from dsv4cli.engine.tracing.stages import BY_NAME, in_order
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}


def file_of(folder: Path, layer: int, rank: int) -> Path:
    """Return the file of a rank's part of a layer."""
    return folder / f"layer-{layer:03}-rank-{rank}.safetensors"


def make_folder(folder: Path) -> None:
    """Create an empty folder for a recording. Raises UsageError if it is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", "use another folder, or delete its contents")
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}", "use another folder") from None


class Writer:
    """Writes one rank's part of a recording."""

    def __init__(self, folder: Path, manifest: TraceManifest, rank: int = 0) -> None:
        self.folder, self.manifest, self.rank = folder, manifest, rank
        self._waiting: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        self._places: dict[int, dict[str, tuple[int, int]]] = {}  # layer -> tensor -> offset, bytes per row

    def wants(self, layer: int, stage: str) -> bool:
        """Return whether this rank records a stage of a layer."""
        one, (first, end) = BY_NAME[stage], self.manifest.layers
        inside = first <= layer < end or (layer == end and stage in ("streams", "logits"))
        return inside and one.group in self.manifest.what and (one.split or not self.rank)

    def take(self, layer: int, stage: str, first: int, rows: torch.Tensor) -> None:
        """Copy rows of a stage, starting at row `first`. They are kept until the layer ends."""
        self._waiting[stage].append((first, _on_host(rows.detach())))

    def end_layer(self, layer: int) -> None:
        """Write the layer's rows to disk. Raises OSError."""
        waiting, self._waiting = self._waiting, defaultdict(list)
        if not waiting:
            return
        path = file_of(self.folder, layer, self.rank)
        if layer not in self._places:
            self._places[layer] = _make_file(
                path,
                {name: (self.manifest.rows(BY_NAME[name].per, layer), rows[0][1]) for name, rows in waiting.items()},
            )
        with open(path, "r+b", buffering=0) as file:
            for name, parts in waiting.items():
                offset, size = self._places[layer][name]
                for first, rows in parts:
                    file.seek(offset + first * size)
                    left = memoryview(rows.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's own say less
                    while left:
                        left = left[file.write(left) :]


def _on_host(rows: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory; pinned if it comes from a GPU, and reused by PyTorch's allocator."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda, device="cpu")
    return host.copy_(rows)


def _make_file(path: Path, tensors: dict[str, tuple[int, torch.Tensor]]) -> dict[str, tuple[int, int]]:
    """Create a file with space for all rows of the tensors.

    Args:
        tensors: number of rows and an example of each.

    Returns:
        Offset of each tensor in the file, and bytes of one row.
    """
    header, places, end = {}, {}, 0
    for name in in_order(list(tensors)):
        rows, example = tensors[name]
        size = prod(example.shape[1:]) * example.element_size()
        header[name] = {
            "dtype": DTYPES[example.dtype],
            "shape": [rows, *example.shape[1:]],
            "data_offsets": [end, end + rows * size],
        }
        places[name] = (end, size)
        end += rows * size
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        file.truncate(8 + len(words) + end)
    return {name: (8 + len(words) + offset, size) for name, (offset, size) in places.items()}


class Recording(Protocol):
    """The recorded stages of a forward pass, whatever files they are stored in."""

    name: str
    manifest: TraceManifest

    def layers(self) -> list[int]:
        """Return the layers that have stages."""

    def stages(self, layer: int) -> list[str]:
        """Return the stages of a layer, in order."""

    def rows(self, layer: int, stage: str, first: int, end: int) -> torch.Tensor:
        """Return rows of a stage, on the CPU."""


class RecordedFolder:
    """A recording of `dsv4 trace record`, with the parts of its ranks joined."""

    def __init__(self, folder: Path, manifest: TraceManifest | None = None) -> None:
        """Open a recording. manifest: for one that is not finished.

        Raises UsageError if it is missing or incomplete.
        """
        if manifest is None:
            manifest = read_manifest(folder)
            check_files(folder)
        self.name, self.folder, self.manifest = str(folder), folder, manifest

    def layers(self) -> list[int]:
        """Return the layers that have stages."""
        first, end = self.manifest.layers
        return [layer for layer in range(first, end + 1) if file_of(self.folder, layer, 0).exists()]

    def stages(self, layer: int) -> list[str]:
        """Return the stages of a layer, in order."""
        with suppress(FileNotFoundError), self._open(layer, 0) as file:
            return in_order([name for name in file.keys() if name in BY_NAME])  # noqa: SIM118 - no dict
        return []

    def rows(self, layer: int, stage: str, first: int, end: int) -> torch.Tensor:
        """Return rows of a stage, on the CPU."""
        ranks = self.manifest.ranks if BY_NAME[stage].split else 1
        parts = []
        for rank in range(ranks):
            with self._open(layer, rank) as file:
                parts.append(file.get_slice(stage)[first:end])
        return torch.cat(parts, 1) if ranks > 1 else parts[0]

    def _open(self, layer: int, rank: int) -> "safe_open":
        path = file_of(self.folder, layer, rank)
        try:
            return safe_open(path, "pt")
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged: {error}", f"record {shell_word(self.folder)} again") from None


def common(one: Recording, other: Recording) -> list[tuple[int, str]]:
    """Return the layers and stages that both recordings have and that are comparable, in order."""
    same = one.manifest.simulate == other.manifest.simulate
    places = []
    for layer in sorted({*one.layers()} & {*other.layers()}):
        there = {*other.stages(layer)}
        places += [
            (layer, stage) for stage in one.stages(layer) if stage in there and (same or not BY_NAME[stage].basis)
        ]
    return places
