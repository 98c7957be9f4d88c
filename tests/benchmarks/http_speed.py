"""What HTTP costs: tokens a second of an engine alone, and of the same one behind `dsv4 serve`, with N clients.

python -m tests.benchmarks.http_speed --model random:flash,experts=192 --clients 1 --clients 8 --clients 32 --clients 64
python -m tests.benchmarks.http_speed    # nano on this machine

The ceiling of the second number is the first: the clients are a process of their own. Nobody has asked their questions
before.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.build import ServeOptions, build_server
from dsv4cli.engine.server.guard import Guard
from dsv4cli.engine.server.http import bound_socket
from dsv4cli.engine.server.service import RequestDefaults
from dsv4cli.engine.server.warm import CacheOptions, ready_engine, spare_what_is_there
from dsv4cli.engine.settings import Limits, Sampling, parse_drafting
from dsv4cli.engine.system.backend import resolve_backend, use
from dsv4cli.engine.system.device import resolve_device
from dsv4cli.engine.weights.load import load_model

GREEDY = Sampling(0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="nano")
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--draft", default="off")
    parser.add_argument("--port", type=int, help="what the process of the clients is given")
    parser.add_argument("--first", type=int, default=0, help="the number of its first question")
    given = parser.parse_args()
    counts = given.clients or [1, 8, 32, 64]
    if given.port is not None:
        print(json.dumps(asyncio.run(ask(given.port, range(given.first, given.first + counts[0]), given.tokens))))
        return
    source, device, drafting = resolve_model(given.model), resolve_device("auto"), parse_drafting(given.draft)
    with use(resolve_backend("auto", device)):
        model = load_model(source, Numerics.reference(), device=device, drafting=drafting)
        limits = Limits(max_tokens=given.tokens)
        with ready_engine(model, CacheOptions(), limits, device, None, drafting, lambda _: None) as engine:
            dialogue = open_dialogue(source, "off")
            while engine.prepare():
                pass
            spare_what_is_there()
            ids = [dialogue.prompt([message(1000 + number)]).ids for number in range(max(counts))]
            print(f"{source.name} on {device}, {given.tokens} tokens an answer, draft {given.draft}; tokens/s")
            alone = {count: run_alone(engine, ids[:count], limits) for count in counts}
            offer = ServeOptions(
                dialogue, (given.model,), RequestDefaults("off", GREEDY, None, limits), Guard(Accounts(), "127.0.0.1")
            )
            asyncio.run(run_served(engine, offer, alone, given.tokens))


def message(number: int) -> dict[str, str]:
    """What client `number` asks, behind what no other asks."""
    return {"role": "user", "content": f"{number} is a number. Tell me everything about it."}


def run_alone(engine: Engine, prompts: Sequence[list[int]], limits: Limits) -> float:
    """Tokens a second of an engine that answers these prompts at once; the second time counts."""
    seconds = 0.0
    for _ in range(2):
        for ids in prompts:
            engine.add(Request(ids, GREEDY, limits, stop_ids=()))
        start = perf_counter()
        while engine.busy:
            engine.step()
        seconds = perf_counter() - start
        engine.forget()
    return len(prompts) * limits.max_tokens / seconds


async def run_served(engine: Engine, offer: ServeOptions, alone: Mapping[int, float], tokens: int) -> None:
    """Prints what clients of another process measure, by their number, as soon as it is known. alone: tokens a second
    of so many without a server."""
    with bound_socket("127.0.0.1", 0) as bound:
        asked, server = build_server(engine, offer, lambda line: None, print, lambda: None)
        running = asyncio.create_task(server.serve([bound]))
        first = 1000
        for count in alone:
            for _ in range(2):  # the second time counts
                words = ["--port", str(bound.getsockname()[1]), "--clients", str(count), "--tokens", str(tokens)]
                words += ["--first", str(first)]
                first += count
                client = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.benchmarks.http_speed", *words, stdout=subprocess.PIPE
                )
                out, _ = await client.communicate()
            rate, waited, gap = json.loads(out)
            print(
                f"{count:3} clients: {alone[count]:8.1f} alone, {rate:8.1f} over HTTP ({rate / alone[count]:.1%}); "
                f"first token {1e3 * waited:.0f} ms, between tokens {1e3 * gap[0]:.1f} ms, 99 % {1e3 * gap[1]:.1f} ms",
                flush=True,
            )
        server.stop()
        await running
        asked.close(60)


async def ask(port: int, questions: range, tokens: int) -> tuple[float, float, list[float]]:
    """Tokens a second of clients with a question each; medians of the time to the first token and between two, and that
    below which 99 % are."""
    start = perf_counter()
    times = await asyncio.gather(*(one_answer(port, number, tokens) for number in questions))
    seconds = max(own[-1] for own in times) - start
    gaps = [after - before for own in times for before, after in pairwise(own)]
    waited, gap = median(own[0] for own in times) - start, [median(gaps), quantiles(gaps, n=100)[98]]
    return len(questions) * tokens / seconds, waited, gap


async def one_answer(port: int, number: int, tokens: int) -> list[float]:
    """When each piece of an answer came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"messages": [message(number)], "stream": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    times, before = [], 0
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            before += 1
            if before > 1:  # the first says who speaks
                times.append(perf_counter())
    writer.close()
    return times


if __name__ == "__main__":
    main()
