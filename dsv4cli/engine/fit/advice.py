"""What to do with the answer: the command that runs the model, or what works instead; no torch."""

import shlex
from dataclasses import dataclass

from dsv4cli.engine.fit.plan import CHUNKS, Fit, Share
from dsv4cli.engine.verdict.judge import GPUS, Verdict
from dsv4cli.errors import Dsv4Error


@dataclass(frozen=True)
class Step:
    """One thing to do: why, '' where that goes without saying, and the command, or a sentence where there is none."""

    why: str
    command: str


def advise(fit: Fit, name: str, problem: Dsv4Error | None = None, vllm: Verdict | None = None) -> list[Step]:
    """The commands that follow from an answer, the best first.

    name: what dsv4 calls the model. problem: why dsv4 would not load it even where it fits. vllm: whether vLLM would
    load it, None for random weights, which only dsv4 has.
    """
    if problem is not None:
        return [Step(f"dsv4 would not load it: {problem.message}", problem.remedy)]
    if fit.runs is not None:
        return [Step("", run_command(fit, fit.runs, name, fit.context, fit.batch))]
    return [*_smaller_load(fit, name), *_more_gpus(fit, vllm), *_fewer_layers(fit, name, is_random=vllm is None)]


def run_command(fit: Fit, share: Share, name: str, context: int, batch: int) -> str:
    """`dsv4 run` on the device of a share, with the options that make it fit."""
    words = ["dsv4", "run", "--model", shlex.quote(name), "--max-context", str(context)]
    automatic = "cuda:0" if any(other.devices[0].is_gpu for other in fit.shares) else "cpu"
    if share.devices[0].torch_name != automatic:
        words += ["--device", share.devices[0].torch_name]
    if share.chunk != CHUNKS[0]:
        words += ["--prefill-chunk", str(share.chunk)]
    return " ".join([*words, "--prompts questions.jsonl" if batch > 1 else "'What is 17 + 25?'"])


def _smaller_load(fit: Fit, name: str) -> list[Step]:
    """Fewer tokens or sequences, where the weights alone fit."""
    steps = []
    if fit.shorter is not None:
        why = f"with at most {fit.largest_context:,} tokens it fits"
        steps.append(Step(why, run_command(fit, fit.shorter, name, fit.largest_context, fit.batch)))
    if fit.fewer is not None and fit.batch > 1:
        why = f"with at most {fit.largest_batch} at once it fits"
        steps.append(Step(why, run_command(fit, fit.fewer, name, fit.context, fit.largest_batch)))
    return steps


def _more_gpus(fit: Fit, vllm: Verdict | None) -> list[Step]:
    together = fit.together
    if together is None or vllm is None:
        return []
    load = "" if together.fits else f" with at most {fit.context_together:,} tokens"
    why = (
        f"by size it fits {together.ranks} GPUs{load}, but dsv4 run uses one device in this version; "
        f"{vllm.version} uses all of them"
    )
    if vllm.loads:
        return [Step(why, f"{vllm.command} {GPUS['vllm']} {together.ranks}")]
    return [Step(f"{why}, once this is settled: {vllm.reasons[0]}", vllm.remedy)]


def _fewer_layers(fit: Fit, name: str, *, is_random: bool) -> list[Step]:
    if not fit.layers:
        return []
    why = f"its first {fit.layers} layers fit one device, for tests"
    if is_random:
        parts = [part for part in name.split(",") if not part.startswith("layers=")]
        return [Step(why, f"dsv4 run --model {','.join(parts)},layers={fit.layers} 'What is 17 + 25?'")]
    command = f"dsv4 convert {shlex.quote(name)} OUT --to official --layers 0-{fit.layers - 1} --no-mtp"
    return [Step(why, command)]
