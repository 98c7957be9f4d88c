"""Read checkpoint files into a model's parameters with several threads, each reading one piece at a time.

Bytes are read directly into host memory, and into GPU memory through staging buffers. GGUF blocks are arranged in tiles
where they end: in host memory by the threads, strip by strip, and on a GPU by `TileArranger`.
"""

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.files import Files
from dsv4cli.engine.checkpoint.headers import DTYPE_BITS, Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.naming import Location, Naming, OfficialNaming
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system.threads import as_done
from dsv4cli.engine.weights.fill import (
    TORCH_DTYPES,
    Arrived,
    Destinations,
    Supply,
    check_blocks,
    damaged_scale,
    no_scales,
)
from dsv4cli.engine.weights.staging import Buffer, Staging
from dsv4cli.engine.weights.tile_arranger import StoredRows, TileArranger
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, tile_height, to_tiles

THREADS = 8
# bytes that a thread reads in one job, and the size of a staging buffer
PIECE = 16 * 1024 * 1024
# buffers beyond one per thread: an H200 copies from one at 54 GB/s, and a thread fills one at about 2 GB/s
SPARE_BUFFERS = 2
# bytes read at once from rows that are then copied, to keep some of their columns or to arrange blocks in tiles: they
# stay in a core's cache, and calls, for which threads wait for each other, are few (AMD EPYC, GB per second of CPU time
# of IQ2_XXS, Q2_K and Q8_0: 4.2, 3.5 and 3.8; with 1 MiB 4.3, 3.3 and 3.6; with 256 KiB 2.7, 2.4 and 2.6)
STRIP = 2 * 1024 * 1024
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A piece of this rank's shard of a tensor: rows of it, or those columns of the rows that one stored tensor holds.

    Attributes:
        first, count: first row and number of rows of the shard.
        inside: bytes of each row before the piece.
        rows, row: rows of the shard, and bytes of a whole row of it.
        width: bytes of the piece in each row.
        stride: bytes of a row in the file.
        begin: offset of the piece in the stored tensor, in bytes.
        reciprocal: whether fp32 numbers are stored as 1 / x.
    """

    spec: TensorSpec
    info: TensorInfo
    first: int
    count: int
    inside: int
    rows: int
    row: int
    width: int
    stride: int
    begin: int
    reciprocal: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.count * self.width

    def of(self, destination: torch.Tensor) -> torch.Tensor:
        """Return the piece's view of its tensor's destination: uint8 [count, width]."""
        rows = destination.view(-1).view(torch.uint8).view(-1, self.row)
        return rows[self.first : self.first + self.count, self.inside : self.inside + self.width]

    @property
    def tile_height(self) -> int:
        """Rows of a tile, if the piece is GGUF blocks: whole rows, and whole tiles of them."""
        height = tile_height(BLOCK_DTYPES[self.spec.dtype], self.rows)
        assert (self.width, self.first % height, self.count % height) == (self.row, 0, 0), self.spec.name
        return height

    def read(self, files: Files, into: Bytes) -> None:
        """Read the piece as stored into uint8 [count, width].

        Raises CheckpointError for a truncated file, or an invalid scale of a matrix that is not GGUF blocks.
        """
        if self.width == self.stride and into.flags.c_contiguous:
            files.read(self.info, self.begin, into.reshape(-1).data)
        else:
            for rows, strip in self._strips(files):
                into[rows] = strip
        if self.reciprocal:
            with np.errstate(divide="ignore"):  # invalid scales raise below
                np.divide(1, numbers := into.view(np.float32), out=numbers)
        if self.spec.is_scale and no_scales(self.spec.dtype, into).any():
            raise damaged_scale(self.spec)

    def read_tiles(self, files: Files, into: Bytes) -> None:
        """Read rows of GGUF blocks into uint8 [count, width], check their scales, and arrange them in tiles.

        Raises CheckpointError for a truncated file or an invalid scale.
        """
        kind, height = BLOCK_DTYPES[self.spec.dtype], self.tile_height
        for rows, strip in self._strips(files, height):
            check_blocks(self.spec, strip)
            to_tiles(kind, strip, height, into[rows])

    def _strips(self, files: Files, multiple: int = 1) -> Iterator[tuple[slice, Bytes]]:
        """Yield rows of the piece with their bytes, `multiple` at a time or more. The next ones overwrite them.

        Whole rows are read, trimmed before the first and after the last byte of the piece.
        """
        at_once = max(1, STRIP // (multiple * self.stride)) * multiple
        strip = np.empty(at_once * self.stride, np.uint8)
        for row in range(0, self.count, at_once):
            rows = min(at_once, self.count - row)
            end = (rows - 1) * self.stride + self.width
            files.read(self.info, self.begin + row * self.stride, strip[:end].data)
            yield slice(row, row + rows), strip[: rows * self.stride].reshape(rows, self.stride)[:, : self.width]


def stored(
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    world: World,
    threads: int = THREADS,
    naming: Naming = OfficialNaming(),  # noqa: B008 - frozen
) -> Supply:
    """Return a supply for `fill` of this rank's shard of a checkpoint. The first error stops all threads.

    Whole rows are read of tensors that are sharded by columns.

    Args:
        naming: name and location of each tensor in the checkpoint.

    Raises CheckpointError if a tensor is missing or has another dtype or shape, a scale is invalid, or a file is
    truncated or cannot be read.
    """
    return partial(_fill, checkpoint, naming, list(specs), world, threads)


def _fill(
    checkpoint: Checkpoint,
    naming: Naming,
    specs: list[TensorSpec],
    world: World,
    threads: int,
    destinations: Destinations,
) -> Generator[Arrived, None, None]:
    pieces = [piece for spec in specs for piece in _pieces(checkpoint, naming, spec, world)]
    pieces.sort(key=lambda piece: (piece.info.file, piece.info.begin + piece.begin))
    loads = list(_loads(pieces))
    device = next((destination.device for destination in destinations.values() if needs_staging(destination)), None)
    count = min(threads + SPARE_BUFFERS, len(loads))
    staging = None if device is None else Staging(device, count, PIECE)
    stop, arranger = threading.Event(), TileArranger()
    with Files() as files:
        jobs = [partial(_carry, load, files, destinations, staging, stop) for load in loads]
        try:
            with closing(as_done(jobs, threads, stop)) as ended:
                for load, buffer, blocks in ended:
                    if buffer is not None and blocks:
                        buffer.join()
                        arranger.arrange(blocks)
                    yield from ((piece.spec.name, piece.nbytes) for piece in load)
        finally:
            if staging is not None:
                staging.wait()
    arranger.raise_if_damaged()


def needs_staging(destination: torch.Tensor) -> bool:
    """Return whether files cannot be read into this memory directly."""
    return destination.device.type != "cpu"


def _carry(
    load: list[TensorRows], files: Files, destinations: Destinations, staging: Staging | None, stop: threading.Event
) -> tuple[list[TensorRows], Buffer | None, list[StoredRows]]:
    """Read pieces to their destinations until stopped.

    Return them, the buffer from which copies may still run, and the copies of GGUF blocks, which are not in tiles yet.
    """
    start, blocks = 0, list[StoredRows]()
    with nullcontext() if staging is None else staging.buffer() as buffer:
        for piece in load:
            if stop.is_set():
                break
            destination, is_blocks = piece.of(destinations[piece.spec.name]), piece.spec.dtype in BLOCK_DTYPES
            if needs_staging(destination):
                assert buffer is not None
                piece.read(files, buffer.bytes[start : start + piece.nbytes].reshape(piece.count, piece.width))
                buffer.send(start, destination)
                start += piece.nbytes
                if is_blocks:
                    blocks.append(StoredRows(piece.spec, destination, piece.tile_height))
            elif is_blocks:
                piece.read_tiles(files, destination.numpy())
            else:
                piece.read(files, destination.numpy())
    return load, buffer, blocks


def _info(checkpoint: Checkpoint, location: Location) -> TensorInfo:
    info = checkpoint.tensors.get(location.name)
    if info is None:
        raise CheckpointError(f"{checkpoint.folder}: tensor {location.name} is missing")
    if (info.dtype, info.shape) != (location.dtype, location.shape):
        found, expected = f"{info.dtype} {list(info.shape)}", f"{location.dtype} {list(location.shape)}"
        raise CheckpointError(f"{checkpoint.folder}: {location.name} is {found}, expected {expected}")
    return info


@dataclass(frozen=True, slots=True)
class ByteBox:
    """A range of rows of a tensor, and a range of bytes in each row."""

    rows: range
    columns: range

    def __and__(self, other: "ByteBox") -> "ByteBox":
        """Return the intersection."""
        rows, columns = (
            range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            for ours, theirs in ((self.rows, other.rows), (self.columns, other.columns))
        )
        return ByteBox(rows, columns)


def _box(spec: TensorSpec, dim: int | None, part: int, parts: int) -> ByteBox:
    """Return one of `parts` equal parts of a tensor along a dimension, or the whole tensor if `dim` is None."""
    outer = spec.shard or 1  # number of leading dimensions that count rows
    rows, row = prod(spec.shape[:outer]), prod(spec.shape[outer:]) * TORCH_DTYPES[spec.dtype].itemsize
    if dim is None:
        return ByteBox(range(rows), range(row))
    if dim == 0:
        return ByteBox(range(part * rows // parts, (part + 1) * rows // parts), range(row))
    return ByteBox(range(rows), range(part * row // parts, (part + 1) * row // parts))


def _pieces(checkpoint: Checkpoint, naming: Naming, spec: TensorSpec, world: World) -> Iterator[TensorRows]:
    """Yield this rank's shard of a tensor in pieces that each fit in a buffer."""
    part_shape(spec, world.size)  # raises if the ranks do not divide it
    own = _box(spec, spec.shard, world.rank, world.size)
    locations = naming.locations(spec)
    # if it is not split, each location has all of it
    for location in locations if locations[0].cut else locations[:1]:
        info, cut = _info(checkpoint, location), location.cut
        held = _box(spec, cut.dim, cut.part, cut.parts) if cut else _box(spec, None, 0, 1)
        wanted = own & held
        width, stride = len(wanted.columns), len(held.columns)
        if not wanted.rows or not width:
            continue
        at_once = PIECE // width
        if spec.dtype in BLOCK_DTYPES:
            at_once -= at_once % tile_height(BLOCK_DTYPES[spec.dtype], len(own.rows))
        assert at_once, spec.name
        begin = location.begin * DTYPE_BITS[location.dtype] // 8 + wanted.columns.start - held.columns.start
        for row in wanted.rows[::at_once]:
            yield TensorRows(
                spec=spec,
                info=info,
                first=row - own.rows.start,
                count=min(at_once, wanted.rows.stop - row),
                inside=wanted.columns.start - own.columns.start,
                rows=len(own.rows),
                row=len(own.columns),
                width=width,
                stride=stride,
                begin=begin + (row - held.rows.start) * stride,
                reciprocal=location.reciprocal,
            )


def _loads(pieces: Iterable[TensorRows]) -> Iterator[list[TensorRows]]:
    """Yield lists of consecutive pieces that together fit in a buffer."""
    load: list[TensorRows] = []
    taken = 0
    for piece in pieces:
        if taken + piece.nbytes > PIECE:
            yield load
            load, taken = [], 0
        load.append(piece)
        taken += piece.nbytes
    if load:
        yield load
