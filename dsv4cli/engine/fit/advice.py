"""What to do with the answer: the command that runs the model, or what works instead; no torch."""

import shlex
from dataclasses import dataclass

from dsv4cli.engine.fit.plan import CHUNKS, Fit, Share
from dsv4cli.errors import Dsv4Error


@dataclass(frozen=True)
class Step:
    """One thing to do: why, '' where that goes without saying, and the command, or a sentence where there is none."""

    why: str
    command: str


def advise(fit: Fit, name: str, problem: Dsv4Error | None = None, *, is_random: bool = False) -> list[Step]:
    """The commands that follow from an answer, the best first.

    name: what dsv4 calls the model. problem: why dsv4 would not load it even where it fits. is_random: whether its
    weights are random, of which fewer layers need no conversion.
    """
    if problem is not None:
        return [Step(f"dsv4 would not load it: {problem.message}", problem.remedy)]
    runs, has_gpus = fit.runs, any(share.devices[0].is_gpu for share in fit.shares)
    if runs is not None and (runs.devices[0].is_gpu or not has_gpus):
        return [Step("", run_command(fit, runs, name, fit.context, fit.batch))]
    steps = [*_more_gpus(fit, name), *_host_memory(fit, name)]
    if runs is not None:
        return [*steps, Step("the RAM holds it", run_command(fit, runs, name, fit.context, fit.batch))]
    return [*steps, *_smaller_load(fit, name), *_fewer_layers(fit, name, is_random=is_random)]


def run_command(fit: Fit, share: Share, name: str, context: int, batch: int) -> str:
    """`dsv4 run` on the devices of a share, with the options that make it fit."""
    words = ["dsv4", "run", "--model", shlex.quote(name), "--max-context", str(context)]
    automatic = "cuda:0" if any(other.devices[0].is_gpu for other in fit.shares) else "cpu"
    if share.ranks > 1:
        words += ["--tp", str(share.ranks)]
    elif share.devices[0].torch_name != automatic:
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


def _more_gpus(fit: Fit, name: str) -> list[Step]:
    """The fewest GPUs that hold it together, with a shorter context where that is too long."""
    together = fit.together
    if together is None:
        return []
    context = fit.context if together.fits else fit.context_together
    load = "" if together.fits else f" with at most {context:,} tokens"
    return [Step(f"{together.ranks} GPUs hold it{load}", run_command(fit, together, name, context, fit.batch))]


def _host_memory(fit: Fit, name: str) -> list[Step]:
    """One GPU, and host memory for the experts that it has no room for."""
    if fit.beside is None:
        return []
    why = "one GPU runs it, slower: experts that it has no room for stay in host memory"
    return [Step(why, run_command(fit, fit.beside, name, fit.context, fit.batch))]


def _fewer_layers(fit: Fit, name: str, *, is_random: bool) -> list[Step]:
    if not fit.layers:
        return []
    why = f"its first {fit.layers} layers fit one device, for tests"
    if is_random:
        parts = [part for part in name.split(",") if not part.startswith("layers=")]
        return [Step(why, f"dsv4 run --model {','.join(parts)},layers={fit.layers} 'What is 17 + 25?'")]
    command = f"dsv4 convert {shlex.quote(name)} OUT --to official --layers 0-{fit.layers - 1} --no-mtp"
    return [Step(why, command)]
