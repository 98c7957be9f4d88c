"""Which differences rounding alone explains: those that are not far above what one rounding more makes of the stage.

The rule has no constant of a stage. A stage's noise is measured: the same model computes the same tokens once more,
with the streams that go into each block, or each half of it, moved as far as sums move them that are taken in another
order (feed.Jitter). What a stage then differs by in the median row, in nine of ten rows and in the worst row, together
with one rounding of its own format, is what rounding explains; up to FACTOR times as much is noise. Between two streams
a row is rounded at about a dozen places, whose errors add up as √12 = 3.5: FACTOR is the next whole number.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import hypot, inf
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsv4cli.engine.tracing.compare import Difference
from dsv4cli.engine.tracing.manifest import Manifest
from dsv4cli.engine.tracing.stages import BY_NAME, placed

FACTOR = 4.0
# which rows are looked at
SHARES = (0.5, 0.9, 1.0)
NOISE = "noise.safetensors"
# by (layer, stage): of each row how far it moves, and whether all that was chosen before is the same
Noise = Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Verdict:
    """A stage's difference beside its noise. excess: how many times as far apart as noise allows, in the worst of the
    rows that are looked at; above 1 rounding does not explain it."""

    difference: Difference
    noise: float
    excess: float

    @property
    def beyond(self) -> bool:
        """Whether more than rounding is there."""
        return self.excess > 1

    def place(self, manifest: Manifest) -> str:
        """Where it is, in words."""
        return placed(self.difference.layer, self.difference.stage, manifest.layers_of_model)


def noise_of(found: Iterable[Difference]) -> Noise:
    """What a comparison with the moved twin gives."""
    return {(one.layer, one.stage): (one.rows, one.alike) for one in found}


def save_noise(noise: Noise, folder: Path) -> None:
    """Puts it into a recording's folder. Raises OSError."""
    tensors = {}
    for (layer, stage), (rows, alike) in noise.items():
        tensors |= {f"{layer}/{stage}/rows": rows, f"{layer}/{stage}/alike": alike}
    save_file(tensors, folder / NOISE)


def load_noise(folder: Path) -> Noise | None:
    """What a recording's folder has of it."""
    if not (folder / NOISE).exists():
        return None
    tensors = load_file(folder / NOISE)
    places = {tuple(name.split("/")[:2]) for name in tensors}
    return {
        (int(layer), stage): (tensors[f"{layer}/{stage}/rows"], tensors[f"{layer}/{stage}/alike"])
        for layer, stage in places
    }


def judged(found: Iterable[Difference], noise: Noise) -> Iterator[Verdict]:
    """Each stage beside its noise; one whose noise is not known is left out."""
    for one in found:
        if (one.layer, one.stage) in noise:
            rows, alike = noise[one.layer, one.stage]
            choices = BY_NAME[one.stage].choices
            excess = _of_choices(one, rows) if choices else _of_values(one, rows[alike])
            yield Verdict(one, float(rows.double().square().mean() ** 0.5) if len(rows) else 0.0, excess)


def _of_choices(found: Difference, noise: torch.Tensor) -> float:
    """As many other rows as the twin has, and one."""
    return found.others / (FACTOR * (int((noise > 0).sum()) + 1))


def _of_values(found: Difference, noise: torch.Tensor) -> float:
    rows = found.rows[found.alike]
    if not len(rows):
        return 0.0
    if not bool(rows.isfinite().all()):
        return inf
    noise = noise[noise.isfinite()]
    worst = 0.0
    for share in SHARES:
        own = hypot(_level(noise, share) if len(noise) else 0.0, found.rounding)
        worst = max(worst, _level(rows, share) / (FACTOR * own))
    return worst


def _level(rows: torch.Tensor, share: float) -> float:
    """What so many of the rows do not exceed."""
    return float(torch.quantile(rows.double(), share, interpolation="lower"))
