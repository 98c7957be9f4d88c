"""How fast a model of random weights decodes and prefills on this machine's GPUs: the numbers of
docs/internals/performance.md.

python -m tests.benchmarks.decode_speed --model random:flash,experts=192 --context 4096 --context 131072
torchrun --nproc-per-node 2 -m tests.benchmarks.decode_speed --batch 1 --batch 16 --batch 64 --prefill 8192
torchrun --nproc-per-node 4 -m tests.benchmarks.decode_speed --model random:pro --host-memory 320GB
python -m tests.benchmarks.decode_speed --model random:flash,experts=192 --draft 0 --draft 1 --draft 3 --draft auto
python -m tests.benchmarks.decode_speed    # all 256 experts: those that do not fit stay in host memory
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

from dsv4cli.commands.offload_report import memory_limits
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.processes import joined
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.profiling.step import fill
from dsv4cli.engine.runtime.drafts.draft_controller import DraftController
from dsv4cli.engine.runtime.drafts.draft_plan import DraftPlan
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.offload import offload_of
from dsv4cli.engine.weights.reserve import Workload
from tests.benchmarks.ahead import compiled_ahead

# steps, the first of which are not timed: experts from host memory need some until those often chosen are there
STEPS, WARM = 65, 30
# steps in a trace
TRACED = 3
# the first of which is not timed
PROMPTS = 4


@contextmanager
def ranks(kind: str = "cuda") -> Iterator[tuple[World, torch.device]]:
    """This process alone, or its rank among those that torchrun has started."""
    device = torch.device(kind)
    if "RANK" not in os.environ:
        yield SINGLE, device
    else:
        with joined(device) as (world, own_device):
            yield world, own_device


def say(world: World, *words: object) -> None:
    """Prints once for all ranks."""
    if world.rank == 0:
        print(*words, flush=True)


class Always(DraftController):
    """A gate that lets all drafts through."""

    def drafts(self, sequences: int, chances: Sequence[Sequence[float]]) -> int:
        """Verifies all there are."""
        return max(map(len, chances), default=0)

    def count(self, sequences: int) -> int:
        """Makes as many as it may."""
        return self._most


def take_leaders_times(plan: DraftPlan, world: World) -> None:
    """Has a plan take in the leader's times: each rank leads here, and their gates must decide alike."""
    own = plan.time

    def time(chunks: Sequence[Chunk], count: int, seconds: Sequence[float]) -> None:
        own(chunks, count, world.broadcast_object(seconds))  # through the host: the next step may run on the device

    plan.time = time


def filled(
    model: Transformer, device: torch.device, context: int, batch: int, draft: int | None, temperature: float
) -> Engine:
    """An engine with a request for each of `batch` sequences, random values in place of all but one of its tokens; so
    many drafts in every step, None for as many as pay."""
    more = (STEPS + TRACED) * (1 + (7 if draft is None else draft)) + 1
    engine = Engine(model, Capacity(batch, context + more), device, drafting=Drafting(draft))
    if draft:
        engine._plan.gate = Always(draft)
    if engine._plan is not None:
        take_leaders_times(engine._plan, model.world)
    cache = engine.runner.cache
    for number in range(batch):
        request = Request([0] * context, Sampling(temperature, seed=number), Limits(max_tokens=more), stop_ids=())
        request.sequence, request.done = cache.allocate(), context - 1
        cache.reserve(request.sequence, context)
        cache.advance(request.sequence, context - 1)
        engine.add(request)
    cache.provide(cache.blocks + 2 * batch)
    fill(cache)
    return engine


def decode(
    model: Transformer,
    world: World,
    device: torch.device,
    shape: tuple[int, int],
    draft: int | None,
    asked: argparse.Namespace,
) -> None:
    """Prints the median of the engine's step; each has the tokens that the one before has drawn, of random weights any.

    shape: tokens before the step, sequences. draft: of each, None for as many as pay.
    """
    context, batch = shape
    with filled(model, device, context, batch, draft, asked.temperature) as engine:
        measure(engine, model, world, shape, draft, asked.wrong)
        if asked.trace:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(TRACED):
                    engine.step()
            if world.rank == 0:
                profile.export_chrome_trace(f"{asked.trace.removesuffix('.json')}-{context}-{batch}.json")


def measure(
    engine: Engine, model: Transformer, world: World, shape: tuple[int, int], draft: int | None, wrong: bool
) -> None:
    """What `decode` prints. wrong: no draft is what the model draws."""
    (context, batch), wall, parts, tokens = shape, [], [], 0
    end = perf_counter()
    for step in range(STEPS):
        if step == WARM:
            before = traffic(model)
        begin = end  # the next step may run already
        results = engine.step()
        end = perf_counter()
        assert len(results) == batch
        if wrong:
            for result in results:
                result.request.drafts = [(draft + 1) % model.config.vocab_size for draft in result.request.drafts]
        if step >= WARM:
            tokens += sum(len(result.tokens) for result in results)
            wall.append((end - begin) * 1e3)
            parts.append(engine._drawing.watch.seconds())
    say(
        world,
        f"decode, context {context:,}, batch {batch}: {median(wall):.2f} ms ({min(wall):.2f} to {max(wall):.2f}), "
        f"{batch / median(wall) * 1e3:,.0f} tokens/s at one a step",
    )
    if (report := engine.draft_report()) is not None:
        verifying, drafting = (median(column) * 1e3 for column in zip(*parts, strict=True))
        say(
            world,
            f"  {'auto' if draft is None else draft} drafts of {report.drafter}: {verifying:.2f} ms to verify, "
            f"{drafting:.2f} to draft; {report.drafted} verified in {report.steps} steps, {report.accepted} accepted; "
            f"{tokens / sum(wall) * 1e3:,.0f} tokens/s with those",
        )
    chosen, found, nbytes = (after - first for after, first in zip(traffic(model), before, strict=True))
    if chosen:
        each = nbytes / len(wall) / batch
        say(world, f"{100 * found / chosen:.1f} % of the experts were on the GPU; {each / 1e6:.0f} MB a token came")


def traffic(model: Transformer) -> tuple[int, int, int]:
    """Experts chosen so far, those of them that lay on the GPU, bytes of the others; zeros where all fit."""
    so_far = offload_of(model) and offload_of(model).traffic()
    return (so_far.chosen, so_far.found, so_far.nbytes) if so_far else (0, 0, 0)


def prefill(model: Transformer, world: World, device: torch.device, tokens: int, chunk: int | None) -> None:
    """Prints the median of prompts of `tokens` tokens, in chunks."""
    engine = Engine(model, Capacity(), device)
    engine.runner.cache.provide(tokens // 128 + 2)
    seconds = []
    for number in range(PROMPTS):
        ids = [(7 * position + number) % model.config.vocab_size for position in range(tokens)]
        torch.cuda.synchronize()
        begin = perf_counter()
        engine.add(Request(ids, Sampling(0.0), Limits(max_tokens=1, prefill_chunk=chunk)))
        while engine.busy:
            engine.step()
        seconds.append(perf_counter() - begin)
    middle = median(seconds[1:])
    say(
        world,
        f"prefill of {tokens:,} tokens in chunks of {chunk or model.prefill_chunk:,}: {middle * 1e3:.0f} ms, "
        f"{tokens / middle:,.0f} tokens/s",
    )


def workload(asked: argparse.Namespace) -> Workload:
    """The largest that is asked for."""
    context = max([*(asked.context or [4096]), *asked.prefill]) + (STEPS + TRACED) * 8 + 1
    return Workload(context, max(asked.batch or [1]), max(asked.chunk) if asked.chunk else None)


def main() -> None:
    """Loads once, then measures everything that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:flash")
    parser.add_argument("--context", type=int, action="append", help="tokens before the step; 4096 if absent")
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 if absent")
    parser.add_argument("--draft", action="append", help="drafts in each step, or auto; 0 if absent")
    parser.add_argument("--wrong", action="store_true", help="no draft is what the model draws")
    parser.add_argument("--exact", action="store_true", help="rows of a step do not depend on each other")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prefill", type=int, action="append", default=[], help="tokens of a prompt")
    parser.add_argument("--chunk", type=int, action="append", help="of a prompt; if absent, what has room")
    parser.add_argument("--host-memory", metavar="SIZE", help="what experts of all ranks may take of it")
    parser.add_argument("--trace", metavar="FILE.json", help="a trace of three steps of the first rank, for Perfetto")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU to measure")
    with torch.no_grad(), ranks() as (world, device):
        begin = perf_counter()
        limits = memory_limits(None, asked.host_memory)
        numerics = Numerics.reference(exact=asked.exact)
        source, load = resolve_model(asked.model), workload(asked)
        lengths = [max(asked.context or [4096])] * max(asked.batch or [1])
        drafts = {None if text == "auto" else int(text) for text in asked.draft or ["0"]}
        drafting = Drafting(None if None in drafts else max(drafts))
        ends = Limits(max_tokens=(STEPS + TRACED) * 8 + 1, prefill_chunk=max(asked.chunk) if asked.chunk else None)
        with compiled_ahead(source, numerics, (device, world), lengths, ends, drafting, load):
            model = load_model(source, numerics, device=device, world=world, limits=limits, load=load)
        held = offload_of(model)
        size = sum(parameter.nbytes for parameter in model.parameters()) + (held.nbytes if held else 0)
        say(world, f"{torch.cuda.get_device_name()}, {world.size} of it; torch {torch.__version__}")
        say(world, f"{asked.model}: {size / 1e9:.1f} GB a GPU in {perf_counter() - begin:.1f} s")
        for tokens in asked.prefill:
            for chunk in asked.chunk or [None]:
                prefill(model, world, device, tokens, chunk)
        for context in asked.context or [4096]:
            for batch in asked.batch or [1]:
                for text in asked.draft or ["0"]:
                    draft = None if text == "auto" else int(text)
                    decode(model, world, device, (context, batch), draft, asked)


if __name__ == "__main__":
    main()
