"""Whether a program would load a folder: the verdict, its reasons and the next command; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dsv4cli.engine.checkpoint.remedies import download_again
from dsv4cli.engine.deployment.plan import ENGINES, start_line
from dsv4cli.engine.inspection.consumers import common, gguf, hf, scripts, sglang, vllm
from dsv4cli.engine.inspection.consumers.checkpoint import Finding, InspectedCheckpoint, Rule
from dsv4cli.errors import CheckpointError, Dsv4Error, UnknownKey
from dsv4cli.harmless import shell_word
from dsv4cli.version import __version__

SCHEMA = "dsv4.verdict/1"
Consumer = Literal["vllm", "sglang", "transformers", "official", "llama.cpp", "ds4", "dsv4"]
CONSUMERS: tuple[Consumer, ...] = get_args(Consumer)
VERSIONS: Mapping[Consumer, str] = {
    "vllm": ENGINES["vllm"].title,
    "sglang": ENGINES["sglang"].title,
    "transformers": hf.VERSION,
    "official": scripts.VERSION,
    "llama.cpp": gguf.LLAMA_VERSION,
    "ds4": gguf.DS4_VERSION,
    "dsv4": f"dsv4 {__version__}",
}
RULES: Mapping[Consumer, tuple[Rule, ...]] = {
    "vllm": vllm.RULES,
    "sglang": sglang.RULES,
    "transformers": hf.RULES,
    "official": scripts.RULES,
    "llama.cpp": gguf.LLAMA_RULES,
    "ds4": gguf.DS4_RULES,
    # its start command sends a prompt, so it needs a tokenizer
    "dsv4": (common.tokenizer(fatal=True),),
}
# where the facts come from, if they were not tested
SOURCES: Mapping[Consumer, tuple[str, ...]] = {
    "vllm": ("known from vLLM's source, not from running it",),
    "sglang": ("known from SGLang's source, not from running it",),
    "official": ("known from the scripts' source, not from running them",),
    "ds4": ("known from ds4's source, not from running it",),
}
STARTS: Mapping[Consumer, str] = {
    "transformers": "transformers serve {model}",
    "official": "torchrun --nproc-per-node {ranks} inference/generate.py --ckpt-path {model} "
    "--config {model}/inference/config.json --interactive",
    "llama.cpp": "llama-server --model {model}",
    "ds4": "ds4 -m {model}",
    "dsv4": "dsv4 run --model {model} 'What is 17 + 25?'",
}
# what to make of a folder that a consumer does not load
TARGETS: Mapping[Consumer, str] = {
    "vllm": "official",
    "sglang": "official",
    "transformers": "transformers",
    "official": "mp --ranks {ranks}",
    "llama.cpp": "gguf",
    "ds4": "gguf",
    "dsv4": "official",
}


@dataclass(frozen=True)
class ConsumerVerdict:
    """The verdict on a folder for one consumer.

    Attributes:
        version: the consumer's version that the rules were written for.
        loads: None if unknown.
        reasons: why it does not load, or why that is unknown.
        notes: additional notes.
        command: the command that starts the consumer with the model, '' if it would not load it.
        remedy: what to do about the reasons, '' if there are none.
    """

    consumer: Consumer
    version: str
    loads: bool | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    command: str = ""
    remedy: str = ""


def verdict(checkpoint: InspectedCheckpoint, consumer: Consumer, problem: Dsv4Error | None = None) -> ConsumerVerdict:
    """Apply the rules of a consumer. For dsv4, `problem`, the error of its own loader, comes first."""
    if consumer == "dsv4" and problem is not None:
        return _own(problem)
    findings = [finding for rule in RULES[consumer] for finding in rule(checkpoint)]
    against = [finding for finding in findings if finding.kind == "no"]
    reasons = against or [finding for finding in findings if finding.kind == "not known"]
    notes = tuple(finding.text for finding in findings if finding.kind == "note") + SOURCES.get(consumer, ())
    if not reasons:
        command = start_command(consumer, checkpoint.name, checkpoint.ranks, checkpoint.revision)
        return ConsumerVerdict(consumer, VERSIONS[consumer], True, (), notes, command)
    why, remedy = tuple(finding.text for finding in reasons), _next_step(checkpoint, consumer, reasons)
    return ConsumerVerdict(consumer, VERSIONS[consumer], False if against else None, why, notes, remedy=remedy)


def refused(name: str, consumer: Consumer, problem: Dsv4Error) -> ConsumerVerdict:
    """Return the verdict on a folder that dsv4 cannot identify: a damaged one loads nowhere, a foreign one perhaps."""
    if consumer == "dsv4":
        return _own(problem)
    if isinstance(problem, CheckpointError) and not isinstance(problem, UnknownKey):
        return ConsumerVerdict(consumer, VERSIONS[consumer], False, (problem.message,), (), remedy=problem.remedy)
    reason = f"{problem.message}; what {VERSIONS[consumer]} does with it is not known here"
    return ConsumerVerdict(consumer, VERSIONS[consumer], None, (reason,), (), remedy=problem.remedy)


def _own(problem: Dsv4Error) -> ConsumerVerdict:
    return ConsumerVerdict("dsv4", VERSIONS["dsv4"], False, (problem.message,), (), remedy=problem.remedy)


def _next_step(checkpoint: InspectedCheckpoint, consumer: Consumer, reasons: list[Finding]) -> str:
    """Return the remedy: download damaged files again, else apply a small repair, else convert if possible."""
    problem, missing = checkpoint.coverage.problem(), checkpoint.identity.checkpoint.missing_files
    if missing:
        return download_again(Path(checkpoint.name), missing[0])
    if all(finding.fix for finding in reasons):
        return "; ".join(dict.fromkeys(finding.fix for finding in reasons))
    if problem is not None:
        return problem.remedy
    target = TARGETS[consumer].format(ranks=_ranks(checkpoint))
    name = _revised(checkpoint.name, checkpoint.revision)
    return f"dsv4 convert {shell_word(name)} OUT --to {target}"


def _ranks(checkpoint: InspectedCheckpoint) -> int:
    """Return the largest number of GPUs in one machine for which the official scripts can shard the model."""
    config = checkpoint.identity.config
    counts = (config.o_groups, config.num_attention_heads, config.n_routed_experts, config.vocab_size)
    return next(ranks for ranks in (8, 4, 2, 1) if not any(count % ranks for count in counts))


def start_command(consumer: Consumer, name: str, ranks: int = 0, revision: str = "") -> str:
    """Return the command that starts a consumer with a model.

    ranks: number of GPUs, 0 for the consumer's default. revision: the repository's revision, '' for the default.
    """
    if consumer in ("vllm", "sglang"):
        return start_line(consumer, name, ranks, revision)
    return STARTS[consumer].format(model=shell_word(_revised(name, revision)), ranks=ranks)


def _revised(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def verdict_document(model: str, found: ConsumerVerdict, deployment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the verdict as a JSON document of schema SCHEMA; `loads` is null if unknown.

    deployment: the plan for the GPUs of `--gpus`, null without it.
    """
    return {"schema": SCHEMA, "model": model} | asdict(found) | {"deployment": deployment}
