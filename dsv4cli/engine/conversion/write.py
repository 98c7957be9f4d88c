"""Carries out a plan: several threads read, convert and write matrices. Files appear complete or not at all."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch

from dsv4cli.engine.checkpoint.headers import UNFINISHED
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.values import Raw
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.conversion.gguf.encode import encode_matrix
from dsv4cli.engine.conversion.hashed_file import ByteBudget, HashedFile
from dsv4cli.engine.conversion.journal import Journal
from dsv4cli.engine.conversion.manifest import changed, hash_file
from dsv4cli.engine.conversion.plan import FilePlan, Item, Slot, chunks
from dsv4cli.engine.conversion.recode import Recipe, Recoder
from dsv4cli.engine.system.atomic import publish
from dsv4cli.engine.system.threads import Progress

# bytes written in one step of a worker: on a CPU its arrays stay in the second-level cache, on a GPU a step is worth
# its transfers
CPU_STEP, GPU_STEP = 1 << 20, 1 << 26
SCALES = 1 << 22
# an interpreter with PyTorch, its tables, and the plan of 70,000 tensors, measured
BASE_MEMORY = 600 * 10**6


@dataclass(frozen=True)
class FileDone:
    """An output file that is complete under its final name.

    Attributes:
        resumed: whether an earlier run had completed it.
        written: bytes that this run wrote.
    """

    name: str
    nbytes: int
    tensors: int
    resumed: bool
    written: int


def carry_out(
    files: Iterable[FilePlan],
    recoder: Recoder,
    output: Path,
    journal: Journal,
    *,
    workers: int,
    progress: Progress | None = None,
) -> Iterator[FileDone]:
    """Write the files in order and yield each when it is complete. What the journal records is kept.

    A file grows inside the journal's folder and is hashed meanwhile. It gets its final name when all bytes are synced
    and
    hashed. A file that exists must have the hash in the journal; else UnsoundResult is raised. After any other error
    the
    journal records what was written.

    Args:
        progress: called with bytes that exist, those of earlier runs first, and bytes in total.
    """
    files = tuple(files)
    there = {file.name: _bytes_there(file, output, journal) for file in files}
    tally = _Tally(sum(file.nbytes for file in files), sum(there.values()), progress)
    with _one_thread_each(), ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(1) as committer:
        budget = ByteBudget(waiting_bytes(recoder.device, workers))
        writer = _FileWriter(recoder, journal, pool, committer, tally, budget)
        ending: deque[tuple[FileDone, Future[None]]] = deque()
        stop = threading.Event()
        try:
            for file in files:
                path, temporary = output / file.name, output / UNFINISHED / file.name
                resumed = _is_complete(path, journal)
                if resumed:
                    task = pool.submit(_check, path, journal, stop)
                else:
                    task = pool.submit(_complete, path, writer.write(file, temporary), journal, stop)
                written = file.nbytes - there[file.name]
                ending.append((FileDone(file.name, file.nbytes, len(file.keys), resumed, written), task))
                while ending and ending[0][1].done():
                    yield _ended(*ending.popleft())
            while ending:
                yield _ended(*ending.popleft())
        finally:
            stop.set()


def _is_complete(path: Path, journal: Journal) -> bool:
    return path.exists() and path.name in journal.hashes


def _batches_there(file: FilePlan, temporary: Path, journal: Journal) -> int:
    """Return how many batches of an unfinished file an earlier run has written; 0 if the file was removed."""
    return journal.batches.get(file.name, 0) if temporary.exists() else 0


def _bytes_there(file: FilePlan, output: Path, journal: Journal) -> int:
    """Return the bytes of a file that need not be written again."""
    if _is_complete(output / file.name, journal):
        return file.nbytes
    done = file.batches[: _batches_there(file, output / UNFINISHED / file.name, journal)]
    return sum(item.nbytes for batch in done for item in batch)


def _complete(path: Path, written: HashedFile, journal: Journal, stop: threading.Event) -> None:
    """Record a written file's hash in the journal, then rename it to its final name."""
    with closing(written):
        journal.complete(path.name, written.sha256(stop))
    publish(written.path, path)


def _check(path: Path, journal: Journal, stop: threading.Event) -> None:
    if hash_file(path, stop=stop) != journal.hashes[path.name]:
        raise changed(path)


def _ended(done: FileDone, task: "Future[None]") -> FileDone:
    task.result()
    return done


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from starting threads of its own: the workers are the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Tally:
    """Counts bytes done and reports them to the caller of carry_out."""

    def __init__(self, total: int, done: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress = total, done, progress
        self.lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


@dataclass
class _FileWriter:
    """Writes one file after another with the same threads."""

    recoder: Recoder
    journal: Journal
    pool: ThreadPoolExecutor
    committer: ThreadPoolExecutor
    tally: _Tally
    budget: ByteBudget

    def write(self, file: FilePlan, temporary: Path) -> HashedFile:
        """Return the file with all bytes synced. The caller closes it."""
        done = _batches_there(file, temporary, self.journal)
        if done != self.journal.batches.get(file.name, done):
            self.journal.record(file.name, done)
        written = HashedFile(temporary, file.nbytes, self.budget)
        try:
            written.write(memoryview(file.header), 0)
            left = (slot.offset for batch in file.batches[done:] for item in batch for slot in item.slots)
            written.has(len(file.header), min(left, default=file.nbytes))
            for gap in file.gaps:
                written.has(*gap)
            self.tally.add(len(file.header) + sum(end - begin for begin, end in file.gaps))
            self._batches(file, written, done)
            os.fsync(written.descriptor)
        except BaseException:
            written.close()
            raise
        return written

    def _batches(self, file: FilePlan, written: HashedFile, done: int) -> None:
        """Write the batches from number `done` on. While one is synced, the next is written."""
        commits: list[Future[None]] = []
        try:
            for number in range(done, len(file.batches)):
                self._run([self.pool.submit(task) for task in self._tasks(file.batches[number], written)])
                if commits:
                    commits.pop().result()
                if number + 1 < len(file.batches):
                    commits.append(self.committer.submit(self._commit, written.descriptor, file.name, number + 1))
        finally:
            # the descriptor is about to be closed
            wait(commits)

    def _run(self, tasks: list[Future[None]]) -> None:
        try:
            finished = wait(tasks, return_when=FIRST_EXCEPTION).done
            for task in finished:
                task.result()
        finally:
            # after an error or Ctrl-C: nothing may write to a descriptor that is about to be closed
            for task in tasks:
                task.cancel()
            wait(tasks)

    def _commit(self, descriptor: int, name: str, batches: int) -> None:
        os.fdatasync(descriptor)
        self.journal.record(name, batches)

    def _tasks(self, batch: Iterable[Item], written: HashedFile) -> Iterator[Callable[[], None]]:
        """Yield steps of work in file order, so that what the hash needs next is made next."""
        for item in batch:
            recipe = self.recoder.recipe(item.matrix)
            steps = list(chunks(item, step_bytes(self.recoder.device)))
            # a value that the rows of a matrix share is computed once, by one thread
            for rows in [steps] if recipe.shares else [[step] for step in steps]:
                yield partial(self._rows, item, recipe, rows, written)

    def _rows(self, item: Item, recipe: Recipe, steps: Iterable[tuple[int, int]], written: HashedFile) -> None:
        for nbytes in write_rows(item, recipe, steps, written.write):
            self.tally.add(nbytes)


def step_bytes(device: torch.device) -> int:
    """Return the bytes to write in one step on a device."""
    return CPU_STEP if device.type == "cpu" else GPU_STEP


def waiting_bytes(device: torch.device, workers: int) -> int:
    """Return the maximum bytes in memory that are not hashed yet: some steps per thread, and a matrix's scales.

    The scales come after their weight in the file.
    """
    return 2 * workers * step_bytes(device) + SCALES


def memory_bytes(matrices: Iterable[Mapping[Role, TensorSpec]], device: torch.device, workers: int) -> int:
    """Return the peak memory of a conversion, with the interpreter and PyTorch.

    Each thread holds one step as read, as fp32 at most, and as written. For NVFP4 it first reads two whole matrices, to
    find
    the scale that they share. In addition, pieces wait to be hashed.
    """
    whole = 0
    for roles in matrices:
        if "weight_scale_2" in roles:
            whole = max(whole, 2 * 4 * prod(roles["weight"].shape) * 2)
    return BASE_MEMORY + workers * (whole + 16 * step_bytes(device)) + waiting_bytes(device, workers)


def write_rows(
    item: Item, recipe: Recipe, steps: Iterable[tuple[int, int]], write: Callable[[memoryview, int], int]
) -> Iterator[int]:
    """Read, convert and write the rows of one item, a step at a time; yield the bytes of each step.

    Args:
        write: writes bytes to an offset of the file.
    """
    for begin, end in steps:
        arrays = recipe.rows(begin, end)
        if item.encoding:
            arrays = {"weight": encode_matrix(item.matrix, item.encoding, arrays)}
        written = 0
        for slot in item.slots:
            part = _part(arrays[slot.role], slot)
            # one number for the whole matrix is written once
            if part.ndim or begin == item.rows[0]:
                written += write(part.reshape(-1).view(np.uint8).data, _offset(slot, item, begin, part))
        yield written


def _part(array: Raw, slot: Slot) -> Raw:
    """Return the columns of the rows that a slot's location holds, in its layout."""
    cut = slot.location.cut
    if slot.location.reciprocal:
        return np.asarray(np.reciprocal(array))
    if cut is None or cut.dim == 0:
        return array
    return np.ascontiguousarray(array[:, cut.of(array.shape)])


def _offset(slot: Slot, item: Item, begin: int, part: Raw) -> int:
    """Return the file offset of the rows that start with the weight's row `begin`."""
    row = (begin - item.rows[0]) // slot.rows_each
    return slot.offset + row * (part.nbytes // len(part) if part.ndim else 0)
