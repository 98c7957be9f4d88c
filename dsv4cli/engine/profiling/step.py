"""Times a whole step of a model, prefill or decode, and each part of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from dsv4cli.engine.config.capacity import MAX_STEP_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.profiling.clock import Call, Timing, wait
from dsv4cli.engine.profiling.compiling import nothing_compiles
from dsv4cli.engine.profiling.launches import Launches, trace_step
from dsv4cli.engine.profiling.ranges import BATCH, HEAD, OTHER, Ranges, expected_counts
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.sampling.sampler import check_finite
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.system.backend import captures
from dsv4cli.engine.system.device import step_memory
from dsv4cli.engine.weights.reserve import Workload
from dsv4cli.errors import UnsoundResult, UsageError
from dsv4cli.kernels.dispatch import Backend, use
from dsv4cli.kernels.formats import E8M0_BIAS
from dsv4cli.kernels.workspace import Workspace

WARM = 2
# timing of whole steps: seconds, then the minimum and maximum number of steps
SECONDS, FEWEST, MOST = 1.0, 5, 50
# default context of a decode step, in tokens
CONTEXT = 4096
# advice if memory runs out
LESS = "lower --context, --batch or --tokens"


@dataclass(frozen=True)
class StepShape:
    """The size of a step.

    Attributes:
        tokens: tokens of each sequence in the step.
        context: tokens of each sequence before the step.
        batch: number of sequences.
    """

    tokens: int
    context: int
    batch: int

    @property
    def total(self) -> int:
        """Tokens of the step."""
        return self.tokens * self.batch

    @property
    def workload(self) -> Workload:
        """The workload to reserve memory for: one chunk for a prompt, chunks of any size before a decode step."""
        return Workload(self.context + self.tokens, self.batch, self.total if self.tokens > 1 else None)


@dataclass(frozen=True)
class StepProfile:
    """The times of a step and its parts.

    On a GPU, a part's time is that in which its kernels run; the gaps are listed separately. On a CPU, it is the time
    of its calls.

    Attributes:
        total: time of the step as the engine runs it.
        captured: whether the step is a captured graph.
        ranged: seconds of the run that was split into classes.
        classes: seconds by class; their sum is `ranged`.
        counts: number of ranges by class.
        launches: launches of the step; None on a CPU.
        weight_bytes: bytes of the weights that the step reads, each counted once.
    """

    total: Timing
    captured: bool
    ranged: float
    classes: dict[str, float]
    counts: dict[str, int]
    launches: Launches | None
    weight_bytes: int


def choose_load(config: ModelConfig, tokens: int, context: int | None, batch: int) -> StepShape:
    """Return the size of the step.

    The default context is 0 for a prompt, and 4,096 tokens (or the model's limit) for decode.

    Raises UsageError if it exceeds the limits of the model or of a step.
    """
    most = config.max_position_embeddings
    default = 0 if tokens > 1 else min(CONTEXT, most - 1)
    load = StepShape(tokens, default if context is None else context, batch)
    if load.context + load.tokens > most:
        raise UsageError(
            f"--context {load.context} plus --tokens {tokens} exceed the model's context limit of {most} tokens",
            f"use at most {most} in total",
        )
    if load.total > MAX_STEP_TOKENS:
        raise UsageError(
            f"{load.batch} x {tokens} tokens exceed the limit of a step", f"use at most {MAX_STEP_TOKENS} in total"
        )
    return load


@torch.inference_mode()
def profile_step(
    model: Transformer, load: StepShape, device: torch.device, backend: Backend = "auto", trace: Path | None = None
) -> StepProfile:
    """Run the same step repeatedly: to time it, to time its parts, and to count its launches.

    The KV cache is filled with random values for `context` tokens. The step's tokens are random as well.

    Raises:
        UnsoundResult: logits are not finite, the parts do not match the layer schedule, or a kernel was compiled during
            timing.
        NotEnoughMemory: the step needs more memory than there is.
    """
    with use(backend), step_memory(device, LESS), Workspace().current():
        step = _Step(model, load, device)
        with _count_experts(model) as hit:
            check_finite(step.run(Ranges(device)))
        for _ in range(WARM):
            step.whole()
        with nothing_compiles():
            total = _time(step.whole, device)
            seconds, spans = _time_parts(model, step, device)
        counts = _check_schedule(model.config, spans)
        ranges, launches = Ranges(device), None
        if trace or device.type == "cuda":
            with ranges.around(model):
                launches = trace_step(lambda: step.run(ranges), device, trace, step.replay)
    classes = spans.seconds()
    if launches is not None:
        seconds, classes = max(total.median, launches.busy), launches.seconds
    classes[OTHER] = max(seconds - sum(time for name, time in classes.items() if name != OTHER), 0.0)
    weights = _weight_bytes(model, hit, load)
    return StepProfile(total, step.replay is not None, seconds, classes, counts, launches, weights)


class _Step:
    """A repeatable step at fixed positions: sequence lengths do not change."""

    def __init__(self, model: Transformer, load: StepShape, device: torch.device) -> None:
        self.model = model
        self.device = device
        decodes = load.tokens == 1 and captures(device)
        self.cache = Cache(model.config, model.numerics, slots=load.batch + decodes, device=device)
        self.decoder = GraphRunner(model, self.cache, load.context + 1) if decodes else None
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (load.batch, load.tokens), generator=generator, device="cpu")
        self.work: list[tuple[Sequence, list[int]]] = []
        for row in ids.tolist():
            sequence = self.cache.allocate()
            self.cache.reserve(sequence, load.context + load.tokens)
            self.cache.advance(sequence, load.context)
            self.work.append((sequence, row))
        if load.context:
            fill(self.cache)
        # capture now, before hooks are added to the model
        self.captured = None if self.decoder is None else self.decoder.filled(self.next)

    def run(self, ranges: Ranges) -> torch.Tensor:
        """Return the logits of each sequence's last token. Parts outside the blocks are marked in `ranges`."""
        with ranges.range(BATCH):
            if self.decoder is None or self.captured is None:
                batch = make_batch(self.cache, self.work)
            else:
                batch = self.decoder.batch(self.captured.numbers)
        streams = self.model(batch, self.cache.layers).streams
        with ranges.range(HEAD):
            return self.model.logits(streams if self.captured else streams[batch.last])

    @property
    def next(self) -> list[tuple[Sequence, list[int]]]:
        """Each sequence with its one token."""
        return self.work

    @property
    def replay(self) -> Call | None:
        """A replay of the captured step with the inputs already in place; None if it is not captured."""
        return None if self.captured is None else self.captured.run

    def whole(self) -> torch.Tensor:
        """Run the step as the engine does: as a captured graph if possible."""
        return self.run(Ranges(self.device)) if self.decoder is None else self.decoder.filled(self.next).run().logits


def fill(cache: Cache) -> None:
    """Fill the KV cache with random values, as if tokens had gone through the model."""
    generator = torch.Generator(cache.device).manual_seed(0)
    for layer in cache.layers:
        for data in [ring.data for ring in layer.rings()] + [pool.data for pool in layer.pools()]:
            if data.is_floating_point():
                data.normal_(generator=generator)
            elif data.dtype == torch.int8:  # FP4 codes: every byte is valid
                data.random_(-128, 128, generator=generator)
            else:  # scales of FP4 codes
                data.fill_(E8M0_BIAS)


def _time(step: Callable[[], object], device: torch.device) -> Timing:
    seconds: list[float] = []
    while len(seconds) < FEWEST or (sum(seconds) < SECONDS and len(seconds) < MOST):
        wait(device)
        start = perf_counter()
        step()
        wait(device)
        seconds.append(perf_counter() - start)
    return Timing.of(seconds, "host")


def _time_parts(model: Transformer, step: _Step, device: torch.device) -> tuple[float, Ranges]:
    """Return the seconds and the ranges of the fastest of a few steps with ranges around their parts."""
    runs = []
    for _ in range(FEWEST):
        ranges = Ranges(device)
        wait(device)
        start = perf_counter()
        with ranges.around(model):
            step.run(ranges)
        wait(device)
        runs.append((perf_counter() - start, ranges))
    return min(runs, key=lambda run: run[0])


def _check_schedule(config: ModelConfig, ranges: Ranges) -> dict[str, int]:
    seen, expected = ranges.counts(), expected_counts(config)
    for name in expected | seen:
        if seen[name] != expected[name]:
            raise UnsoundResult(
                f"the step ran {seen[name]} parts of class {name!r}, but the layer schedule has {expected[name]}",
                "report this as a bug: the profile does not cover the whole model",
            )
    return dict(seen)


@contextmanager
def _count_experts(model: Transformer) -> Iterator[dict[MoE, int]]:
    """Count how many different experts each layer uses while the block runs."""
    hit: dict[MoE, int] = {}

    def note(layer: MoE) -> Callable[..., None]:
        def chosen(router: object, inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
            hit[layer] = outputs[0].unique().numel()

        return chosen

    layers = [module for module in model.layers.modules() if isinstance(module, MoE)]
    handles = [layer.gate.register_forward_hook(note(layer)) for layer in layers]
    try:
        yield hit
    finally:
        for handle in handles:
            handle.remove()


def _weight_bytes(model: Transformer, hit: dict[MoE, int], load: StepShape) -> int:
    """Return the bytes of weights that a step reads: the main model without unused experts and table rows."""
    tables = {model.embed.weight, *(p for name, p in model.named_parameters() if name.endswith(".tid2eid"))}
    total = sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("mtp.") and p not in tables)
    total += sum(min(load.total, table.shape[0]) * table[0].nbytes for table in tables)
    for layer, count in hit.items():
        stored = [part.nbytes for name, part in layer.named_parameters() if name.startswith("experts.")]
        total += count * layer.experts.bytes_per_expert - sum(stored)
    return total
