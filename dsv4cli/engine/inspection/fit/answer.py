"""The answer of `--fit`: whether the inspected model runs on a machine; no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4cli.engine.checkpoint.gguf.loading import loaded_table
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.source import RandomSource
from dsv4cli.engine.inspection.fit.advice import Advice, advise
from dsv4cli.engine.inspection.fit.compare import FormFit, compare_forms, forms_document
from dsv4cli.engine.inspection.fit.machine import Machine
from dsv4cli.engine.inspection.fit.plan import Fit, plan_fit
from dsv4cli.engine.inspection.report import Inspection
from dsv4cli.engine.inspection.sources import FileSource, RemoteSource
from dsv4cli.errors import UsageError

SCHEMA = "dsv4.fit/3"


@dataclass(frozen=True)
class FitAnswer:
    """The answer.

    runs: whether `dsv4 run` would load and run the model here. steps: advice, best first. forms: those of its release.
    """

    model: str
    fit: Fit
    steps: list[Advice]
    runs: bool
    forms: list[FormFit] = field(default_factory=list)


def answer_fit(result: Inspection, machine: Machine, *, context: int, batch: int) -> FitAnswer:
    """Return whether an inspected model runs on a machine.

    Raises the inspection's problem if the dimensions of the model are unknown, UsageError for a single file, and what
    `plan_fit` raises.
    """
    source, identity = result.source, result.identity
    if isinstance(source, FileSource):
        raise UsageError(f"{source.name} is only a part of a model", f"use its folder: {source.file.parent}")
    if identity is None:
        assert result.problem is not None
        raise result.problem
    table = loaded_table(identity) if isinstance(identity, GgufIdentity) else None
    fit = plan_fit(identity.config, identity.formats, machine, context=context, batch=batch, table=table)
    # hf:// is known to inspect alone
    name = source.repository if isinstance(source, RemoteSource) else source.name
    steps = advise(fit, name, result.problem, is_random=isinstance(source, RandomSource))
    forms = compare_forms(identity.size, identity.config, machine, context=context)
    return FitAnswer(source.name, fit, steps, fit.best is not None and result.problem is None, forms)


def fit_document(answer: FitAnswer) -> dict[str, Any]:
    """Return the answer as a JSON document of schema SCHEMA; all sizes are in bytes."""
    fit = answer.fit
    return {
        "schema": SCHEMA,
        "model": answer.model,
        "runs": answer.runs,
        "best": None if fit.best is None else fit.shares.index(fit.best),
        "context": fit.context,
        "batch": fit.batch,
        "largest_context": fit.largest_context,
        "largest_batch": fit.largest_batch,
        "missing": fit.missing,
        "layers": fit.layers,
        "left_out": [asdict(gpu) for gpu in fit.machine.older],
        "whole_on_every_gpu": fit.whole,
        "shares": [
            asdict(share) | {"ranks": share.ranks, "needed": share.needed, "host": share.host, "fits": share.fits}
            for share in fit.shares
        ],
        "next": [asdict(step) for step in answer.steps],
        "forms": forms_document(answer.forms),
    }
