"""One side of `dsv4 trace`: a model with its options and ranks, and the recordings of its texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.commands.job import Job
from dsv4cli.commands.ranks import leading_ranks, left_by

if TYPE_CHECKING:
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.settings import Drafting
    from dsv4cli.engine.tracing.manifest import Text, TraceManifest
    from dsv4cli.engine.tracing.passes import Plan
    from dsv4cli.engine.tracing.recording import RecordedFolder
    from dsv4cli.engine.tracing.walk import Walk

LayersOpt = Annotated[str | None, typer.Option(metavar="A-B", help="Only these layers, for example 0-3.")]
WhatOpt = Annotated[
    str | None,
    typer.Option(
        metavar="GROUPS",
        help="Only these groups of stages, separated by commas: block, attn, index, router, ffn, logits.",
    ),
]


def parts_of(layers: str | None, what: str | None) -> dict[str, Any]:
    """Return the arguments of `manifest_of` that --layers and --what select. Raises UsageError."""
    from dsv4cli.engine.conversion.selection import parse_layers
    from dsv4cli.engine.tracing.stages import parse_groups

    return {"layers": None if layers is None else parse_layers(layers), "what": parse_groups(what)}


def manifest_for(job: Job, texts: "Sequence[Text]", parts: dict[str, Any]) -> "TraceManifest":
    """Return the manifest of a recording of the job's model. Raises as `manifest_of`.

    Args:
        parts: from `parts_of`.
    """
    from dsv4cli.engine.tracing.record import manifest_of, sums_shortly

    manifest = manifest_of(job.source, job.execution.numerics, texts, **parts)
    short = job.kernels == "triton" and sums_shortly(job.source, job.execution.numerics, job.device)
    return replace(manifest, short_sums=chunk_of(job) if short else 0)


@contextmanager
def in_ranks(job: Job, size: int | None, plan: "Plan") -> Iterator[Job]:
    """Start the other ranks of `size`, which record the plan's passes too. Yields the job of rank 0."""
    if size is None or size == 1:
        yield job
        return
    from dsv4cli.engine.system.ending import ends_soon

    remedy = "check whether the machine ran out of memory"
    with ends_soon(left_by(job.out)), leading_ranks(replace(job, plan=plan), size, remedy) as led:
        yield led


@contextmanager
def loaded(job: Job, texts: "Sequence[Text]") -> "Iterator[Transformer]":
    """Load the job's model on its device, with its backend."""
    with job.model([text.prompt for text in texts]) as model:
        yield model


def walk_of(job: Job, model: "Transformer", drafting: "Drafting | None" = None) -> "Walk":
    """Return how to run texts through the job's model.

    Args:
        drafting: None for as many draft tokens in every step as the job allows.
    """
    from dsv4cli.engine.tracing.walk import Walk

    drafts = replace(job.drafting, always=True) if drafting is None else drafting
    return Walk(model, job.device, chunk_of(job), drafts, job.process.followers)


def chunk_of(job: Job) -> int:
    """Return the prompt tokens per step: a fixed number, so that recordings on two machines have the same steps."""
    from dsv4cli.engine.config.capacity import DEFAULT_CHUNK

    return job.limits.prefill_chunk or DEFAULT_CHUNK


def record_plan(job: Job, walk: "Walk", plan: "Plan") -> "TraceManifest":
    """Make the recordings of a plan, with progress on a terminal. Return the manifest with all tokens."""
    from dsv4cli.engine.tracing.record import walked

    with job.out.counting("recording") as show:
        return walked(walk, plan, lambda done, total: show(done, total, ""))


def finished(job: Job, plan: "Plan", manifest: "TraceManifest", ranks: int | None) -> "list[RecordedFolder]":
    """Return the recordings of a plan after every rank has written its part."""
    from dsv4cli.engine.profiling.machine import describe_machine

    how = {"backend": job.kernels, "chunk": chunk_of(job), "drafts": job.drafting.most}
    return plan.finish(replace(manifest, ranks=ranks or 1, how=how | describe_machine(job.device)))
