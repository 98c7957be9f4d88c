"""Judges which differences rounding alone explains: those not far above the measured rounding noise of the stage.

There are no constants per stage: noise is measured. The same model computes the same tokens again as a "twin", with the
streams into each block, or into each half of it, perturbed by as much as fp32 sums in different orders differ
(feed.Jitter). The noise of a stage is the twin's difference there, combined with one rounding of the stage's own format
(compare.rounding_of). It is compared for these rows:

- The median row with the twin's upper quartile, and the 90th percentile with the twin's 95th: a twin is only one
  sample.
- The worst row with the twin's worst row of that stage in any layer: an FP8 or FP4 code that rounds the other way is
  rare, and a layer may have none.

In whole forward passes, differences propagate from half to half, and so do the twin's. A half whose input streams are
equal on both sides is judged like a fed half.

Differences up to FACTOR times the noise are explained: between two streams a row is rounded about 12 times, and the
errors add up as √12 = 3.5. For choices, the number of rows that may differ is FACTOR times one more than the twin's.
The number of choices in a row does not depend on rounding and must be equal.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dsv4cli.engine.system.atomic import write_file
from dsv4cli.engine.tracing.compare import StageDifference
from dsv4cli.engine.tracing.stages import AFTER_ATTENTION, BY_NAME, LOGITS, STREAMS, placed
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word

FACTOR = 4.0
# quantiles to compare: of the rows of a stage, and of the rows of its twin
SHARES = ((0.5, 0.75), (0.9, 0.95))
# file names by `fed`: noise of whole forward passes, and of fed halves of blocks
NOISE = {False: "noise.safetensors", True: "noise-fed.safetensors"}


class Moved(NamedTuple):
    """The relative difference of each row, fp32 [R], and whether all earlier choices are the same, bool [R]."""

    rows: torch.Tensor
    alike: torch.Tensor

    def explained(self) -> torch.Tensor:
        """Return the finite rows whose earlier choices are the same, or all finite rows if there are none."""
        rows = self.rows[self.alike & self.rows.isfinite()]
        return rows if len(rows) else self.rows[self.rows.isfinite()]


# by layer and stage
Noise = Mapping[tuple[int, str], Moved]


@dataclass(frozen=True)
class StageVerdict:
    """A stage's difference compared with its noise.

    Attributes:
        noise: relative L2 of the twin.
        excess: the difference divided by the largest one that rounding explains.
    """

    difference: StageDifference
    noise: float
    excess: float

    @property
    def beyond(self) -> bool:
        """Whether rounding alone does not explain the difference."""
        return self.excess > 1

    @property
    def place(self) -> str:
        """Layer and stage in words."""
        return placed(self.difference.layer, self.difference.stage)


def noise_of(found: Iterable[StageDifference]) -> Noise:
    """Return the noise from a comparison with the twin."""
    return {(one.layer, one.stage): Moved(one.rows, one.alike) for one in found}


def save_noise(noise: Noise, folder: Path, *, fed: bool) -> None:
    """Save the noise in a recording's folder. fed: as in `differences`. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for (layer, stage), moved in noise.items():
        # safetensors requires that tensors share no memory
        tensors |= {f"{layer}/{stage}/{name}": rows.clone() for name, rows in moved._asdict().items()}
    write_file(folder / NOISE[fed], save(tensors), folder / f".{NOISE[fed]}")


def load_noise(folder: Path, *, fed: bool) -> Noise | None:
    """Load the noise from a recording's folder; None if there is none. Raises UsageError if the file is damaged."""
    path = folder / NOISE[fed]
    if not path.is_file():
        return None
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = defaultdict(dict)
    try:
        for key, rows in load_file(path).items():
            layer, stage, name = key.split("/")
            parts[int(layer), stage][name] = rows
        return {place: Moved(**moved) for place, moved in parts.items()}
    except (SafetensorError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}", f"record {shell_word(folder)} again") from None


def judged(found: Iterable[StageDifference], noise: Noise) -> Iterator[StageVerdict]:
    """Yield a verdict for each stage whose noise is known."""
    worst: dict[str, float] = defaultdict(float)
    for (_, stage), moved in noise.items():
        worst[stage] = max(worst[stage], _level(moved.explained(), 1.0))
    for one in found:
        if (one.layer, one.stage) in noise:
            moved = noise[one.layer, one.stage]
            twin, last = moved.explained(), noise.get((one.layer, STREAMS))
            if one.stage == LOGITS and last is not None:
                # few tokens have logits, so add the noise of the streams that they are computed from
                twin, worst[LOGITS] = torch.cat((twin, last.explained())), max(worst[LOGITS], worst[STREAMS])
            choices = BY_NAME[one.stage].choices
            excess = _of_choices(one, moved) if choices else _of_values(one, twin, worst[one.stage])
            yield StageVerdict(one, _mean(moved.rows), excess)


def judged_by_halves(
    found: Sequence[StageDifference], noise: Noise, halves: Noise | None = None
) -> Iterator[StageVerdict]:
    """Judge whole forward passes; use the stricter noise of fed halves where both sides start from equal streams.

    If a half of a block has the same input streams on both sides, its difference comes from that half alone. Then
    rounding in that half must explain it, not rounding in all earlier layers.

    Args:
        found: every stage, in order.
        noise: noise of whole forward passes.
        halves: noise of fed halves of blocks; None if unknown.
    """
    sharper = {} if halves is None else {_key(one): one for one in judged(found, halves)}
    is_equal = {(one.layer, one.stage): equal for one, equal in zip(found, _after_equal_streams(found), strict=True)}
    for verdict in judged(found, noise):
        other = sharper.get(_key(verdict)) if is_equal[_key(verdict)] else None
        yield verdict if other is None else max(verdict, other, key=lambda one: one.excess)


def _key(verdict: StageVerdict) -> tuple[int, str]:
    return verdict.difference.layer, verdict.difference.stage


def _after_equal_streams(found: Iterable[StageDifference]) -> Iterator[bool]:
    """Yield for each stage whether the last streams before it are equal.

    A half's output streams belong to that half.
    """
    equal = False
    for one in found:
        yield equal
        if one.stage in (STREAMS, AFTER_ATTENTION):
            equal = not bool(one.rows.any())


def _mean(rows: torch.Tensor) -> float:
    return float(rows.double().square().mean() ** 0.5) if len(rows) else 0.0


def _of_choices(found: StageDifference, twin: Moved) -> float:
    if not bool(found.rows.isfinite().all()):
        return inf
    return int((found.rows > 0).sum()) / (FACTOR * (int((twin.rows > 0).sum()) + 1))


def _of_values(found: StageDifference, twin: torch.Tensor, worst: float) -> float:
    rows = found.rows[found.alike] if bool(found.alike.any()) else found.rows
    if not bool(found.rows.isfinite().all()):
        return inf
    pairs = [(_level(rows, own), _level(twin, other)) for own, other in SHARES]
    return max(far / (FACTOR * hypot(near, found.rounding)) for far, near in [*pairs, (_level(rows, 1.0), worst)])


def _level(rows: torch.Tensor, share: float) -> float:
    """Return the quantile of the rows. torch.quantile accepts at most 16 million values."""
    if not len(rows):
        return 0.0
    return float(rows.kthvalue(max(1, int(share * len(rows)))).values)
