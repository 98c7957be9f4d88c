"""Read checkpoint files into a model's parameters with several threads, each reading one piece at a time.

Bytes are read directly into host memory, and into GPU memory through staging buffers. GGUF blocks are arranged in their
layout where they end: in host memory by the threads, strip by strip, and on a GPU by `BlockArranger`.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from dsv4cli.engine.checkpoint.files import Files
from dsv4cli.engine.checkpoint.headers import DTYPE_BITS, Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.naming import Location, Naming, OfficialNaming
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system.threads import as_done
from dsv4cli.engine.weights.block_arranger import BlockArranger, StoredRows
from dsv4cli.engine.weights.block_layouts import BlockLayout, Bytes, Fp4Layout, TileLayout
from dsv4cli.engine.weights.byte_box import box_of
from dsv4cli.engine.weights.fill import Arrived, Destinations, Supply, damaged_scale, no_scales
from dsv4cli.engine.weights.staging import Buffer, Staging
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, damaged_blocks, tile_height

THREADS = 8
# bytes that a thread reads in one job, and the size of a staging buffer
PIECE = 16 * 1024 * 1024
# buffers beyond one per thread: an H200 copies from one at 54 GB/s, and a thread fills one at about 2 GB/s
SPARE_BUFFERS = 2
# bytes read at once from rows that are then copied, to keep some of their columns or to arrange blocks: they
# stay in a core's cache, and calls, for which threads wait for each other, are few (AMD EPYC, GB per second of CPU time
# of IQ2_XXS, Q2_K and Q8_0: 4.2, 3.5 and 3.8; with 1 MiB 4.3, 3.3 and 3.6; with 256 KiB 2.7, 2.4 and 2.6)
STRIP = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A piece of this rank's shard of a tensor: rows of it, or those columns of the rows that one stored tensor holds.

    Attributes:
        layout: layout of GGUF blocks in memory; None for other tensors. The piece is whole rows if there is one.
        tensors: those that the piece fills: `spec`, or the tensors of the layout.
        first, count: first row and number of rows of the shard.
        inside: bytes of each row before the piece.
        rows: rows of the shard.
        width: bytes of the piece in each row.
        stride: bytes of a row in the file.
        begin: offset of the piece in the stored tensor, in bytes.
        reciprocal: whether fp32 numbers are stored as 1 / x.
    """

    spec: TensorSpec
    info: TensorInfo
    layout: BlockLayout | None
    tensors: tuple[TensorSpec, ...]
    first: int
    count: int
    inside: int
    rows: int
    width: int
    stride: int
    begin: int
    reciprocal: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.count * self.width

    def of(self, destinations: Destinations) -> tuple[torch.Tensor, ...]:
        """Return the piece's view of the destination of each tensor: uint8 [count, n]."""
        every = [destinations[spec.name].view(-1).view(torch.uint8).view(self.rows, -1) for spec in self.tensors]
        own = [rows[self.first : self.first + self.count] for rows in every]
        return tuple(own) if self.layout else (own[0][:, self.inside : self.inside + self.width],)

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

    def arrange(self, files: Files, layout: BlockLayout, into: Sequence[Bytes]) -> None:
        """Read rows of GGUF blocks, check their scales, and arrange them in the tensors of their layout.

        Raises CheckpointError for a truncated file or an invalid scale.
        """
        for rows, strip in self._strips(files, layout.height):
            if damaged_blocks(layout.kind, strip).any():
                raise layout.damaged(self.tensors)
            layout.write(strip, [tensor[rows] for tensor in into])

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
    fp4: Mapping[str, tuple[TensorSpec, TensorSpec]] = MappingProxyType({}),
) -> Supply:
    """Return a supply for `fill` of this rank's shard of a checkpoint. The first error stops all threads.

    Whole rows are read of tensors that are sharded by columns.

    Args:
        naming: name and location of each tensor in the checkpoint.
        fp4: the weight and the scale that MXFP4 blocks become, instead of tiles, by the name of the tensor in `specs`.

    Raises CheckpointError if a tensor is missing or has another dtype or shape, a scale is invalid, or a file is
    truncated or cannot be read.
    """
    made = [partial(_pieces, checkpoint, naming, spec, fp4.get(spec.name), world) for spec in specs]
    return partial(_fill, made, threads)


def _fill(
    made: Iterable[Callable[[], Iterator[TensorRows]]], threads: int, destinations: Destinations
) -> Generator[Arrived, None, None]:
    pieces = [piece for of_tensor in made for piece in of_tensor()]
    pieces.sort(key=lambda piece: (piece.info.file, piece.info.begin + piece.begin))
    loads = list(_loads(pieces))
    device = next((destination.device for destination in destinations.values() if needs_staging(destination)), None)
    count = min(threads + SPARE_BUFFERS, len(loads))
    staging = None if device is None else Staging(device, count, PIECE)
    stop, arranger = threading.Event(), BlockArranger()
    with Files() as files:
        jobs = [partial(_carry, load, files, destinations, staging, stop) for load in loads]
        try:
            with closing(as_done(jobs, threads, stop)) as ended:
                for arrived, buffer, blocks in ended:
                    if buffer is not None and blocks:
                        buffer.join()
                        arranger.arrange(blocks)
                    yield from arrived
        finally:
            if staging is not None:
                staging.wait()
    arranger.raise_if_damaged()


def needs_staging(destination: torch.Tensor) -> bool:
    """Return whether files cannot be read into this memory directly."""
    return destination.device.type != "cpu"


def _carry(
    load: list[TensorRows], files: Files, destinations: Destinations, staging: Staging | None, stop: threading.Event
) -> tuple[list[Arrived], Buffer | None, list[StoredRows]]:
    """Read pieces to their destinations until stopped.

    Return what arrived, the buffer from which copies may still run, and the copies of GGUF blocks, which have yet to be
    arranged.
    """
    start, arrived, blocks = 0, list[Arrived](), list[StoredRows]()
    with nullcontext() if staging is None else staging.buffer() as buffer:
        for piece in load:
            if stop.is_set():
                break
            places, layout = piece.of(destinations), piece.layout
            if needs_staging(places[0]):
                assert buffer is not None
                piece.read(files, buffer.bytes[start : start + piece.nbytes].reshape(piece.count, piece.width))
                for place in places:
                    buffer.send(start, place)
                    start += place.nbytes
                if layout is not None:
                    blocks.append(StoredRows(layout, piece.tensors, places))
            elif layout is not None:
                piece.arrange(files, layout, [place.numpy() for place in places])
            else:
                piece.read(files, places[0].numpy())
            arrived += ((spec.name, place.nbytes) for spec, place in zip(piece.tensors, places, strict=True))
    return arrived, buffer, blocks


def _info(checkpoint: Checkpoint, location: Location) -> TensorInfo:
    info = checkpoint.tensors.get(location.name)
    if info is None:
        raise CheckpointError(f"{checkpoint.folder}: tensor {location.name} is missing")
    if (info.dtype, info.shape) != (location.dtype, location.shape):
        found, expected = f"{info.dtype} {list(info.shape)}", f"{location.dtype} {list(location.shape)}"
        raise CheckpointError(f"{checkpoint.folder}: {location.name} is {found}, expected {expected}")
    return info


def _layout(spec: TensorSpec, rows: int) -> BlockLayout | None:
    """Return the layout of this many rows of a tensor that is not FP4."""
    kind = BLOCK_DTYPES.get(spec.dtype)
    return None if kind is None else TileLayout(kind, tile_height(kind, rows))


def _pieces(
    checkpoint: Checkpoint, naming: Naming, spec: TensorSpec, fp4: tuple[TensorSpec, TensorSpec] | None, world: World
) -> Iterator[TensorRows]:
    """Yield this rank's shard of a tensor in pieces that each fit in a buffer."""
    part_shape(spec, world.size)  # raises if the ranks do not divide it
    own = box_of(spec, spec.shard, world.rank, world.size)
    locations, layout = naming.locations(spec), Fp4Layout() if fp4 else _layout(spec, len(own.rows))
    # if it is not split, each location has all of it
    for location in locations if locations[0].cut else locations[:1]:
        info, cut = _info(checkpoint, location), location.cut
        held = box_of(spec, cut.dim, cut.part, cut.parts) if cut else box_of(spec, None, 0, 1)
        wanted = own & held
        width, stride = len(wanted.columns), len(held.columns)
        if not wanted.rows or not width:
            continue
        at_once = PIECE // width
        if layout is not None:
            at_once -= at_once % layout.height
            assert width == len(own.columns), spec.name
        assert at_once, spec.name
        begin = location.begin * DTYPE_BITS[location.dtype] // 8 + wanted.columns.start - held.columns.start
        for row in wanted.rows[::at_once]:
            yield TensorRows(
                spec=spec,
                info=info,
                layout=layout,
                tensors=fp4 or (spec,),
                first=row - own.rows.start,
                count=min(at_once, wanted.rows.stop - row),
                inside=wanted.columns.start - own.columns.start,
                rows=len(own.rows),
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
