"""Prefills prompts with prefill steps launched kernel by kernel, then as CUDA graphs: speed, launches, tokens, memory.

python -m tests.benchmarks.prefill_graphs --model random:flash,experts=192
torchrun --nproc-per-node 2 -m tests.benchmarks.prefill_graphs

Exits with 1 if a graph is not replayed, or if the tokens differ.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import follow
from dsv4cli.engine.runtime.graphs import prefill_graphs
from dsv4cli.engine.runtime.graphs.prefill_graphs import CapturedPrefill
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Limits
from dsv4cli.engine.weights import reserve
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.reserve import Workload, prefill_graph_bytes
from dsv4cli.kernels.launch import Kernel
from tests.benchmarks.ahead import compiled_ahead
from tests.benchmarks.decode_speed import ranks, say
from tests.benchmarks.serving_speed import Bench

# prompts, the first of which are not timed, and the tokens of an answer
PROMPTS, WARM, ANSWER = 8, 3, 8
# sequences, and bytes of the KV cache
SLOTS, CACHE = 3, 2 * 10**9
# milliseconds; the policy must choose no small chunks
STEP_MS = 1e4


@dataclass
class Counts:
    """What happened since it was last cleared.

    Attributes:
        launches: kernels that Python launched.
        replays: rows of the prefill steps that were replayed.
        host: for each prefill step the seconds until it was launched, and its launches.
    """

    launches: int = 0
    replays: list[int] = field(default_factory=list)
    host: list[tuple[float, int]] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Counts]:
    """Count launches and replays inside."""
    counts, launch, replay, run = Counts(), getattr(Kernel, "_launch", None), CapturedPrefill.run, Runner.run

    def launched(kernel: Kernel, *given: Any) -> Any:
        counts.launches += 1
        return launch(kernel, *given)

    def replayed(step: CapturedPrefill, work: Any) -> Any:
        counts.replays.append(step._rows)
        return replay(step, work)

    def ran(runner: Runner, *given: Any) -> Any:
        before, begin = counts.launches, perf_counter()
        step = run(runner, *given)
        if any(chunk.tokens > 1 for chunk in step.chunks):
            counts.host.append((perf_counter() - begin, counts.launches - before))
        return step

    replaced = ((Kernel, "_launch", launched), (CapturedPrefill, "run", replayed), (Runner, "run", ran))
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(patch.object(*one))
        yield counts


def measure(bench: Bench, tokens: int, counts: Counts) -> tuple[list[float], list[Token]]:
    """Seconds to the first token of each prompt that is timed, and the tokens of their answers."""
    seconds, answers = [], list[Token]()
    for number in range(PROMPTS):
        if number == WARM:  # chunks of the first prompts depend on what was timed before
            counts.replays.clear()
            counts.host.clear()
            answers.clear()
        request = bench.request(tokens, ANSWER)
        seconds.append(first_token(bench.engine, request, answers))
        while bench.engine.busy:
            answers += [token for result in bench.engine.step() for token in result.tokens]
    return seconds[WARM:], answers


def first_token(engine: Engine, request: Request, answers: list[Token]) -> float:
    """Seconds from a request to its first token."""
    begin, before = perf_counter(), len(answers)
    engine.add(request)
    while len(answers) == before:
        answers += [token for result in engine.step() for token in result.tokens]
    return perf_counter() - begin


def pool_bytes(engine: Engine) -> int:
    """The memory of this engine's graphs; 0 without a GPU."""
    graphs = engine.runner.graphs
    if graphs is None:
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", ())) == graphs._memory)


@contextmanager
def engine(model: Transformer, device: torch.device, tokens: int, captured: bool) -> Iterator[Engine]:
    """The leader's engine; the other ranks follow until it ends."""
    world, capacity = model.world, Capacity(SLOTS, tokens + 1024, cache_memory=CACHE)
    followers = Followers(world) if world.size > 1 else None
    with Engine(model, capacity, device, followers, NO_DRAFTS, STEP_MS if captured else None) as one:
        yield one
    if followers is not None:
        followers.dismiss()


def compare(model: Transformer, device: torch.device, asked: argparse.Namespace) -> bool:
    """Prints both measurements. Returns whether graphs were replayed, with the same tokens."""
    world, found, replayed = model.world, {}, False
    for captured in (False, True):
        if world.rank:
            follow(model, device, world.receive_orders)
            continue
        with engine(model, device, asked.prompt, captured) as one, counted() as counts:
            begin = perf_counter()
            while one.prepare():
                pass
            if captured:
                report_memory(one, asked, perf_counter() - begin)
            seconds, answers = measure(Bench(one, model.config.vocab_size), asked.prompt, counts)
        host, launches = (median(column) for column in zip(*counts.host, strict=True))
        found[captured], replayed = answers, bool(counts.replays)
        say(
            world,
            f"{'captured' if captured else 'launched'}: {asked.prompt / median(seconds):,.0f} tokens/s "
            f"({1e3 * median(seconds):.1f} ms a prompt, {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}); a step "
            f"took the host {1e3 * host:.1f} ms and {launches:,.0f} launches; rows of replays: {counts.replays}",
        )
    return bool(world.rank) or agreed(found[False], found[True], replayed)


def report_memory(one: Engine, asked: argparse.Namespace, seconds: float) -> None:
    """Prints what the graphs take."""
    runner = one.runner
    load, divides = Workload(asked.prompt + 1024, SLOTS, serves=True), runner.model.world.divides_from is not None
    planned = prefill_graph_bytes(runner.model.config, load, runner.model.world.size, divides)
    times = ", ".join(f"{rows:,} {1e3 * took:.1f}" for rows, took in sorted(runner.chunk_seconds.items()))
    say(
        runner.model.world,
        f"captured in {seconds:.1f} s: ms by rows: {times}; memory of all graphs {pool_bytes(one) / 1e9:.2f} GB, of "
        f"which prefill steps are planned to take {planned / 1e9:.2f}",
    )


def agreed(launched: list[Token], captured: list[Token], replayed: bool) -> bool:
    """Prints whether the tokens are the same. Returns whether all is well."""
    same = [one.id for one in launched] == [one.id for one in captured]
    apart = max(abs(one.logprob - other.logprob) for one, other in zip(launched, captured, strict=True))
    print(f"same {len(launched)} tokens: {same}; log-probabilities at most {apart:.2g} apart; replayed: {replayed}")
    return same and replayed


def loaded(device: torch.device, world: World, asked: argparse.Namespace) -> Transformer:
    """The model; most kernels of its steps are compiled meanwhile."""
    source, numerics, begin = resolve_model(asked.model), Numerics.reference(), perf_counter()
    limits = Limits(max_tokens=ANSWER, max_context=asked.prompt + 1024, prefill_chunk=max(asked.rows))
    with compiled_ahead(source, numerics, (device, world), [asked.prompt], limits):
        model = load_model(source, numerics, device=device, world=world, drafting=NO_DRAFTS)
    say(world, f"{asked.model} on {world.size} {device.type}, loaded in {perf_counter() - begin:.1f} s")
    return model


def main() -> None:
    """Loads once, then measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:flash")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096], help="rows of captured steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    with torch.no_grad(), ranks(asked.device) as (world, device), ExitStack() as stack:
        for module in (prefill_graphs, reserve):
            stack.enter_context(patch.object(module, "captured_rows", lambda columns, ranks: tuple(sorted(asked.rows))))
        if not compare(loaded(device, world, asked), device, asked):
            sys.exit(1)


if __name__ == "__main__":
    main()
