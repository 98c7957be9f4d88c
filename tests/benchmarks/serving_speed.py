"""What an engine that serves many does on this machine: tokens beside long prompts, a question alone, one that follows,
and many that come together.

python -m tests.benchmarks.serving_speed --model random:flash,experts=192
torchrun --nproc-per-node 2 -m tests.benchmarks.serving_speed
python -m tests.benchmarks.serving_speed --model nano --prompt 600 --conversation 1000 --device cpu
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median, quantiles
from time import perf_counter

import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import follow
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Limits, Sampling, parse_size
from dsv4cli.engine.weights.load import load_model
from tests.benchmarks.ahead import compiled_ahead
from tests.benchmarks.decode_speed import ranks, say

# requests that decode, questions that come together beside these, and tokens of one
DECODING, TOGETHER, QUESTION = 8, 56, 30
# prompts that arrive, and how often a question is asked; the first of which are not timed
PROMPTS, QUESTIONS, WARM = 8, 8, 2


class Bench:
    """One engine, and what is asked of it."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.engine, self._vocabulary, self._seed = engine, vocabulary, 0

    def request(self, tokens: int, answer: int, begins: list[int] | None = None) -> Request:
        """Any tokens, behind what they begin with; the state is kept where the server keeps it."""
        self._seed += 1
        before = len(begins or [0])
        ids = [3 + (7 * place + 977 * self._seed) % (self._vocabulary - 3) for place in range(tokens)]
        prompt, keep = [*(begins or []), *ids], (before, len(begins or []) + tokens)
        return Request(prompt, Sampling(0.0, seed=self._seed), Limits(answer), stop_ids=(), keep=keep)

    def first_token(self, request: Request) -> float:
        """Seconds from a request to its first token."""
        begin = perf_counter()
        self.engine.add(request)
        while len(request.ids) == len(request.prompt):
            self.engine.step()
        return perf_counter() - begin

    def finish(self) -> None:
        """Everything ends, and what later requests need is prepared, as a server does."""
        while self.engine.busy:
            self.engine.step()
        while self.engine.prepare():
            pass


def alone(bench: Bench, tokens: int) -> float:
    """Tokens a second of prompts that nothing else runs beside."""
    seconds = [bench.first_token(bench.request(tokens, 1)) for _ in range(PROMPTS)]
    return tokens / median(seconds[WARM:])


def decoding(bench: Bench, steps: int = 40) -> tuple[list[Request], float]:
    """Requests that decode for as long as is needed, and seconds of their step."""
    count = 100_000 if bench.engine.max_request_tokens is None else 2000
    requests = [bench.request(200, count) for _ in range(DECODING)]
    for request in requests:
        bench.engine.add(request)
    while not all(request.decodes for request in requests):
        bench.engine.step()
    times = []
    for _ in range(steps):
        begin = perf_counter()
        bench.engine.step()
        times.append(perf_counter() - begin)
    return requests, median(times[steps // 2 :])


def beside(bench: Bench, tokens: int) -> tuple[list[float], float, Counter[int]]:
    """The times between two steps that give tokens, tokens a second of prompts, of which one after another arrives, and
    how often chunks had so many tokens."""
    gaps, ended, began, read, chunks = [], perf_counter(), 0.0, 0, Counter[int]()
    for number in range(PROMPTS + WARM):
        if number == 2 * WARM:
            gaps, began, read, chunks = [], perf_counter(), 0, Counter()
        prompt = bench.request(tokens, 1)
        bench.engine.add(prompt)
        while len(prompt.ids) == tokens:
            done = prompt.done
            results = bench.engine.step()
            chunks[prompt.done - done] += 1
            if sum(bool(result.tokens) for result in results) >= DECODING:
                now = perf_counter()
                gaps.append(now - ended)
                ended = now
        read += tokens
    return gaps, read / (perf_counter() - began), chunks


def together(bench: Bench, count: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each of so many questions that come together, and between steps meanwhile that give
    tokens to those that decode."""
    questions = [bench.request(QUESTION, 2000) for _ in range(count)]
    begin = ended = perf_counter()
    firsts, gaps = dict[Request, float](), []
    for question in questions:
        bench.engine.add(question)
    while len(firsts) < count:
        given = [result.request for result in bench.engine.step() if result.tokens]
        now = perf_counter()
        firsts |= {request: now - begin for request in given if request in questions and request not in firsts}
        if any(request not in questions for request in given):
            gaps.append(now - ended)
            ended = now
    for question in questions:
        bench.engine.cancel(question)
    return list(firsts.values()), gaps


def fresh(bench: Bench, tokens: int) -> list[float]:
    """Seconds to the first token of questions of so many tokens, one after another."""
    seconds = []
    for _ in range(QUESTIONS):
        seconds.append(bench.first_token(bench.request(tokens, 1)))
        bench.finish()
    return seconds[WARM:]


def follow_up(bench: Bench, tokens: int) -> list[float]:
    """Seconds to the first token of questions that follow each other in a conversation of so many tokens."""
    first = bench.request(tokens, 8)
    bench.first_token(first)
    bench.finish()
    ids, seconds = first.ids, []
    for _ in range(QUESTIONS):
        question = bench.request(QUESTION, 8, ids)
        seconds.append(bench.first_token(question))
        assert question.cached >= len(ids) - 2
        bench.finish()
        ids = question.ids
    return seconds[WARM:]


def measure(bench: Bench, world: World, asked: argparse.Namespace) -> None:
    """Prints everything; times in ms."""
    begin = perf_counter()
    while bench.engine.prepare():
        pass
    say(world, f"steps captured and host memory pinned in {perf_counter() - begin:.1f} s")
    captured = sorted(bench.engine.runner.chunk_seconds.items())
    say(world, "ms of chunks by their tokens: " + ", ".join(f"{size:,} {1e3 * took:.1f}" for size, took in captured))
    rate = alone(bench, asked.prompt)
    say(world, f"prompts of {asked.prompt:,} tokens alone: {rate:,.0f} tokens/s")
    requests, step = decoding(bench)
    gaps, shared, chunks = beside(bench, asked.prompt)
    burst = [together(bench, TOGETHER) for _ in range(WARM + 1)][-1]
    for request in requests:
        bench.engine.cancel(request)
    last = quantiles(gaps, n=100)[98]
    say(
        world,
        f"beside {DECODING} that decode (a step of theirs alone {step * 1e3:.2f}), target {asked.step_ms:g}: "
        f"{1e3 * median(gaps):.1f} between tokens (mean {1e3 * mean(gaps):.1f}, 99th percentile {1e3 * last:.1f}, most "
        f"{1e3 * max(gaps):.1f}, {len(gaps)} times); prompts {shared:,.0f} tokens/s, {shared / rate:.0%} of alone",
    )
    read = ", ".join(f"{often} x {size:,}" for size, often in sorted(chunks.items()))
    say(world, f"tokens of prompts in steps: {read}")
    firsts, gaps = burst
    say(
        world,
        f"{TOGETHER} questions of {QUESTION} tokens beside them: first tokens after {1e3 * mean(firsts):.0f} (mean) "
        f"to {1e3 * max(firsts):.0f}; between tokens {1e3 * mean(gaps):.1f} (mean) to {1e3 * max(gaps):.1f}",
    )
    for tokens in (QUESTION, 10 * QUESTION):
        seconds = fresh(bench, tokens)
        say(world, f"first token of a question of {tokens} tokens alone: {1e3 * median(seconds):.1f}")
    for tokens in (min(512, asked.conversation), asked.conversation // 8, asked.conversation):
        seconds = follow_up(bench, tokens)
        say(
            world,
            f"first token of a question of {QUESTION} tokens behind {tokens:,}: {1e3 * median(seconds):.1f} "
            f"(each: {', '.join(f'{1e3 * one:.1f}' for one in seconds)})",
        )
    say(world, bench.engine.usage)


@contextmanager
def engine(model: Transformer, device: torch.device, world: World, asked: argparse.Namespace) -> Iterator[Engine]:
    """The leader's engine; the other ranks follow until it ends."""
    capacity = Capacity(
        slots=DECODING + TOGETHER,
        longest=asked.conversation + 1024,
        cache_memory=parse_size("--cache-memory", asked.cache_memory),
        host_memory=parse_size("--host-memory", asked.host_memory),
    )
    followers = Followers(world) if world.size > 1 else None
    with Engine(model, capacity, device, followers, step_ms=asked.step_ms) as one:
        yield one
    if followers is not None:
        followers.dismiss()


def main() -> None:
    """Loads once, then measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:flash")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt that arrives")
    parser.add_argument("--conversation", type=int, default=32768, help="tokens before a question")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--cache-memory", default="4GB")
    parser.add_argument("--host-memory", default="2GB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    with torch.no_grad(), ranks(asked.device) as (world, device):
        begin = perf_counter()
        source, numerics = resolve_model(asked.model), Numerics.reference()
        lengths = [asked.conversation] * (DECODING + TOGETHER)
        with compiled_ahead(source, numerics, (device, world), lengths, Limits(max_tokens=1024)):
            model = load_model(source, numerics, device=device, world=world)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        say(world, f"{asked.model} on {name}, {world.size} of it, loaded in {perf_counter() - begin:.1f} s")
        if world.rank:
            follow(model, device, world.receive_orders)
            return
        with engine(model, device, world, asked) as one:
            measure(Bench(one, model.config.vocab_size), world, asked)


if __name__ == "__main__":
    main()
