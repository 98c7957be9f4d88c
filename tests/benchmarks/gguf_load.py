"""How fast a GGUF file loads on this machine: docs/internals/performance.md, "Loading GGUF".

python -m tests.benchmarks.gguf_load --layers 3 --experts 192 --threads 8 --threads 16     (6.8 GB)

Writes a file with the tensors of Flash in the types of ds4's 2-bit files, then loads it: once after its pages were
dropped from the page cache, and for each number of threads twice from the page cache. Prints GB/s of the file, seconds
before the first and after the last bytes, the cores that were busy, and the peak of the process's memory beyond what it
had before and, on a CPU, beyond the weights. On a GPU, also the peak of its memory beyond the weights, in tensors and
as the allocator reserved it.
"""

import argparse
import ctypes
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time
from unittest.mock import patch

import numpy as np
import torch

from dsv4cli.engine.checkpoint.gguf.header import gguf_header, tensor_bytes, tensor_places
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.config.presets import FLASH, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.gguf.metadata import gguf_metadata
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.weights import read
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.ggml.types import TYPES
from tests.benchmarks.gguf_speed import RECIPES, file_types
from tests.support.ggml_blocks import random_rows

NANO = Path("dsv4cli/nano")
STATM = Path("/proc/self/statm")
# bytes of random blocks that each tensor repeats
PATTERN = 1 << 22


def write_file(path: Path, layers: int, experts: int, types: list[str]) -> int:
    """Writes the file and returns its size."""
    # the vocabulary in the metadata is nano's, which is smaller; loading does not read it
    config = parse_config(shortened(FLASH, layers, experts), "flash").without_drafter()
    nano = identify(NANO)
    metadata = gguf_metadata(nano, replace(config, vocab_size=nano.config.vocab_size), Formats(), {})
    naming = GgufNaming(config.n_routed_experts, {})
    kinds = file_types(config, types, RECIPES["ds4"])
    tensors = {}
    for spec in expected_tensors(config, Formats("f32", "f32", "f32")).values():
        kind = "I32" if spec.dtype == "I64" else kinds[gguf_name(spec)]
        tensors[gguf_name(spec)] = kind, naming.shape(spec)
    with path.open("wb") as file:
        start = file.write(gguf_header(metadata | {"deepseek4.vocab_size": config.vocab_size}, tensors))
        for (begin, _), (kind, shape) in zip(tensor_places(tensors), tensors.values(), strict=True):
            file.seek(start + begin)
            left, pattern = tensor_bytes(kind, shape), pattern_of(kind)
            while left:
                left -= file.write(pattern[:left])
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def pattern_of(kind: str) -> memoryview:
    """Random blocks of a type; zeros for token ids."""
    if kind == "I32":
        return memoryview(bytes(PATTERN))
    return memoryview(random_rows(kind, 1, PATTERN // TYPES[kind].nbytes, 1, 0.02).reshape(-1).view(np.uint8))


class PeakMemory(Thread):
    """A thread that samples the resident memory of the process while its block runs; `most` is the largest sample."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.most = resident()
        self.done = Event()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.join()

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.most = max(self.most, resident())


def resident() -> int:
    """Bytes of resident memory of the process."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget(device: torch.device) -> None:
    """Returns what allocators keep of the model of the run before: it would count as memory that the process had."""
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned buffers, so that each run pays for them
        torch.cuda.reset_peak_memory_stats()


def load(path: Path, device: torch.device, threads: int, what: str) -> None:
    """Loads the file once and prints how long that took."""
    forget(device)
    on_gpu, times = device.type == "cuda", list[float]()
    size, begin, begun = path.stat().st_size, perf_counter(), process_time()
    # blocks stay as stored, whatever memory a CPU has
    supply = partial(read.stored, threads=threads)
    with PeakMemory() as memory, use("triton"), patch("dsv4cli.engine.weights.gguf.stored", supply):
        model = load_model(
            FolderSource("benchmark", path),
            Numerics.reference(),
            device=device,
            progress=lambda done, total: times.append(perf_counter()),
        )
        if on_gpu:
            torch.cuda.synchronize()
    end, cpu = perf_counter(), process_time() - begun
    elapsed, first, last = end - begin, times[1] - begin, end - times[-1]
    held = sum(parameter.nbytes for parameter in model.parameters())
    peak = (memory.most - memory.before - (0 if on_gpu else held)) / 1e9
    print(
        f"{what}, {threads} threads: {elapsed:.2f} s (first bytes after {first:.2f} s, {last:.2f} s after the last), "
        f"{size / elapsed / 1e9:.2f} GB/s, {cpu / elapsed:.1f} cores busy, {size / cpu / 1e9:.2f} GB per second of CPU "
        f"time, peak {peak:.2f} GB",
        end="" if on_gpu else "\n",
        flush=True,
    )
    if on_gpu:
        tensors, reserved = torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - held
        print(f", on the GPU {tensors / 1e9:.2f} GB in tensors, {reserved / 1e9:.2f} GB reserved", flush=True)


def main() -> None:
    """Writes the file and loads it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--types", default="IQ2_XXS,Q2_K,Q8_0", help="of w1 and w3 of experts, of w2, of all others")
    parser.add_argument("--threads", type=int, action="append", help=f"{read.THREADS} if absent")
    parser.add_argument("--folder", type=Path, help="for the file; a temporary folder if absent")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.zeros(1, device=device)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        path, begin = Path(folder) / "benchmark.gguf", perf_counter()
        size = write_file(path, asked.layers, asked.experts, asked.types.split(","))
        cores = len(os.sched_getaffinity(0))
        print(f"{cores} cores, {device}: {size / 1e9:.2f} GB written in {perf_counter() - begin:.1f} s", flush=True)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        first, *others = asked.threads or [read.THREADS]
        load(path, device, first, "not in the page cache")
        for threads in (first, first, *others, *others):
            load(path, device, threads, "in the page cache")


if __name__ == "__main__":
    main()
