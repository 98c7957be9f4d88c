"""Which differences rounding alone explains: those that are not far above what rounding makes of the stage.

No stage has a constant of its own: its noise is measured. The same model computes the same tokens once more, with the
streams that go into each block, or each half of it, moved as far as fp32 sums lie apart that are taken in another order
(feed.Jitter). How far this twin lies apart at a stage, together with one rounding of the stage's own format
(compare.rounding_of), is its noise, of these rows:

- the median row, beside the twin's upper quartile, and the row that nine of ten are below, beside the one that 19 of 20
  are below: a twin is one sample of many;
- the worst row, beside the twin's worst row of that stage in any layer: a code of FP8 or FP4 that is rounded the other
  way is rare, and one layer may have none.

In whole forward passes differences go on from half to half, and so do those of the twin. A half that takes the same
streams on both sides is judged as a fed one nevertheless.

What lies up to FACTOR times as far apart is explained: between two streams a row is rounded at about a dozen places,
and their errors add up as √12 = 3.5. Of choices so many rows may be others, FACTOR for each that the twin has and for
one more; how many are chosen does not hang on rounding.
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
# of the rows of a stage, and of those of its twin
SHARES = ((0.5, 0.75), (0.9, 0.95))
# of whole forward passes, and of halves of blocks that are fed
NOISE = {False: "noise.safetensors", True: "noise-fed.safetensors"}


class Moved(NamedTuple):
    """How far each row of a stage moves: fp32 [R], and whether all that was chosen before is the same: bool [R]."""

    rows: torch.Tensor
    alike: torch.Tensor

    def explained(self) -> torch.Tensor:
        """Of rows whose choices are the same; of all where there is none."""
        rows = self.rows[self.alike & self.rows.isfinite()]
        return rows if len(rows) else self.rows[self.rows.isfinite()]


# by layer and stage
Noise = Mapping[tuple[int, str], Moved]


@dataclass(frozen=True)
class StageVerdict:
    """A stage's difference beside its noise, the twin's relative L2. excess: how many times as far apart as is
    explained; above 1 there is more than rounding."""

    difference: StageDifference
    noise: float
    excess: float

    @property
    def beyond(self) -> bool:
        """Whether more than rounding is there."""
        return self.excess > 1

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return placed(self.difference.layer, self.difference.stage)


def noise_of(found: Iterable[StageDifference]) -> Noise:
    """What a comparison with the twin gives."""
    return {(one.layer, one.stage): Moved(one.rows, one.alike) for one in found}


def save_noise(noise: Noise, folder: Path, *, fed: bool) -> None:
    """Puts it into a recording's folder; fed: as of `differences`. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for (layer, stage), moved in noise.items():
        # each tensor of a file has memory of its own
        tensors |= {f"{layer}/{stage}/{name}": rows.clone() for name, rows in moved._asdict().items()}
    write_file(folder / NOISE[fed], save(tensors), folder / f".{NOISE[fed]}")


def load_noise(folder: Path, *, fed: bool) -> Noise | None:
    """What a recording's folder has of it. Raises UsageError for a file that is damaged."""
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
    """Each stage beside its noise; one whose noise is not known is left out."""
    worst: dict[str, float] = defaultdict(float)
    for (_, stage), moved in noise.items():
        worst[stage] = max(worst[stage], _level(moved.explained(), 1.0))
    for one in found:
        if (one.layer, one.stage) in noise:
            moved = noise[one.layer, one.stage]
            twin, last = moved.explained(), noise.get((one.layer, STREAMS))
            if one.stage == LOGITS and last is not None:
                # logits of a few tokens say little: they move as the streams that they follow from
                twin, worst[LOGITS] = torch.cat((twin, last.explained())), max(worst[LOGITS], worst[STREAMS])
            choices = BY_NAME[one.stage].choices
            excess = _of_choices(one, moved) if choices else _of_values(one, twin, worst[one.stage])
            yield StageVerdict(one, _mean(moved.rows), excess)


def judged_by_halves(
    found: Sequence[StageDifference], noise: Noise, halves: Noise | None = None
) -> Iterator[StageVerdict]:
    """Judge whole forward passes, as sharply as fed ones where both sides still compute from equal streams.

    A half of a block that takes the same streams on both sides owes no difference to what comes before it. Rounding
    explains there only what it makes of that half, not what it makes of all before.

    Args:
        found: every stage, in order.
        noise: of whole forward passes.
        halves: of fed halves of blocks, None where it is not known.
    """
    sharper = {} if halves is None else {_key(one): one for one in judged(found, halves)}
    is_equal = {(one.layer, one.stage): equal for one, equal in zip(found, _after_equal_streams(found), strict=True)}
    for verdict in judged(found, noise):
        other = sharper.get(_key(verdict)) if is_equal[_key(verdict)] else None
        yield verdict if other is None else max(verdict, other, key=lambda one: one.excess)


def _key(verdict: StageVerdict) -> tuple[int, str]:
    return verdict.difference.layer, verdict.difference.stage


def _after_equal_streams(found: Iterable[StageDifference]) -> Iterator[bool]:
    """Yield for each stage whether the last streams before it are equal; those of a half's end belong to that half."""
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
    """What so many of the rows do not exceed; torch.quantile takes 16 million at most."""
    if not len(rows):
        return 0.0
    return float(rows.kthvalue(max(1, int(share * len(rows)))).values)
