"""The result of a comparison: the first stage beyond rounding, and everything as JSON. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dsv4cli.engine.tracing.compare import differences
from dsv4cli.engine.tracing.judge import Noise, StageVerdict, judged_by_halves
from dsv4cli.engine.tracing.manifest import check_same_shapes, check_same_tokens
from dsv4cli.engine.tracing.recording import Recording, common
from dsv4cli.engine.tracing.stages import STREAMS
from dsv4cli.errors import UsageError


@dataclass(frozen=True)
class TraceComparison:
    """A comparison of two recordings: every stage that both have, in order of computation."""

    one: Recording
    other: Recording
    verdicts: Sequence[StageVerdict]

    @property
    def beyond(self) -> list[StageVerdict]:
        """The stages that differ by more than rounding explains."""
        return [verdict for verdict in self.verdicts if verdict.beyond]

    @property
    def first(self) -> StageVerdict | None:
        """The first stage beyond rounding, where debugging should start; None if there is none."""
        return next(iter(self.beyond), None)

    @property
    def identical(self) -> bool:
        """Whether all values and choices are equal."""
        return not any(bool(verdict.difference.rows.any()) for verdict in self.verdicts)

    @property
    def drafters(self) -> bool:
        """Whether a model has a drafter, which is not compared."""
        return self.one.manifest.drafter or self.other.manifest.drafter

    def record(self) -> dict[str, Any]:
        """Return a JSON object, with null for numbers that are not finite."""
        first = self.first
        return {
            "one": self.one.name,
            "other": self.other.name,
            "parts": first is not None,
            "first": None if first is None else _record(first),
            "stages": [_record(verdict) for verdict in self.verdicts],
        }


def compared(
    one: Recording, other: Recording, noise: Noise, *, fed: bool, halves: Noise | None = None
) -> TraceComparison:
    """Compare every stage that both recordings have.

    Args:
        one: the reference.
        other: a recording of the same tokens.
        noise: rounding noise of the stages.
        fed: whether each half of a block of `other` was fed with the streams of `one`, as in `noise`.
        halves: noise of fed halves, for recordings that are not fed; see `judged_by_halves`.

    Raises:
        UsageError: the shapes or tokens differ, or there is no common stage.
    """
    names = (one.name, other.name)
    check_same_shapes(one.manifest, other.manifest)
    check_same_tokens(one.manifest.texts, other.manifest.texts, names)
    if not common(one, other):
        raise UsageError(
            f"{names[0]} and {names[1]} have no stage in common", "record both with the same --layers and --what"
        )
    found = [*differences(one, other, fed=fed)]
    if fed and one.manifest.layers[0]:
        # the first layer's input comes from layers that were neither recorded nor fed
        found = [each for each in found if (each.layer, each.stage) != (one.manifest.layers[0], STREAMS)]
    return TraceComparison(one, other, list(judged_by_halves(found, noise, halves)))


def _record(verdict: StageVerdict) -> dict[str, Any]:
    found = verdict.difference
    numbers = {
        "cosine": found.cosine,
        "relative": found.relative,
        "noise": verdict.noise,
        "excess": verdict.excess,
    }
    return {
        "layer": found.layer,
        "stage": found.stage,
        "where": verdict.place,
        "rows": len(found.rows),
        "other_choices": int((~found.alike).sum()),
        **{name: value if isfinite(value) else None for name, value in numbers.items()},
        "largest": found.largest
        and {
            "difference": found.largest.difference if isfinite(found.largest.difference) else None,
            "text": found.largest.text,
            "position": found.largest.position,
            "index": list(found.largest.index),
        },
        "beyond": verdict.beyond,
    }
