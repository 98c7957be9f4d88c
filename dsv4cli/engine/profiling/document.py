"""Builds the documents that `dsv4 profile --json` prints."""

from collections.abc import Iterable
from typing import Any

import torch

from dsv4cli.engine.profiling.ceilings import Ceilings
from dsv4cli.engine.profiling.compare import SCHEMA
from dsv4cli.engine.profiling.drafting import DraftProfile
from dsv4cli.engine.profiling.kernels import MeasuredOperation
from dsv4cli.engine.profiling.machine import describe_machine
from dsv4cli.engine.profiling.step import StepProfile, StepShape


def kernels_document(
    model: str, backend: str, tp: int, device: torch.device, ceilings: Ceilings, measured: Iterable[MeasuredOperation]
) -> dict[str, Any]:
    """Return the document of `profile kernels`."""
    return {
        **_head("kernels", model, backend, device),
        "tp": tp,
        "ceilings": ceilings.record(),
        "results": [one.record(ceilings) for one in measured],
    }


def step_document(
    model: str,
    backend: str,
    device: torch.device,
    load: StepShape,
    ceilings: Ceilings,
    profile: StepProfile,
    drafts: DraftProfile | None,
) -> dict[str, Any]:
    """Return the document of `profile step`."""
    seconds, floor = profile.total.median, profile.weight_bytes / ceilings.bandwidth
    classes = [
        {"name": name, "count": profile.counts.get(name), "seconds": {"median": time}, "share": time / profile.ranged}
        for name, time in profile.classes.items()
    ]
    return {
        **_head("step", model, backend, device),
        "tokens": load.tokens,
        "context": load.context,
        "batch": load.batch,
        "ceilings": ceilings.record(),
        "captured": profile.captured,
        "tokens_per_second": load.total / seconds,
        "weights": {"bytes": profile.weight_bytes, "floor_seconds": floor, "of_bandwidth": floor / seconds},
        "results": [{"name": "step", "count": 1, "seconds": profile.total.record(), "share": None}, *classes],
        "kernels": profile.launches and profile.launches.record(seconds, load.total),
        "draft": drafts and drafts.record(),
    }


def _head(kind: str, model: str, backend: str, device: torch.device) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": kind, "model": model, "backend": backend, "machine": describe_machine(device)}
