"""Comparison of the forms of a release on a machine: which fit, where, how much context, and how fast; no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.inspection.fit.forms import Form, forms_of
from dsv4cli.engine.inspection.fit.machine import Machine
from dsv4cli.engine.inspection.fit.plan import best_share, most_context
from dsv4cli.engine.inspection.fit.share import Share, SharedModel
from dsv4cli.engine.inspection.fit.speed import Speed, estimate

# numbers of sequences whose decode throughput is estimated
BATCHES = (1, 16)


@dataclass(frozen=True)
class FormFit:
    """A form of a release on a machine.

    Attributes:
        nbytes: bytes of its weights.
        share: the best way to run it, None if none fits.
        missing: bytes that each device lacks.
        context: largest context of one sequence.
        speed: estimated throughput, None for a CPU and for unknown cards.
    """

    form: Form
    nbytes: int
    share: Share | None
    missing: int
    context: int
    speed: Speed | None


def compare_forms(size: str, config: ModelConfig, machine: Machine, *, context: int) -> list[FormFit]:
    """Return every form of a release on a machine, for one sequence of `context` tokens; empty for other models."""
    return [_fit(form, machine, context) for form in forms_of(size, config)]


def _fit(form: Form, machine: Machine, context: int) -> FormFit:
    model = SharedModel(form.config, form.formats, machine.host, form.table)
    share, missing = best_share(model, machine, context)
    sizes = model.sizes(1 if share is None else share.ranks)
    speed = None if share is None else estimate(form.config, sizes, share, BATCHES, form.kernels)
    longest = 0 if share is None else most_context(model, share)
    return FormFit(form, model.sizes(1).total, share, missing, longest, speed)


def forms_document(forms: list[FormFit]) -> list[dict[str, Any]]:
    """Return the comparison for JSON; sizes are in bytes, throughput is in tokens/s."""
    return [
        {
            "form": one.form.name,
            "source": one.form.source,
            "bytes": one.nbytes,
            "fits": one.share is not None,
            "devices": [] if one.share is None else [device.torch_name for device in one.share.devices],
            "tier": tier_of(one),
            "host": 0 if one.share is None else one.share.host * one.share.ranks,
            "missing": one.missing,
            "largest_context": one.context,
            "estimate": one.speed and asdict(one.speed),
        }
        for one in forms
    ]


def tier_of(one: FormFit) -> str | None:
    """Return where the weights are: gpu, gpu+host or cpu; None if they fit nowhere."""
    if one.share is None:
        return None
    return "cpu" if not one.share.on_gpu else "gpu+host" if one.share.host else "gpu"
