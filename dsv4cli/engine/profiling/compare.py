"""Compares a profile with an earlier document of `dsv4 profile --json`. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dsv4cli.errors import UsageError

SCHEMA = "dsv4.profile/1"
# keys that must be equal for two documents to measure the same work
SUBJECT = ("model", "backend", "tp", "tokens", "batch", "context")
# chosen, not measured: changes below RUNS_DIFFER are not reported, whatever the spread; if the measured limits of
# the device differ by more than the factor DRIFTED, it was busy with other work
RUNS_DIFFER, DRIFTED = 0.1, 1.25


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of one line: the median and range of the measurements. The range covers both passes if there were two.

    Attributes:
        again: median of the second pass; None if there was one pass.
    """

    median: float
    low: float
    high: float
    again: float | None = None

    @property
    def medians(self) -> tuple[float, ...]:
        """The median of each pass."""
        return (self.median,) if self.again is None else (self.median, self.again)

    @property
    def spread(self) -> float:
        """Width of the range, as a fraction of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Change:
    """One line before and now; None if a document does not have it.

    Attributes:
        drift: how much the device's own speed differs between the two documents: a factor of at least 1.
    """

    name: str
    before: MeasuredTimes | None
    now: MeasuredTimes | None
    drift: float = 1.0

    @property
    def speedup(self) -> float | None:
        """Time before divided by time now: above 1 if it is faster now."""
        return self.before.median / self.now.median if self.before and self.now and self.now.median else None

    @property
    def verdict(self) -> Literal["faster", "slower", "within the spread", "unclear"] | None:
        """ "faster" or "slower" if the change is clear.

        It is clear if the ranges do not overlap and the ratio of every pass exceeds the wider spread, the usual
        difference between runs, and the drift. If the device was busy with other work (drift above `DRIFTED`), it is
        "unclear".
        """
        if self.before is None or self.now is None or self.speedup is None:
            return None
        if self.drift > DRIFTED:
            return "unclear"
        least = max(1 + max(self.before.spread, self.now.spread, RUNS_DIFFER), self.drift)
        before, now = self.before.medians, self.now.medians
        if self.now.high < self.before.low and min(before) > max(now) * least:
            return "faster"
        if self.now.low > self.before.high and min(now) > max(before) * least:
            return "slower"
        return "within the spread"

    def record(self) -> dict[str, Any]:
        """Return a JSON object: the medians, their ratio and the verdict."""
        times = {"before": self.before and self.before.median, "now": self.now and self.now.median}
        return {"name": self.name, **times, "speedup": self.speedup, "verdict": self.verdict}


@dataclass(frozen=True)
class BaselineComparison:
    """All changes since an earlier document.

    Attributes:
        differences: properties of the machine, the software or the measured work that differ: name to (before, now).
        drift: how much the device's own speed differs: a factor of at least 1.
    """

    differences: dict[str, tuple[Any, Any]]
    changes: list[Change]
    drift: float = 1.0

    @property
    def same_device(self) -> bool:
        """Whether both runs used the same device, so that ratios reflect only the software."""
        return "device" not in self.differences

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "same_device": self.same_device,
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "drift": self.drift,
            "changes": [change.record() for change in self.changes],
        }


def read_baseline(path: Path, kind: str) -> dict[str, Any]:
    """Read an earlier document of the same kind ("kernels" or "step"). Raises UsageError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read --baseline {path}: {error.strerror}", "use the --json output of an earlier run"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(f"--baseline {path} is not JSON", f"create one with `dsv4 profile {kind} --json`") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or document.get("kind") != kind:
        found = f"{schema!r}, {document.get('kind')!r}" if schema else "no schema"
        raise UsageError(
            f"--baseline {path} has {found}, expected {SCHEMA!r}, {kind!r}",
            f"create one with `dsv4 profile {kind} --json`",
        )
    try:
        compare(document, document).record()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"--baseline {path} is not a complete profile", f"create one with `dsv4 profile {kind} --json`"
        ) from None
    return dict(document)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> BaselineComparison:
    """Compare two documents line by line, in the order of the new one."""
    pairs = {name: (before["machine"].get(name), value) for name, value in now["machine"].items()}
    pairs |= {name: (before.get(name), now.get(name)) for name in SUBJECT} | _contexts(before, now)
    old, new = _times(before), _times(now)
    names, drift = dict.fromkeys([*new, *old]), _drift(_rates(before), _rates(now))
    return BaselineComparison(
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        [Change(name, old.get(name), new.get(name), drift) for name in names],
        drift,
    )


def _contexts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the first pair of contexts that differ. In a kernels document, each line has its own context."""
    old, new = ({_label(line): line.get("context") for line in document["results"]} for document in (before, now))
    changed = [(old[name], context) for name, context in new.items() if name in old and old[name] != context]
    return {"context": changed[0]} if changed else {}


def in_doubt(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines to measure a second time: those that are faster or slower after one pass."""
    changed = {change.name for change in compare(before, now).changes if change.verdict in ("faster", "slower")}
    return [line for line in now["results"] if _label(line) in changed]


def _label(line: Mapping[str, Any]) -> str:
    return f"{line['name']} x{line['tokens']}" if "tokens" in line else str(line["name"])


def _lines(document: Mapping[str, Any]) -> list[Any]:
    """Return all lines with a name, with or without a time. Lines of draft timing are last."""
    draft = document.get("draft")
    return list(document["results"]) + ([*draft["rows"], draft.get("drafting")] if draft else [])


def _times(document: Mapping[str, Any]) -> dict[str, MeasuredTimes]:
    """Return the time of each line by its name and number of tokens.

    A part of a step has the range of the whole step.
    """
    found: dict[str, MeasuredTimes] = {}
    whole = MeasuredTimes(1.0, 1.0, 1.0)
    for line in _lines(document):
        timing = line.get("seconds")
        if isinstance(timing, dict) and isinstance(median := timing.get("median"), int | float):
            times = MeasuredTimes(
                median, timing.get("low", median * whole.low), timing.get("high", median * whole.high)
            )
            if "low" in timing and median:
                whole = MeasuredTimes(1.0, times.low / median, times.high / median)
            again = line.get("second_pass")
            found[_label(line)] = _widened(times, again) if again else times
    return found


def _widened(times: MeasuredTimes, again: Mapping[str, float]) -> MeasuredTimes:
    low, high = min(times.low, again["low"]), max(times.high, again["high"])
    return replace(times, low=low, high=high, again=again["median"])


def _rates(document: Mapping[str, Any]) -> dict[str, float]:
    """Return the device's measured limits in that run."""
    ceilings = dict(document.get("ceilings") or {})
    return {**ceilings.pop("matmul_flops", {}), **ceilings}


def _drift(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    ratios = [now[name] / before[name] for name in now.keys() & before.keys() if before[name] and now[name]]
    return max((max(ratio, 1 / ratio) for ratio in ratios), default=1.0)
