"""Compiles DeepSeek-V4-Flash's launches for GPUs that are not there, and prints a line of JSON for each.

python -m tests.benchmarks.launches prompt 86,120   the three kernels of a prompt that take the most shared memory
python -m tests.benchmarks.launches all 90          every kernel, as its first and as its last operation launches it

A process of its own: tests set TRITON_INTERPRET. Triton keeps what it has compiled, so a second time takes seconds.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dsv4cli.engine.profiling import inputs as inputs
from dsv4cli.engine.profiling import kernels as profiled
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.kernels import expert_cache, experts, gemm, hyper_connections, indexer, routing
from dsv4cli.kernels.all_reduce import PROGRAMS, SymmetricBuffers, all_reduce, buffer_shape
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support import no_compiler as no_compiler
from tests.support.card import CARDS, inserted

Operation = Callable[[], object]
INT32, INT64, CODES, E8M0 = torch.int32, torch.int64, torch.int8, torch.float8_e8m0fnu
LARGEST = (
    "experts.kernel.grouped_gemm.down",
    "hyper_connections.kernel.project.mix_and_project",
    "routing.kernel._logits",
)
# ranks, tokens, context
SCENES = (
    (1, 1, 4096), (1, 1, 131072), (2, 1, 4096), (1, 2, 4096), (1, 16, 4096), (2, 16, 4096), (1, 64, 4096),
    (1, 256, 4096), (1, 1024, 4096), (1, 4096, 8192),
)  # fmt: skip


def prompt() -> Iterator[Operation]:
    """4,096 tokens through a layer's router and experts, these as every card but Hopper takes them; 1,000, which every
    card takes alike, through hyper-connections."""
    x, bf16 = _make(4096, 4096), torch.bfloat16
    router = x, _make(256, 4096), _real(256)
    yield partial(routing.route, *router, 6, 1.5)
    mixed = _make(1000, 4096), _make(1000, 4, 4096), _real(1000, 4), _real(1000, 4, 4)
    connection = hyper_connections.Connection(_real(24, 16384), _real(3), _real(24), 20, 1e-6, 1e-6)
    yield partial(hyper_connections.connect_post_pre, *mixed, connection, _make(4096))
    up, down = _fp4(256, 2048, 4096), _fp4(256, 4096, 2048)
    chosen = _make(4096, 6, dtype=INT64), _real(4096, 6)
    yield partial(experts.routed_experts, x, experts.ExpertWeights(up, down, up), *chosen, 10.0, x.dtype == bf16)


def every() -> Iterator[Operation]:
    """What `dsv4 profile kernels` measures, at these shapes, and what it does not: sums over ranks, experts in host
    memory, weights in other formats, keys in bf16."""
    shapes = {ranks: profiled.read_shapes("flash", ranks) for ranks in {bench[0] for bench in SCENES}}
    for ranks, tokens, context in SCENES:
        bench = _Scene(shapes[ranks], tokens, context, torch.device("cuda", 0))
        for case in (case for family in profiled.FAMILIES for case in family(bench)):
            work = case.build(bench)
            yield partial(work.run, *work.arguments)
    for ranks in (2, 4):
        buffers = tuple(_make(*buffer_shape(ranks), dtype=INT32) for _ in range(ranks))
        yield partial(
            all_reduce, _real(1, 4096), torch.bfloat16, SymmetricBuffers(0, buffers, _make(PROGRAMS, dtype=INT32))
        )
    plan = expert_cache.ExpertCache(*(_make(count, dtype=INT64) for count in (256, 22, 22, 1, 3)), 212, 234)
    held, stacks = [[*_fp4(count, 2048, 4096)[:2], *_fp4(count, 4096, 2048)[:2]] for count in (44, 256)]
    yield partial(expert_cache.fetch, _make(1, 6, dtype=INT64), plan, held, stacks)
    for tokens in (1, 64, 4096):
        yield partial(gemm.linear, _make(tokens, 4096), StoredMatrix(_make(1024, 4096)))
        yield partial(gemm.linear_fp32, _real(tokens, 4096), StoredMatrix(_real(1024, 4096)))
        yield partial(gemm.rounded_linear, _make(tokens, 4096), _fp4(1, 1024, 4096).row(0))
    entries = indexer.IndexEntries(_make(1, 1024, dtype=INT64), _make(1, dtype=INT64), _make(1, dtype=INT64))
    queries, keys = (
        indexer.IndexQueries(_make(1, 64, 128), _make(1, 64), 1.0),
        indexer.IndexKeys(_make(4096, 128), None),
    )
    yield partial(indexer.index_scores, queries, keys, entries)


def _make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _real(*shape: int) -> torch.Tensor:
    return _make(*shape, dtype=torch.float32)


def _fp4(count: int, rows: int, columns: int) -> StoredMatrix:
    return StoredMatrix(_make(count, rows, columns // 2, dtype=CODES), _make(count, rows, columns // 32, dtype=E8M0))


class _Scene(inputs.BenchmarkInputs):
    """The same tensors without values."""

    def weight(self, name: str) -> torch.Tensor:
        spec = self.shapes.spec(name)
        return _make(*spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    def _stacked(self, first: torch.Tensor) -> torch.Tensor:
        return _make(self.config.n_routed_experts, *first.shape, dtype=first.dtype)

    def randn(self, *shape: int, dtype: torch.dtype = inputs.DTYPE) -> torch.Tensor:
        return _make(*shape, dtype=dtype)


class _Generator:
    def __init__(self, *device: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> "_Generator":
        return self


class _Compiler:
    """Triton's hooks: which launches are compiled, and what came of them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}
        self.wanted: set[str] = set()
        self.rows: list[dict[str, Any]] = []

    def skips(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Whether a launch is neither compiled nor made."""
        name = f"{fn.module}.{fn.name}".removeprefix("dsv4cli.kernels.")
        self.seen.setdefault(name, []).append(key)
        if key not in self.wanted:
            return True
        self.rows.append({"kernel": name})
        return False

    def loaded(self, module: Any, function: Any, name: str, files: dict[str, str], digest: str) -> None:
        """What was compiled fits the card."""
        (metadata,) = (path for file, path in files.items() if file.endswith(".json"))
        self.rows[-1] |= {"shared": json.loads(Path(metadata).read_text())["shared"]}


def compiled(operations: Sequence[Operation], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of the kernels that these operations launch, or of some: name; shared memory or an error; seconds."""
    from triton import knobs

    compiler = _Compiler()
    knobs.runtime.jit_cache_hook, knobs.runtime.kernel_load_start_hook = compiler.skips, compiler.loaded
    for operation in operations:
        operation()
    compiler.wanted = {compiler.seen[name][end] for name in names or compiler.seen for end in (0, -1)}
    for operation in operations:
        begun = time.monotonic()
        try:
            operation()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a line of the table
            if compiler.rows:  # else it is told of already
                compiler.rows[-1]["error"] = f"{type(error).__name__}: {error}"[:300]
        yield from ({**row, "seconds": round(time.monotonic() - begun, 1)} for row in compiler.rows)
        compiler.rows.clear()


def main(which: str, archs: str) -> None:
    """Prints the table."""
    for arch in map(int, archs.split(",")):
        with patch("torch.Generator", _Generator), inserted(CARDS[arch]), use("triton"):
            if which == "all":
                rows = compiled([*every()], ())
            else:
                with patch("dsv4cli.kernels.experts.kernel.hopper.suits", lambda *_: False):
                    rows = [*compiled([*prompt()], LARGEST)]
            for row in rows:
                sys.stdout.write(json.dumps({"arch": arch, **row}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
