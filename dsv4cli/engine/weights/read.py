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
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system.threads import as_done
from dsv4cli.engine.weights.fill import TORCH_DTYPES, Arrived, Destinations, Supply, damaged_scale
from dsv4cli.engine.weights.staging import Staging
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.formats import E8M0_NAN

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
    """Rows of this rank's part of a tensor.

    first, count: rows of the part. width: bytes of a row of the part. stride: bytes of a row in the file. begin: byte
    of the tensor where the part's first row begins.
    """

    spec: TensorSpec
    info: TensorInfo
    first: int
    count: int
    width: int
    stride: int
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.count * self.width

    def of(self, destination: torch.Tensor) -> torch.Tensor:
        """The piece's part of its tensor's destination: uint8 [nbytes]."""
        start = self.first * self.width
        return destination.view(-1).view(torch.uint8)[start : start + self.nbytes]

    def read(self, files: Files, into: Bytes) -> None:
        """Fills uint8 [nbytes]. Raises CheckpointError for a file that ends before and for a scale byte 255."""
        begin = self.begin + self.first * self.stride
        if self.width == self.stride:
            files.read(self.info, begin, into.data)
        else:
            self._read_columns(files, begin, into.reshape(self.count, self.width))
        if self.spec.is_scale and (into == E8M0_NAN).any():
            raise damaged_scale(self.spec)

    def _read_columns(self, files: Files, begin: int, into: Bytes) -> None:
        """Reads whole rows, except for what is before the first and behind the last byte wanted, and keeps columns."""
        at_once = max(1, STRIP // self.stride)
        strip = np.empty(at_once * self.stride, np.uint8)
        for row in range(0, self.count, at_once):
            rows = min(at_once, self.count - row)
            files.read(self.info, begin + row * self.stride, strip[: (rows - 1) * self.stride + self.width].data)
            into[row : row + rows] = strip[: rows * self.stride].reshape(rows, self.stride)[:, : self.width]


def stored(checkpoint: Checkpoint, specs: Iterable[TensorSpec], world: World, threads: int = THREADS) -> Supply:
    """This rank's part of each tensor of a checkpoint, for `fill`; of one that is cut by columns whole rows are read.

    The first error ends all threads. Raises CheckpointError for a tensor that is not there or has another dtype or
    shape, a scale byte 255, a file that cannot be read or ends too early.
    """
    return partial(_fill, checkpoint, list(specs), world, threads)


def _fill(
    checkpoint: Checkpoint, specs: list[TensorSpec], world: World, threads: int, destinations: Destinations
) -> Generator[Arrived, None, None]:
    pieces = [piece for spec in specs for piece in _pieces(spec, _info(checkpoint, spec), world)]
    pieces.sort(key=lambda piece: (piece.info.file, piece.info.begin, piece.first))
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
                piece.read(files, buffer.bytes[start : start + piece.nbytes])
                buffer.send(start, destination)
                start += piece.nbytes
            else:
                piece.read(files, destination.numpy())
    return load


def _info(checkpoint: Checkpoint, spec: TensorSpec) -> TensorInfo:
    info = checkpoint.tensors.get(spec.name)
    if info is None:
        raise CheckpointError(f"{checkpoint.folder}: tensor {spec.name} is missing")
    if (info.dtype, info.shape) != (spec.dtype, spec.shape):
        found, expected = f"{info.dtype} {list(info.shape)}", f"{spec.dtype} {list(spec.shape)}"
        raise CheckpointError(f"{checkpoint.folder}: {spec.name} is {found}, expected {expected}")
    return info


def _pieces(spec: TensorSpec, info: TensorInfo, world: World) -> Iterator[TensorRows]:
    """This rank's part of a tensor, by rows that a buffer takes."""
    shape, size = part_shape(spec, world.size), TORCH_DTYPES[spec.dtype].itemsize
    outer = spec.shard or 1  # the dimensions that a row counts
    rows, width, stride = prod(shape[:outer]), prod(shape[outer:]) * size, prod(spec.shape[outer:]) * size
    begin = 0
    if spec.shard is not None:
        begin = world.rank * (width if spec.shard else rows * width)
    at_once = PIECE // width
    assert at_once, spec.name
    for first in range(0, rows, at_once):
        yield TensorRows(spec, info, first, min(at_once, rows - first), width, stride, begin)


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
