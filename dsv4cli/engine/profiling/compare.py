"""What has changed since an earlier document of `dsv4 profile --json`; no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4cli.errors import UsageError

SCHEMA = "dsv4.profile/1"
# what must be equal for two documents to measure the same thing
SUBJECT = ("model", "backend", "tp", "batch", "context")


@dataclass(frozen=True)
class Change:
    """Seconds of one line before and now; None where only the other document has the line."""

    name: str
    before: float | None
    now: float | None

    @property
    def speedup(self) -> float | None:
        """Above 1 where it has become faster."""
        return self.before / self.now if self.before and self.now else None


@dataclass(frozen=True)
class Comparison:
    """machine: parts of the machine or the software, and of what was measured, that differ: name to (before, now)."""

    differences: dict[str, tuple[Any, Any]]
    changes: list[Change]

    @property
    def same_device(self) -> bool:
        """Whether the ratios speak of the software alone."""
        return "device" not in self.differences

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "same_device": self.same_device,
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "changes": [asdict(change) | {"speedup": change.speedup} for change in self.changes],
        }


def read_baseline(path: Path, kind: str) -> dict[str, Any]:
    """An earlier document of the same kind ("kernels" or "step"). Raises UsageError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--baseline {path} cannot be read: {error.strerror}", "name a file of an earlier run"
        ) from None
    except ValueError:
        raise UsageError(f"--baseline {path} is not JSON", f"make one with `dsv4 profile {kind} --json`") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or document.get("kind") != kind or not _sound(document):
        found = f"{schema!r}, {document.get('kind')!r}" if schema else "no schema"
        raise UsageError(
            f"--baseline {path} has {found}, expected {SCHEMA!r}, {kind!r}",
            f"make one with `dsv4 profile {kind} --json`",
        )
    return dict(document)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    """Line by line, in the order of the new document."""
    pairs = {name: (before["machine"].get(name), value) for name, value in now["machine"].items()}
    pairs |= {name: (before.get(name), now.get(name)) for name in SUBJECT}
    old, new = _seconds(before), _seconds(now)
    names = dict.fromkeys([*new, *old])
    return Comparison(
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        [Change(name, old.get(name), new.get(name)) for name in names],
    )


def _sound(document: Mapping[str, Any]) -> bool:
    machine, lines = document.get("machine"), document.get("results")
    return (
        isinstance(machine, dict)
        and isinstance(lines, list)
        and all(isinstance(line, dict) and isinstance(line.get("name"), str) for line in lines)
    )


def _seconds(document: Mapping[str, Any]) -> dict[str, float]:
    """The median of each line that has one, by its name and number of tokens."""
    found = {}
    for line in document["results"]:
        timing = line.get("seconds")
        if isinstance(timing, dict) and isinstance(timing.get("median"), int | float):
            found[f"{line['name']} x{line['tokens']}" if "tokens" in line else line["name"]] = timing["median"]
    return found
