"""Checks each operation of a model against its reference at the model's shapes, then times it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.sharding import check_ranks
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.profiling.bounds import deviation
from dsv4cli.engine.profiling.case import Case, Competitor, Tensors, Work
from dsv4cli.engine.profiling.cases_attention import attentions, index
from dsv4cli.engine.profiling.cases_linear import linears
from dsv4cli.engine.profiling.cases_moe import mixture
from dsv4cli.engine.profiling.cases_state import compressors, keys
from dsv4cli.engine.profiling.cases_step import filters, places, samplers
from dsv4cli.engine.profiling.cases_streams import connections, norms, roundings
from dsv4cli.engine.profiling.ceilings import Ceilings
from dsv4cli.engine.profiling.clock import Timing, cache_bytes, time_calls
from dsv4cli.engine.profiling.compiling import nothing_compiles
from dsv4cli.engine.profiling.inputs import BenchmarkInputs, Shapes
from dsv4cli.engine.system.device import free_memory, step_memory
from dsv4cli.errors import UsageError
from dsv4cli.kernels.dispatch import Backend, KernelUnsupported, use
from dsv4cli.kernels.workspace import Workspace

FAMILIES = (
    places, linears, roundings, norms, keys, connections, compressors, index, attentions, mixture, samplers, filters
)  # fmt: skip
MOST_TOKENS = 65536
# limits of a case on a CPU, which takes about a second for them
CPU_BYTES, CPU_FLOPS = 3 * 10**8, 4 * 10**9
# inputs are copied until they fill the cache COLD times, with at most MOST_COPIES, so that each call reads cold memory
COLD, MOST_COPIES = 4, 64
# fraction of the free memory for the inputs of one case and their copies; the fp32 reference needs more besides
SHARE = 0.25
# advice if memory runs out
LESS = "lower --tokens or --context, or choose operations with --only"


@dataclass(frozen=True)
class MeasuredOperation:
    """The result for one operation: its time, or why it has none.

    Attributes:
        nbytes: bytes read and written.
        copies: copies of the inputs, used in turn.
        cold: whether the inputs are outside the GPU's cache at each call.
        error: relative L2 error against the reference; None if it was not compared.
        reference: time of the plain PyTorch implementation; None if that is what was measured.
        rival, rival_name: time and name of another library's operator, if there is one.
        wrong, skipped: why the result cannot be trusted, or why the operation was not run; or "".
    """

    case: Case
    tokens: int
    context: int
    timing: Timing | None = None
    nbytes: int = 0
    flops: int = 0
    copies: int = 0
    cold: bool = False
    error: float | None = None
    reference: Timing | None = None
    rival: Timing | None = None
    rival_name: str = ""
    wrong: str = ""
    skipped: str = ""

    def record(self, ceilings: Ceilings) -> dict[str, Any]:
        """Return a JSON object."""
        case, seconds = self.case, self.timing.median if self.timing else None
        rates = (self.nbytes / seconds, self.flops / seconds) if seconds else (None, None)
        finite = self.error is not None and self.error < float("inf")
        return {
            "name": case.name,
            "family": case.family,
            "shape": case.shape,
            "tokens": self.tokens,
            "context": self.context,
            "seconds": self.timing.record() if self.timing else None,
            "second_pass": None,
            "bytes": self.nbytes,
            "flops": self.flops,
            "bytes_per_second": rates[0],
            "flops_per_second": rates[1],
            "of_bandwidth": rates[0] and rates[0] / ceilings.bandwidth,
            "of_matmul": rates[1] and rates[1] / ceilings.rate(case.quantised),
            "copies": self.copies,
            "cold": self.cold,
            "reference_seconds": self.reference and self.reference.record(),
            "rival": self.rival and {"name": self.rival_name, "seconds": self.rival.record()},
            "error": self.error if finite else None,
            "bound": case.bound.limit,
            "bound_reason": case.bound.reason,
            "wrong": self.wrong or None,
            "skipped": self.skipped or None,
        }


def read_shapes(model: str, tp: int) -> Shapes:
    """Return the shapes of a released model by name (flash, pro, flash-0731, tiny), or of any model source.

    Raises Dsv4Error as `resolve_model` and `identify` do, and UsageError if the number of ranks does not divide the
    model.
    """
    if model in PRESETS:
        config, formats = parse_config(PRESETS[model], model), Formats()
    else:
        identity = resolve_model(model).identity
        config, formats = identity.config, identity.formats
    table = expected_tensors(config, formats)
    check_ranks(config, table.values(), tp, rounds=True)
    return Shapes(config, table, tp)


def read_tokens(text: str) -> list[int]:
    """Parse numbers such as "1,16". Raises UsageError for anything else."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part) for part in parts):
        raise UsageError(f"--tokens cannot be {text!r}", "use whole numbers separated by commas: 1,16")
    tokens = [int(part) for part in parts]
    if not all(1 <= count <= MOST_TOKENS for count in tokens):
        raise UsageError(f"--tokens cannot be {text!r}", f"use numbers from 1 to {MOST_TOKENS}")
    return list(dict.fromkeys(tokens))


def check_context(shapes: Shapes, tokens: Iterable[int], context: int) -> None:
    """Raise UsageError if the model does not support this context or a prompt of this many tokens."""
    most = shapes.config.max_position_embeddings
    if not 1 <= context <= most:
        raise UsageError(f"--context cannot be {context}", f"use a number from 1 to {most}, the model's context limit")
    longest = max(tokens)
    if longest > most:
        raise UsageError(f"--tokens {longest} exceeds the model's context limit", f"use at most {most}")


def select_cases(bench: BenchmarkInputs, only: Sequence[str]) -> list[Case]:
    """Return the cases with these names or of these families; all of them if `only` is empty. Raises UsageError."""
    cases = [case for family in FAMILIES for case in family(bench)]
    known = dict.fromkeys([*(case.name for case in cases), *(case.family for case in cases)])
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(f"--only: unknown operation {unknown[0]!r}", "known: " + ", ".join(known))
    return [case for case in cases if not only or case.name in only or case.family in only]


def profile_kernels(
    shapes: Shapes, tokens: Sequence[int], context: int, only: Sequence[str], device: torch.device, backend: Backend
) -> Iterator[MeasuredOperation]:
    """Measure the cases one by one. Only one case has its inputs on the device at a time.

    Raises:
        UsageError: as `select_cases`, before anything is measured.
        UnsoundResult: a kernel was compiled during timing.
    """
    plans = []
    for count in tokens:
        bench = BenchmarkInputs(shapes, count, context, device)
        plans.append((bench, select_cases(bench, only)))
    return (_one(case, bench, backend) for bench, cases in plans for case in cases)


@torch.inference_mode()
def time_again(shapes: Shapes, lines: Iterable[dict[str, Any]], device: torch.device, backend: Backend) -> None:
    """Time these lines of a document again, on other inputs, and add the result to each as "second_pass"."""
    plans: dict[tuple[int, int], tuple[BenchmarkInputs, dict[str, Case]]] = {}
    for line in lines:
        place = line["tokens"], line["context"]
        if place not in plans:
            bench = BenchmarkInputs(shapes, *place, device)
            plans[place] = bench, {case.name: case for case in select_cases(bench, ())}
        bench, cases = plans[place]
        with _alone(device, backend):
            work = cases[line["name"]].build(bench)
            nbytes = _traffic(work, _once(work))
            line["second_pass"] = _timed(work, _copies(work, nbytes, device), device).record()


@contextmanager
def _alone(device: torch.device, backend: Backend) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # so that memory that the previous case freed counts as free
    with use(backend), step_memory(device, LESS), Workspace().current():
        yield


def _one(case: Case, bench: BenchmarkInputs, backend: Backend) -> MeasuredOperation:
    with _alone(bench.device, backend):
        return measure(case, bench, backend)


@torch.inference_mode()
def measure(case: Case, bench: BenchmarkInputs, backend: Backend) -> MeasuredOperation:
    """Measure one case: check that it fits, check its result, then time it, its reference and its rival."""
    refusal = _refusal(case, bench.device)
    result = partial(MeasuredOperation, case, bench.tokens, bench.context)
    if refusal:
        return result(skipped=refusal)
    work = case.build(bench)
    try:
        outputs = _once(work)
    except KernelUnsupported as reason:
        return result(skipped=reason.message)
    error = _error(case, work, outputs)
    if not error <= case.bound.limit:
        return result(error=error, wrong=_complaint(case, error))
    nbytes = _traffic(work, outputs)
    sets = _copies(work, nbytes, bench.device)
    timing = _timed(work, sets, bench.device)
    cache = cache_bytes(bench.device)
    cold = bool(cache) and (timing.method == "events" or len(sets) * nbytes >= 2 * cache)
    result = partial(result, timing=timing, nbytes=nbytes, flops=work.flops, copies=len(sets), cold=cold, error=error)
    if backend == "triton":
        reference = time_calls([partial(work.reference, *arguments) for arguments in sets], bench.device)
        result = partial(result, reference=reference)
    if work.rival:
        result = partial(result, rival=_time_rival(work.rival, sets, bench.device), rival_name=work.rival.name)
    return result()


def _once(work: Work) -> Tensors:
    return _tuple(work.run(*(work.arguments if work.written is None else _cloned(work.arguments))))


def _traffic(work: Work, outputs: Tensors) -> int:
    """Return the bytes that one call reads and writes."""
    read = _nbytes(work.arguments) if work.read is None else work.read
    return read + (_nbytes(outputs) if work.written is None else work.written)


def _timed(work: Work, sets: Sequence[tuple[torch.Tensor | None, ...]], device: torch.device) -> Timing:
    with nothing_compiles():
        return time_calls([partial(work.run, *arguments) for arguments in sets], device)


def _time_rival(rival: Competitor, sets: Sequence[tuple[torch.Tensor | None, ...]], device: torch.device) -> Timing:
    calls = [partial(rival.run, *rival.prepare(*arguments)) for arguments in sets]
    calls[0]()
    return time_calls(calls, device)


def _refusal(case: Case, device: torch.device) -> str:
    """Return why the case cannot run on this device, or ""."""
    if device.type == "cpu":
        if case.needs > CPU_BYTES:
            return f"its inputs take {case.needs / 1e9:.2f} GB; the limit on a CPU is {CPU_BYTES / 1e9:.1f} GB"
        if case.cost > CPU_FLOPS:
            return f"it takes {case.cost / 1e9:.1f} GFLOP; the limit on a CPU is {CPU_FLOPS / 1e9:.0f} GFLOP"
    free = free_memory(device)
    if free is not None and case.needs > free * 2 * SHARE:
        return f"its inputs take {case.needs / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free"
    return ""


def _error(case: Case, work: Work, outputs: Tensors) -> float:
    arguments = work.arguments if case.exact else tuple(map(_in_fp32, work.arguments))
    expected = _tuple(work.reference(*arguments))
    return deviation(work.compared(outputs), work.compared(expected), case.bound)


def _complaint(case: Case, error: float) -> str:
    if error == float("inf"):
        return "its result is not finite" if case.bound.limit else "its result differs from the reference"
    return f"its relative error is {error:.2g}, at most {case.bound.limit:.2g} is allowed ({case.bound.reason})"


def _in_fp32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.float() if tensor is not None and tensor.dtype == torch.bfloat16 else tensor


def _copies(work: Work, nbytes: int, device: torch.device) -> list[tuple[torch.Tensor | None, ...]]:
    """Return the inputs and, on a GPU, enough copies that each set has left the cache before it is used again."""
    sets = [work.arguments]
    cache, size = cache_bytes(device), max(_nbytes(work.arguments), 1)
    if cache:
        free = free_memory(device) or 0
        wanted = min(-(-COLD * cache // nbytes), MOST_COPIES, int(free * SHARE) // size)
        sets += [_cloned(work.arguments) for _ in range(wanted - 1)]
    return sets


def _cloned(tensors: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.clone() for tensor in tensors)


def _tuple(outputs: torch.Tensor | Tensors) -> Tensors:
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def _nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
