"""Time nano beside transformers on this machine's CPU: the same questions, in turns, with one thread and with two.

python -m tests.benchmarks.nano_speed
python -m tests.benchmarks.nano_speed --threads 1 --rounds 9

Runs nano without and with drafts, and transformers (eager, fp32) on a conversion of nano. Each round answers all
questions once per program, greedily and up to the end of the answer; the program that goes first changes with every
round. Prints the median seconds per round, the fastest and slowest round, tokens/s, and the median of the ratios to
transformers within a round. The ceiling is the matrix products of a one-token step alone, in fp32: no program that
decodes one token per step can be faster, while accepted drafts can.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import AUTO_DRAFTING, NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import load_model

QUESTIONS = (
    "What is 17 + 25?",
    "What is 17 * 23?",
    "What is the capital of Italy?",
    "Sort these numbers: 42, 7, 19, 3.",
)
# tokens of an answer that does not end
MOST_TOKENS = 96
# one-token steps in a measurement of the ceiling, and measurements, the fastest of which counts
STEPS, MEASUREMENTS = 20, 5
TRANSFORMERS = "transformers"

# answers prompts; returns the tokens of each answer
Program = Callable[[Sequence[list[int]]], list[list[int]]]


def ours(source: FolderSource | RandomSource, drafting: Drafting, stack: ExitStack) -> Program:
    """Return the engine as `dsv4 run` uses it."""
    model = load_model(source, Numerics.reference(), drafting=drafting)
    limits = Limits(max_tokens=MOST_TOKENS)
    engine = stack.enter_context(Engine(model, Capacity(1, 1024), "cpu", drafting=drafting))

    def answers(prompts: Sequence[list[int]]) -> list[list[int]]:
        found = []
        for ids in prompts:
            engine.add(Request(ids, Sampling(0.0), limits))
            found.append([token.id for token in tokens_of(engine)])
            engine.forget()  # no prompt is in the prefix cache
        return found

    return answers


def tokens_of(engine: Engine) -> list[Any]:
    """Return the tokens that the engine generates for its only request."""
    found = []
    while engine.busy:
        for result in engine.step():
            found += result.tokens
    return found


def load_transformers(folder: Path) -> Any:
    """Return transformers' model of a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def theirs(model: Any, end: int) -> Program:
    """Return transformers' `generate`. end: the token that ends an answer."""

    def answers(prompts: Sequence[list[int]]) -> list[list[int]]:
        found = []
        for ids in prompts:
            given = torch.tensor([ids])
            result = model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=MOST_TOKENS,
                eos_token_id=end, pad_token_id=end,
            )  # fmt: skip
            found.append(result[0, len(ids) :].tolist())
        return found

    return answers


def ceiling(model: Any) -> float:
    """Return tokens/s of the matrix products of a one-token step alone.

    model: transformers' model. Of the routed experts the first ones stand for those that a router chooses.
    """
    weights: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        if weight.ndim == 3:  # routed experts: [experts, rows, columns]
            weights += weight[: model.config.num_experts_per_tok]
        elif weight.ndim == 2 and "embed_tokens" not in name and "position_bias" not in name:
            weights.append(weight)
    rows = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}
    seconds = []
    for _ in range(MEASUREMENTS):
        start = perf_counter()
        for _ in range(STEPS):
            for weight in weights:
                linear(rows[weight.shape[1]], weight)
        seconds.append(perf_counter() - start)
    return STEPS / min(seconds)


def compare(programs: dict[str, Program], prompts: Sequence[list[int]], rounds: int) -> None:
    """Print the seconds and the ratios of programs that take turns."""
    for program in programs.values():
        program(prompts[:1])  # not timed: the first use allocates memory
    answers: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    names = [*programs]
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = perf_counter()
            answers[name] = programs[name](prompts)
            seconds[name].append(perf_counter() - start)
    for name, own in seconds.items():
        tokens = sum(map(len, answers[name]))
        ratio = median(other / mine for mine, other in zip(own, seconds[TRANSFORMERS], strict=True))
        print(
            f"  {name:20} {median(own):6.2f} s ({min(own):.2f} to {max(own):.2f})  {tokens / median(own):6.1f} tokens/s"
            f"  {ratio:5.2f} times as fast as transformers",
            flush=True,
        )
    differing = [name for name, found in answers.items() if found != answers[TRANSFORMERS]]
    if differing:
        print(f"  the answers of {' and '.join(differing)} differ from those of transformers")


def main() -> None:
    """Measure each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, action="append", help="of PyTorch; 1 and 2 if absent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="nano")
    given = parser.parse_args()
    source = resolve_model(given.model)
    dialogue = open_dialogue(source, "off")
    prompts = [dialogue.prompt([{"role": "user", "content": question}]).ids for question in QUESTIONS]
    with torch.no_grad(), ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dsv4cli", "convert", given.model, f"{folder}/model", "--to", "transformers"]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        model = load_transformers(Path(folder, "model"))
        programs = {
            TRANSFORMERS: theirs(model, source.identity.config.eos_token_ids[0]),
            given.model: ours(source, NO_DRAFTS, stack),
            f"{given.model} with drafts": ours(source, AUTO_DRAFTING, stack),
        }
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
        for threads in given.threads or [1, 2]:
            torch.set_num_threads(threads)
            print(f"{len(prompts)} answers, {given.rounds} rounds, threads: {threads}", flush=True)
            compare(programs, prompts, given.rounds)
            print(f"  ceiling of one-token steps: {ceiling(model):.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
