"""Compares two recordings stage by stage: cosine, relative L2, largest difference, different choices."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, prod

import torch

from dsv4cli.engine.tracing.feed import HALF_STEPS, rounding_between, sum_rounding
from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.recording import Recording, common
from dsv4cli.engine.tracing.stages import AFTER_ATTENTION, BY_NAME, STREAMS, placed
from dsv4cli.errors import UsageError

# values to compare at once, in double precision
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Largest:
    """The largest difference, and where it is: text, position and index in the row."""

    difference: float
    text: int
    position: int
    index: tuple[int, ...]


@dataclass(frozen=True)
class StageDifference:
    """The difference of one stage.

    Attributes:
        cosine, relative: cosine and relative L2 over all rows, in double precision. For choices, `relative` is the
            share of rows with a different choice, and `cosine` is 1 minus that.
        rounding: relative size of one rounding to the coarser of the two formats.
        rows: relative L2 of each row, fp32 [R]; infinite if it is not a number.
        alike: bool [R], whether all earlier choices for a row are the same. A different expert changes the sum, and
            rounding may be the reason for the choice.
    """

    layer: int
    stage: str
    cosine: float
    relative: float
    largest: Largest | None
    rounding: float
    rows: torch.Tensor
    alike: torch.Tensor


def differences(one: Recording, other: Recording, *, fed: bool) -> Iterator[StageDifference]:
    """Yield the difference of each stage that both recordings have, in order.

    Args:
        fed: whether each half of a block of `other` was fed with the streams of `one`, so that differences do not
            propagate from one half to the next.

    Raises:
        UsageError: rows have different shapes.
    """
    every = torch.ones(one.manifest.rows("token", 0), dtype=torch.bool, device="cpu")
    tokens = every
    for layer, stage in common(one, other):
        found = _difference(one, other, layer, stage, _alike(tokens, stage, one, layer))
        yield found
        if BY_NAME[stage].choices:
            tokens = tokens & (found.rows == 0)
        elif fed and stage in (STREAMS, AFTER_ATTENTION):
            tokens = every


def rounding_of(one: TraceManifest, other: TraceManifest, stage: str, half_step: float) -> float:
    """Return the relative change of a stage's rows that one additional rounding causes.

    Errors of up to half a step have a root mean square of 1/√3 of it. An fp32 value is computed from a
    sum of `hidden` rounded values: it changes if one of them is rounded the other way, or if they are added in another
    order.

    Args:
        half_step: half a step of the coarser format, relative; 0 for fp32.
    """
    sums, between = sum_rounding(one), rounding_between(one, other)
    if BY_NAME[stage].direct:
        return sums
    if half_step:
        return hypot(max(half_step, between) / 3**0.5, sums)
    own = max(between, HALF_STEPS.get(one.dtype, 0.0))
    return hypot(2 * own / one.hidden**0.5, sums)


def _alike(tokens: torch.Tensor, stage: str, one: Recording, layer: int) -> torch.Tensor:
    """Return which rows of a stage were computed after the same choices.

    tokens: bool [T], whether all earlier choices for a token are the same.
    """
    per = BY_NAME[stage].per
    if per == "token":
        return tokens
    rows = one.manifest.rows(per, layer)
    if per == "entry":
        return torch.ones(rows, dtype=torch.bool, device="cpu")
    return tokens[[_token(one, row, layer) for row in range(rows)]]


def _token(one: Recording, row: int, layer: int) -> int:
    """Return the token row that a row of logits belongs to."""
    text, position = one.manifest.place(row, "logits", layer)
    return position + sum(len(before.ids) for before in one.manifest.texts[:text])


def _difference(one: Recording, other: Recording, layer: int, stage: str, alike: torch.Tensor) -> StageDifference:
    total = _Sums()
    rows = one.manifest.rows(BY_NAME[stage].per, layer)
    width = prod(one.rows(layer, stage, 0, 1).shape[1:]) if rows else 1
    step = max(1, AT_ONCE // max(1, width))
    for first in range(0, rows, step):
        a, b = (side.rows(layer, stage, first, min(first + step, rows)) for side in (one, other))
        if a.shape != b.shape and not BY_NAME[stage].choices:
            ours, theirs = (" x ".join(map(str, side.shape[1:])) for side in (a, b))
            raise UsageError(
                f"{placed(layer, stage)}: a row has {ours} values in {one.name} and {theirs} in {other.name}",
                "compare models of the same shape, or other stages with --what",
            )
        total.add(a, b, first, choices=BY_NAME[stage].choices)
    return total.difference(one, other, layer, stage, alike)


class _Sums:
    """Accumulates the comparison of a stage."""

    def __init__(self) -> None:
        self.dot = self.one = self.other = self.between = 0.0
        self.rows: list[torch.Tensor] = []
        self.largest: tuple[float, int, tuple[int, ...]] = (-1.0, 0, ())
        self.half_step = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, first: int, *, choices: bool) -> None:
        """Add rows of both recordings, starting at row `first`."""
        if choices:
            self.rows.append(_others(a, b))
            return
        self.half_step = max(HALF_STEPS.get(_name(x.dtype), 0.0) for x in (a, b))
        shape, a, b = a.shape, a.flatten(1).double(), b.flatten(1).double()
        gap = (a - b).nan_to_num(float("inf"), float("inf"), float("inf")).abs()
        self.dot += float((a * b).sum())
        self.one += float(a.square().sum())
        self.other += float(b.square().sum())
        self.between += float(gap.square().sum())
        norm = a.norm(dim=1)
        relative = gap.norm(dim=1) / torch.where(norm > 0, norm, torch.ones_like(norm))
        self.rows.append(relative.float())
        if gap.numel() and float(gap.max()) > self.largest[0]:
            place = torch.unravel_index(gap.argmax(), shape)
            row, *index = (int(number) for number in place)
            self.largest = (float(gap.max()), first + row, tuple(index))

    def difference(
        self, one: Recording, other: Recording, layer: int, stage: str, alike: torch.Tensor
    ) -> StageDifference:
        """Return the difference over all rows."""
        rows, per = torch.cat(self.rows) if self.rows else torch.zeros(0, device="cpu"), BY_NAME[stage].per
        if BY_NAME[stage].choices:
            mean = float((rows > 0).float().mean()) if len(rows) else 0.0
            return StageDifference(layer, stage, 1.0 - mean, mean, None, 0.0, rows, alike)
        gap, row, index = self.largest
        largest = Largest(gap, *one.manifest.place(row, per, layer), index) if gap > 0 else None
        scale = (self.one * self.other) ** 0.5
        cosine = self.dot / scale if scale else float(self.one == self.other)
        relative = (self.between / self.one) ** 0.5 if self.one else float(self.between > 0)
        rounding = rounding_of(one.manifest, other.manifest, stage, self.half_step)
        return StageDifference(layer, stage, cosine, relative, largest, rounding, rows, alike)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _others(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the share of a's choices that b lacks; infinite if their number differs.

    -1 in a row means no choice.
    """
    width = max(a.shape[1], b.shape[1])
    wide = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in (a, b)]
    a, b = wide
    missing = ((a[:, :, None] != b[:, None]).all(2) & (a >= 0)).sum(1)
    counts = [(x >= 0).sum(1) for x in (a, b)]
    return torch.where(counts[0] == counts[1], missing / counts[0].clamp_min(1), float("inf")).float()
