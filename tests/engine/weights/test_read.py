"""Reading weights by threads: the bytes that the library reads, in bounded memory, and an end to every thread."""

import errno
import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsv4cli.engine.checkpoint import files
from dsv4cli.engine.checkpoint.headers import Checkpoint, open_checkpoint
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.weights import read, staging
from dsv4cli.engine.weights.fill import TORCH_DTYPES, local_slice
from dsv4cli.engine.weights.read import stored
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, block_dtype, to_tiles
from tests.support.ggml_blocks import random_rows
from tests.support.late_buffer import LateBuffer
from tests.support.slow import slow_rows
from tests.support.waiting import comes

# dtypes of safetensors files; GGUF files are read in test_gguf_load.py
STORED = [dtype for dtype in TORCH_DTYPES if dtype not in BLOCK_DTYPES]
# dtype, shape, cut: rows, columns and neither of every dtype; sizes that pieces do not divide, and one row
TABLE = [
    *((dtype, (128, 256), cut) for dtype in STORED for cut in (None, 0, 1) if dtype != "F8_E4M3"),
    *(("F8_E4M3", (512, 512), cut) for cut in (None, 0, 1)),
    ("BF16", (4, 8, 12), 1),
    ("BF16", (8, 7), 0),
    ("F32", (1, 511), None),
    ("I64", (997,), None),
    ("F32", (1,), None),
    ("I8", (1024, 4), 1),
    *[("BF16", (3, 5), None)] * 9,  # several in a buffer
]


@pytest.fixture
def folder(tmp_path):
    """The tensors of TABLE in three files."""
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        tensors = {}
        for spec in specs()[number::3]:
            count = torch.Size(spec.shape).numel() * TORCH_DTYPES[spec.dtype].itemsize
            raw = torch.randint(0, 255, (count,), dtype=torch.uint8, generator=generator)
            tensors[spec.name] = raw.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        save_file(tensors, tmp_path / f"model-{number + 1:05}-of-00003.safetensors")
    return tmp_path


@pytest.fixture(params=["direct", "staged", "staged late"])
def way(request, monkeypatch):
    """All ways on a CPU, with pieces so small that most tensors are cut and buffers are used again."""
    monkeypatch.setattr(read, "PIECE", 2048)
    monkeypatch.setattr(read, "STRIP", 700)
    if request.param != "direct":
        monkeypatch.setattr(read, "needs_staging", lambda destination: True)
    if request.param == "staged late":
        monkeypatch.setattr(staging, "Buffer", LateBuffer)
    return request.param


def specs() -> list[TensorSpec]:
    return [
        TensorSpec(f"t{number}", dtype, shape, "test", 0, shard, role="scale" if dtype == "F8_E8M0" else "weight")
        for number, (dtype, shape, shard) in enumerate(TABLE)
    ]


def destinations_of(world: World = SINGLE, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.full((torch.Size(part_shape(spec, world.size)).numel(),), 3, device=device)
        .to(TORCH_DTYPES[spec.dtype])
        .view(part_shape(spec, world.size))
        for spec in specs()
    }


def by_library(checkpoint: Checkpoint, spec: TensorSpec, world: World) -> torch.Tensor:
    with safe_open(str(checkpoint.tensors[spec.name].file), framework="pt") as file:
        return file.get_slice(spec.name)[local_slice(spec, world)]


def check(folder: Path, world: World, threads: int, device: str = "cpu") -> None:
    checkpoint, destinations = open_checkpoint(folder), destinations_of(world, device)
    arrived = dict.fromkeys(destinations, 0)
    for name, nbytes in stored(checkpoint, specs(), world, threads)(destinations):
        arrived[name] += nbytes
    for spec in specs():
        expected, destination = by_library(checkpoint, spec, world), destinations[spec.name].cpu()
        assert torch.equal(destination.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), spec
    assert arrived == {name: destination.nbytes for name, destination in destinations.items()}


@pytest.mark.parametrize(("size", "threads"), [*slow_rows((1, 1)), (2, 3), *slow_rows((4, 20))])
def test_the_bytes_are_the_library_s(folder, way, size, threads):
    for rank in range(size):
        check(folder, World(rank, size), threads)


def test_pieces_of_blocks_have_tiles_as_high_as_those_of_the_matrix(tmp_path, way):
    # 20 rows in tiles of 4; the first piece has 16 of them
    rows = random_rows("Q4_0", 20, 7, seed=1)
    save_file({"w": torch.from_numpy(rows)}, tmp_path / "model.safetensors")
    naming = SimpleNamespace(locations=lambda spec: (Location("w", "U8", (20, 126)),))
    found = torch.empty(20, 126, dtype=torch.uint8)
    spec = TensorSpec("w", block_dtype("Q4_0"), (20, 126), "test", 0)
    arrived = list(stored(open_checkpoint(tmp_path), [spec], SINGLE, naming=naming)({"w": found}))
    assert sorted(nbytes for _, nbytes in arrived) == [4 * 126, 16 * 126]
    np.testing.assert_array_equal(found, to_tiles("Q4_0", rows, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_the_bytes_arrive_on_a_gpu(folder, monkeypatch, size):
    for piece in (2048, read.PIECE):
        monkeypatch.setattr(read, "PIECE", piece)
        check(folder, World(size - 1, size), 4, "cuda")


# what is asked for -> words of the error
REFUSED = {
    "missing": ({"name": "ghost"}, "tensor ghost is missing"),
    "other dtype": ({"dtype": "F32"}, r"t0 is BF16 \[128, 256\], expected F32 \[128, 256\]"),
    "other shape": ({"shape": (128, 128)}, r"t0 is BF16 \[128, 256\], expected BF16 \[128, 128\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_the_table_says_is_refused(folder, case):
    change, words = REFUSED[case]
    asked = [replace(specs()[0], **change), *specs()[1:]]
    with pytest.raises(CheckpointError, match=words):
        list(stored(open_checkpoint(folder), asked, SINGLE)(destinations_of()))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scale_byte_255_is_refused_by_the_rank_that_reads_it(folder, way, rank):
    spec = next(spec for spec in specs() if spec.is_scale and spec.shard == 1)
    info = (checkpoint := open_checkpoint(folder)).tensors[spec.name]
    with info.file.open("r+b") as file:
        file.seek(info.end - 1)
        file.write(b"\xff")
    words = pytest.raises(CheckpointError, match=f"{spec.name} holds the scale byte 255")
    with words if rank else nullcontext():
        check_ends(stored(checkpoint, [spec], World(rank, 2))(destinations_of(World(rank, 2))))


def check_ends(arrivals) -> None:
    """Takes everything; afterwards no thread is left."""
    before = threading.active_count()
    try:
        list(arrivals)
    finally:
        assert threading.active_count() == before


def test_a_file_cut_meanwhile_ends_all_threads(folder, way):
    checkpoint = open_checkpoint(folder)
    info = max(checkpoint.tensors.values(), key=lambda info: (info.file, info.end))
    os.truncate(info.file, info.end - 1)
    with pytest.raises(CheckpointError, match=f"{info.file} ends inside {info.name}") as caught:
        check_ends(stored(checkpoint, specs(), SINGLE, 4)(destinations_of()))
    assert caught.value.remedy == f"download {info.file.name} again"


def test_a_disk_that_fails_ends_all_threads(folder, way, monkeypatch):
    reads = []

    def preadv(*arguments):
        reads.append(arguments)
        if len(reads) == 5:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    real = os.preadv
    monkeypatch.setattr(files.os, "preadv", preadv)
    words = r"model-00001-of-00003\.safetensors cannot be read at t\d+: Input/output error"
    with pytest.raises(CheckpointError, match=words):
        check_ends(stored(open_checkpoint(folder), specs(), SINGLE, 2)(destinations_of()))
    # the other thread may have been inside a piece
    assert len(reads) < 50


def test_more_files_than_a_process_may_open(folder, monkeypatch):
    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(files, "open_file", refuse)
    with pytest.raises(CheckpointError, match="Too many open files") as refused:
        check_ends(stored(open_checkpoint(folder), specs(), SINGLE, 2)(destinations_of()))
    assert "`ulimit -n 4096`" in refused.value.remedy


def test_a_short_read_goes_on(folder, way, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(files.os, "preadv", lambda file, into, at: real(file, [into[0][:1000]], at))
    check(folder, World(1, 2), 2)


@pytest.mark.parametrize("piece", [2048, read.PIECE], ids=["between pieces", "inside a load"])
def test_an_interrupt_ends_at_once(folder, way, monkeypatch, piece):
    main, stop, reads = threading.get_ident(), threading.Event(), []

    def interrupted(*arguments):
        reads.append(arguments)
        if len(reads) == 1:
            signal.pthread_kill(main, signal.SIGINT)
        assert stop.wait(60)  # no read ends before the threads are called off
        return real(*arguments)

    real = os.preadv
    monkeypatch.setattr(files.os, "preadv", interrupted)
    monkeypatch.setattr(read, "PIECE", piece)
    monkeypatch.setattr(read, "threading", SimpleNamespace(Event=lambda: stop))
    checkpoint, destinations = open_checkpoint(folder), destinations_of()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        list(stored(checkpoint, specs(), SINGLE, 2)(destinations))
    assert len(reads) <= 2  # each of two threads ends the read that it is in, and begins no other
    assert comes(lambda: threading.active_count() == before)


def test_staging_is_bounded_and_waits(monkeypatch):
    waits, order = threading.Event(), []

    class Free(SimpleQueue):
        def get(self):
            if self.empty():
                waits.set()
            return super().get()

    monkeypatch.setattr(staging, "SimpleQueue", Free)
    pool = staging.Staging(torch.device("cpu"), 2, 100)

    def third() -> None:
        with pool.buffer() as buffer:
            order.append(buffer)

    with pool.buffer() as first:
        with pool.buffer() as second:
            assert second is not first
            thread = threading.Thread(target=third)
            thread.start()
            assert waits.wait(60)
            assert order == []
        thread.join()
        assert order == [second]
    sent = torch.zeros(10, dtype=torch.uint8)
    with pool.buffer() as buffer:
        buffer.bytes[5:15] = range(10)
        buffer.send(5, sent)
    pool.wait()
    assert sent.tolist() == list(range(10))


class FakeStream:
    """A CUDA stream that records what waits for what."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append((self.name, other.name))

    def synchronize(self) -> None:
        self.waits.append(("host", self.name))


def test_a_buffer_s_stream_and_the_current_one_wait_for_each_other(monkeypatch):
    waits, empty = list[tuple[str, str]](), torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("own", waits))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("current", waits))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda size, *, pin_memory, **options: empty(size, **options))
    buffer = staging.Buffer(torch.device("cuda", 0), 16)
    # pending work may still use the destinations
    assert waits == [("own", "current")]
    buffer.join()
    assert waits[1:] == [("current", "own")]
    buffer.wait()
    assert waits[2:] == [("host", "own")]
