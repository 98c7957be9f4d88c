"""From the files of a checkpoint to the parameters of a model: several threads, each reading a piece at a time.

Host memory is read into directly, memory on a GPU through staging buffers; nothing else holds weights.
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
from dsv4cli.engine.weights.fill import TORCH_DTYPES, Arrived, Destinations, Supply, damaged_scale, no_scales
from dsv4cli.engine.weights.staging import Staging
from dsv4cli.errors import CheckpointError

THREADS = 8
# bytes that a thread reads for one job, and of a staging buffer
PIECE = 16 * 1024 * 1024
# while one buffer of a thread is copied from, it fills the other
BUFFERS_A_THREAD = 2
# whole rows of which a rank takes some columns are read so many bytes at once: they stay in a core's cache
STRIP = 256 * 1024
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of this rank's part of a tensor, or columns of them that one stored tensor holds.

    first, count: rows of the part. inside: bytes of such a row before the piece, row: of it in all. width: bytes of the
    piece in each row. stride: bytes of a row in the file. begin: byte of the stored tensor where the piece begins.
    reciprocal: whether fp32 numbers are stored as 1 / x.
    """

    spec: TensorSpec
    info: TensorInfo
    first: int
    count: int
    inside: int
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
        """The piece's part of its tensor's destination: uint8 [count, width]."""
        rows = destination.view(-1).view(torch.uint8).view(-1, self.row)
        return rows[self.first : self.first + self.count, self.inside : self.inside + self.width]

    def read(self, files: Files, into: Bytes) -> None:
        """Fills uint8 [count, width]. Raises CheckpointError for a file that ends before and for a damaged scale."""
        if self.width == self.stride and into.flags.c_contiguous:
            files.read(self.info, self.begin, into.reshape(-1).data)
        else:
            self._read_columns(files, into)
        if self.reciprocal:
            with np.errstate(divide="ignore"):  # what is no scale is refused below
                np.divide(1, numbers := into.view(np.float32), out=numbers)
        if self.spec.is_scale and no_scales(self.spec.dtype, into).any():
            raise damaged_scale(self.spec)

    def _read_columns(self, files: Files, into: Bytes) -> None:
        """Reads whole rows, except for what is before the first and behind the last byte wanted, and keeps columns."""
        at_once = max(1, STRIP // self.stride)
        strip = np.empty(at_once * self.stride, np.uint8)
        for row in range(0, self.count, at_once):
            rows = min(at_once, self.count - row)
            end = (rows - 1) * self.stride + self.width
            files.read(self.info, self.begin + row * self.stride, strip[:end].data)
            into[row : row + rows] = strip[: rows * self.stride].reshape(rows, self.stride)[:, : self.width]


def stored(
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    world: World,
    threads: int = THREADS,
    naming: Naming = OfficialNaming(),  # noqa: B008 - frozen
) -> Supply:
    """This rank's part of each tensor of a checkpoint, for `fill`; of one that is cut by columns whole rows are read.

    naming: where the checkpoint has each tensor. The first error ends all threads. Raises CheckpointError for a tensor
    that is not there or has another dtype or shape, a damaged scale, a file that cannot be read or ends too early.
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
    count = min(BUFFERS_A_THREAD * threads, len(loads))
    staging = None if device is None else Staging(device, count, PIECE)
    stop = threading.Event()
    with Files() as files:
        jobs = [partial(_carry, load, files, destinations, staging, stop) for load in loads]
        try:
            with closing(as_done(jobs, threads, stop)) as ended:
                for load in ended:
                    yield from ((piece.spec.name, piece.nbytes) for piece in load)
        finally:
            if staging is not None:
                staging.wait()


def needs_staging(destination: torch.Tensor) -> bool:
    """Whether a file cannot be read into it directly."""
    return destination.device.type != "cpu"


def _carry(
    load: list[TensorRows], files: Files, destinations: Destinations, staging: Staging | None, stop: threading.Event
) -> list[TensorRows]:
    """Takes pieces to their destinations, until it is called off; from a buffer they may still be on the way."""
    start = 0
    with nullcontext() if staging is None else staging.buffer() as buffer:
        for piece in load:
            if stop.is_set():
                break
            destination = piece.of(destinations[piece.spec.name])
            if needs_staging(destination):
                assert buffer is not None
                piece.read(files, buffer.bytes[start : start + piece.nbytes].reshape(piece.count, piece.width))
                buffer.send(start, destination)
                start += piece.nbytes
            else:
                piece.read(files, destination.numpy())
    return load


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
    """Rows of a tensor, and bytes of each of them."""

    rows: range
    columns: range

    def __and__(self, other: "ByteBox") -> "ByteBox":
        """What both have."""
        rows, columns = (
            range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            for ours, theirs in ((self.rows, other.rows), (self.columns, other.columns))
        )
        return ByteBox(rows, columns)


def _box(spec: TensorSpec, dim: int | None, part: int, parts: int) -> ByteBox:
    """One of equal parts of a tensor along a dimension; None: all of it."""
    outer = spec.shard or 1  # the dimensions that a row counts
    rows, row = prod(spec.shape[:outer]), prod(spec.shape[outer:]) * TORCH_DTYPES[spec.dtype].itemsize
    if dim is None:
        return ByteBox(range(rows), range(row))
    if dim == 0:
        return ByteBox(range(part * rows // parts, (part + 1) * rows // parts), range(row))
    return ByteBox(range(rows), range(part * row // parts, (part + 1) * row // parts))


def _pieces(checkpoint: Checkpoint, naming: Naming, spec: TensorSpec, world: World) -> Iterator[TensorRows]:
    """This rank's part of a tensor, by rows that a buffer takes."""
    part_shape(spec, world.size)  # refuses ranks that do not divide it
    own = _box(spec, spec.shard, world.rank, world.size)
    locations = naming.locations(spec)
    # what is not cut lies whole in each of them
    for location in locations if locations[0].cut else locations[:1]:
        info, cut = _info(checkpoint, location), location.cut
        held = _box(spec, cut.dim, cut.part, cut.parts) if cut else _box(spec, None, 0, 1)
        wanted = own & held
        width, stride = len(wanted.columns), len(held.columns)
        if not wanted.rows or not width:
            continue
        at_once = PIECE // width
        assert at_once, spec.name
        begin = location.begin * DTYPE_BITS[location.dtype] // 8 + wanted.columns.start - held.columns.start
        for row in wanted.rows[::at_once]:
            yield TensorRows(
                spec=spec,
                info=info,
                first=row - own.rows.start,
                count=min(at_once, wanted.rows.stop - row),
                inside=wanted.columns.start - own.columns.start,
                row=len(own.columns),
                width=width,
                stride=stride,
                begin=begin + (row - held.rows.start) * stride,
                reciprocal=location.reciprocal,
            )


def _loads(pieces: Iterable[TensorRows]) -> Iterator[list[TensorRows]]:
    """Pieces that follow each other and together fit in a buffer."""
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
