"""The model of `dsv4 run`, `chat` and `serve`: what their options request, and how it is loaded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from dsv4cli.commands.compiling import NoCompilation, compiled_in_background
from dsv4cli.commands.draft_report import report_no_drafter
from dsv4cli.commands.hidden_folder import note_hidden_folder
from dsv4cli.commands.model_notes import note_context, report_missing
from dsv4cli.commands.obtain import obtain_model
from dsv4cli.commands.offload_report import division_sentence, memory_limits
from dsv4cli.commands.starting import import_torch
from dsv4cli.options import ModelOptions
from dsv4cli.output import Output, size_text

if TYPE_CHECKING:
    from subprocess import Popen

    import torch

    from dsv4cli.engine.chat.dialogue import Dialogue
    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
    from dsv4cli.engine.model.numerics import Numerics
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.parallel.followers import Followers
    from dsv4cli.engine.parallel.world import World
    from dsv4cli.engine.settings import Drafting, Limits, Sampling
    from dsv4cli.engine.system.backend import Backend
    from dsv4cli.engine.tracing.passes import Plan
    from dsv4cli.engine.weights.placement import MemoryLimits

    Find = Callable[[str], FolderSource | RandomSource]


@dataclass(frozen=True)
class Execution:
    """How the model is computed, the same in every rank.

    Attributes:
        dtype: "auto" for the formats of the checkpoint and the rounding of the official code.
        exact: Whether the results of a row do not depend on the other rows of its batch.
        memory: Limits of GPU and host memory; None for no limits.
    """

    dtype: str
    exact: bool
    backend: "Backend"
    memory: "MemoryLimits | None" = None

    @property
    def numerics(self) -> "Numerics":
        """Numerics of the model: those of the official code, or plain arithmetic in `dtype`."""
        import torch

        from dsv4cli.engine.model.numerics import Numerics

        if self.dtype == "auto":
            return Numerics.reference(self.exact)
        return Numerics.plain(getattr(torch, self.dtype), self.exact)


@dataclass(frozen=True)
class LocalProcess:
    """What this process contributes to a job: its device, and its tensor-parallel rank.

    Attributes:
        device_name: The device, as --device names it.
        world, followers: Tensor-parallel ranks; None in a single process.
        compiler: Process that waits for kernels to compile, if one was started early.
        loaded: Called once the model is loaded.
    """

    device_name: str
    world: "World | None" = None
    followers: "Followers | None" = None
    compiler: "Popen[str] | None" = None
    loaded: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Clients:
    """The conversations that share the model.

    Attributes:
        number: Number of concurrent conversations. If more than 1, each may set its own sampling.
        cache_memory: Bytes of GPU memory for the KV cache of all of them; None for the default.
    """

    number: int = 1
    cache_memory: int | None = None


@dataclass(frozen=True)
class Job:
    """A model and the settings to run it with, before it is loaded.

    Attributes:
        drafting: Whether to load the drafter, and how many draft tokens to use.
        plan: What `dsv4 trace` records of the model's steps.
    """

    out: Output
    source: "FolderSource | RandomSource"
    think: str
    special_tokens: bool
    limits: "Limits"
    sampling: "Sampling"
    drafting: "Drafting"
    execution: Execution
    process: LocalProcess
    clients: Clients = Clients()
    plan: "Plan | None" = None

    @cached_property
    def dialogue(self) -> "Dialogue":
        """The model's prompt format."""
        from dsv4cli.engine.chat.dialogue import open_dialogue

        return open_dialogue(self.source, self.think, self.special_tokens)

    @cached_property
    def device(self) -> "torch.device":
        """The device that the options select."""
        from dsv4cli.engine.system.device import resolve_device

        return resolve_device(self.process.device_name)

    @cached_property
    def kernels(self) -> 'Literal["triton", "torch"]':
        """The backend for this device."""
        from dsv4cli.engine.system.backend import resolve_backend

        return resolve_backend(self.execution.backend, self.device)

    @contextmanager
    def model(self, prompts: Sequence[int] | None = None, *, sampled: bool = True) -> "Iterator[Transformer]":
        """Load the model on its device, and select its backend inside the block. Missing kernels compile meanwhile.

        A terminal shows progress.

        Args:
            prompts: Length of each prompt in tokens; None if unknown.
            sampled: Whether tokens will be sampled.
        """
        import_torch(self.out)
        from dsv4cli.engine.system.backend import use

        with use(self.kernels), self._compiled(prompts, sampled) as compiled:
            model = self._load(compiled.note, prompts, sampled)
            self.process.loaded()
            compiled.finish()
            yield model

    @contextmanager
    def _compiled(self, prompts: Sequence[int] | None, sampled: bool) -> "Iterator[NoCompilation]":
        """Compile Triton kernels in the background, if the backend needs them and this is the rank to do so."""
        world, clients = self.process.world, self.clients
        if self.kernels != "triton" or (world is not None and world.rank):
            yield NoCompilation()
            return
        from dsv4cli.engine.compiling.compile_ahead import found_memory
        from dsv4cli.engine.compiling.demand import SAMPLING_KINDS, demand_of
        from dsv4cli.engine.weights.placement import MemoryLimits

        ranks = world.size if world else 1
        demand = demand_of(
            self.source.identity.config,
            self.source.identity.formats,
            self.execution.numerics,
            self.limits,
            [self.sampling] if clients.number == 1 else [self.sampling, *SAMPLING_KINDS],
            self.drafting,
            prompts,
            ranks=ranks,
            sequences=clients.number,
            sampled=sampled,
            cache_memory=clients.cache_memory,
            memory=found_memory(self.device, self.execution.memory or MemoryLimits(), ranks),
            gguf_types=self.source.identity.gguf_types,
        )
        with compiled_in_background(self.out, demand, self.device, self.process.compiler) as compiled:
            yield compiled

    def _load(self, note: Callable[[], str], prompts: Sequence[int] | None, sampled: bool) -> "Transformer":
        from dsv4cli.engine.checkpoint.names import BUILT_IN
        from dsv4cli.engine.checkpoint.source import RandomSource
        from dsv4cli.engine.parallel.world import SINGLE
        from dsv4cli.engine.runtime.limits import workload_of
        from dsv4cli.engine.weights.load import load_model
        from dsv4cli.engine.weights.offload import offload_of

        device, process = self.device, self.process
        if process.followers is not None:
            process.followers.send_orders([])  # the followers load at the same time
        start = perf_counter()
        load = workload_of(
            self.source.identity.config, self.limits, prompts,
            sequences=self.clients.number, sampled=sampled, cache_memory=self.clients.cache_memory,
        )  # fmt: skip
        with self.out.progress("loading", note) as progress:
            model = load_model(
                self.source,
                self.execution.numerics,
                device=device,
                world=process.world or SINGLE,
                progress=progress,
                limits=self.execution.memory,
                drafting=self.drafting,
                load=load,
            )
        seconds, offload = perf_counter() - start, offload_of(model)
        held = sum(parameter.nbytes for parameter in model.parameters())
        # unless experts are in host memory, more bytes than stored mean dequantized weights
        wide = f" ({size_text(held)} as fp32)" if offload is None and held > model.stored_bytes else ""
        loaded = f"{self.source.name} on {device}: {size_text(model.stored_bytes)}{wide} in {seconds:.1f} s"
        if isinstance(self.source, RandomSource):
            self.out.status(loaded)
            self.out.status("the weights are random, so the text is meaningless")
        else:
            self.out.status(f"{loaded}, {model.stored_bytes / seconds / 1e9:.2f} GB/s")
        if offload is not None:
            self.out.status(division_sentence(offload))
        report_no_drafter(self.out, self.source.identity.config, model, self.drafting)
        report_missing(self.out, self.source)
        if self.source.name == BUILT_IN:
            self.out.status("nano is the small built-in model; to use another one, add --model")
        return model


def open_job(
    out: Output,
    options: ModelOptions,
    logprobs: int = 0,
    compiler: "Popen[str] | None" = None,
    find: "Find | None" = None,
) -> Job:
    """Return the job that the options describe. Raises Dsv4Error.

    Args:
        compiler: A process from `early_compiler`, if one was started.
        find: Resolves the model's name.
    """
    from dsv4cli.engine.checkpoint.source import check_drafter
    from dsv4cli.engine.settings import Limits, parse_drafting

    stop = tuple(options.stop or ())
    limits = Limits(options.max_tokens, options.max_context, options.prefill_chunk, logprobs, stop)
    drafting = parse_drafting(options.draft)
    source = find(options.model) if find else obtain_model(out, options.model)
    note_hidden_folder(out, options.model)
    note_context(out, options.max_context, source)
    check_drafter(source, drafting)
    memory = memory_limits(options.gpu_memory, options.host_memory)
    return Job(
        out=out,
        source=source,
        think=options.think,
        special_tokens=options.special_tokens,
        limits=limits,
        sampling=source.sampling.chosen(options.temperature, options.top_p, options.seed, vars(options)),
        drafting=drafting,
        execution=Execution(options.dtype, options.exact, options.backend, memory),
        process=LocalProcess(options.device, compiler=compiler),
    )


def report_lookalikes(out: Output, lookalikes: Sequence[str]) -> None:
    """Warn of text that looks like special tokens but is treated as text."""
    if lookalikes:
        out.warning(
            f"{' '.join(lookalikes)} in a message is text, not a special token; to parse it, use --special-tokens"
        )
