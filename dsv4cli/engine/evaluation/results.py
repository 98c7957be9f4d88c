"""The results file: a header line with the model and the settings, then one line per item. No torch.

Files of the same evaluation can be concatenated: each part begins with the same header.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4cli.engine.chat.answer_file import LineFile
from dsv4cli.engine.checkpoint.gguf.files import SUFFIX as GGUF_SUFFIX
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.evaluation.items import EvalSet
from dsv4cli.engine.evaluation.outcome import Outcome, outcome_of
from dsv4cli.engine.system.regular_files import read_bytes
from dsv4cli.errors import UsageError

SCHEMA = "dsv4.eval-results/1"
# small files that affect the prompt's tokens or the model's outputs
_TEXTS = ("config.json", "tokenizer.json")
# header keys that must not change when results are added -> their names in error messages
_DECIDES = {"weights": "model", "digest": "questions", "settings": "settings"}


def weights_of(source: FolderSource | RandomSource) -> str:
    """Return an identifier of the model that changes when its files change."""
    if isinstance(source, RandomSource):
        return source.name
    files = [[path.name, stamp[:2]] for path, stamp in source.identity.checkpoint.stamps.items()]
    texts = [read_bytes(path).hex() for name in _TEXTS if (path := source.folder / name).exists()]
    return hashlib.sha256(json.dumps([files, texts]).encode()).hexdigest()[:16]


def header_of(source: FolderSource | RandomSource, asked: EvalSet, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header line of a results file."""
    return header_of_model(source.name, weights_of(source), asked, settings)


def header_of_model(name: str, weights: str, asked: EvalSet, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header line of a results file.

    Args:
        name: the model's name.
        weights: identifies the model when the file is continued.
    """
    questions = {"questions": asked.name, "form": asked.form, "items": len(asked.items), "digest": asked.digest}
    model = {"model": name, "weights": weights}
    return {"schema": SCHEMA} | model | questions | {"settings": dict(settings)}


class ResultsFile:
    """A results file, locked by this process until it is closed.

    Attributes:
        outcomes: results so far, by the index of their item.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open a results file to continue it, or create it.

        Raises:
            UsageError: the path has other content, or results of another model, other questions or other settings, or
                another process has it open.
        """
        self._file, self.header = LineFile(path), header
        self.path, self.outcomes = self._file.path, dict[int, Outcome]()
        try:
            if self._file.lines:
                before, self.outcomes = _parsed(self._file.lines, self.path)
                _check_same(before, header, str(self.path), "use another file for --out, or remove this one")
            if not self._file.remove_rest(f'{{"schema": "{SCHEMA}"'.encode()):
                raise _no_results(self.path, 1)
        except UsageError:
            self.close()
            raise
        if not self._file.lines:
            self._file.add(header, 0)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def add(self, outcome: Outcome) -> None:
        """Append a result. It is on disk when this returns. Raises CannotWrite."""
        self._file.add(outcome.record(), len(self.outcomes))
        self.outcomes[outcome.index] = outcome

    def order(self) -> None:
        """Sort the file by item. It is replaced atomically."""
        self._file.rewrite([self.header, *(self.outcomes[index].record() for index in sorted(self.outcomes))])


def read_results(path: Path) -> tuple[dict[str, Any], dict[int, Outcome]]:
    """Return the header of a results file, and its results by item index. Raises UsageError."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "use a readable file") from None
    return _parsed(lines, path)


def is_results(path: Path) -> bool:
    """Return whether a path is a results file, not a model.

    Raises:
        UsageError: the path is a file of another kind, or the name of a JSON file that does not exist.
    """
    remedy = "name a model, or a file that `dsv4 eval --out FILE.jsonl` wrote"
    if not os.path.isfile(path):  # returns False for names that are too long, where Path.is_file raises
        if path.suffix in (".json", ".jsonl") and not os.path.isdir(path):
            raise UsageError(f"--against: there is no file {path}", remedy)
        return False
    if path.suffix == GGUF_SUFFIX:
        return False
    with path.open("rb") as file:
        if file.read(256).startswith(f'{{"schema": "{SCHEMA}"'.encode()):
            return True
    raise UsageError(f"--against: {path} does not contain the results of each question", remedy)


def _parsed(lines: Sequence[bytes], path: Path) -> tuple[dict[str, Any], dict[int, Outcome]]:
    if not lines:
        raise _no_results(path, 1)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise _no_results(path, number) from None
        records.append(record)
    header = records[0]
    if not _is_header(header):
        raise _no_results(path, 1)
    outcomes: dict[int, Outcome] = {}
    for number, record in enumerate(records[1:], 2):
        if _is_header(record):
            _check_same(header, record, f"{path}, line {number}", "join only parts of one evaluation")
            continue
        try:
            outcome = outcome_of(record)
        except ValueError:
            raise _no_results(path, number) from None
        outcomes[outcome.index] = outcome
    return header, outcomes


def _is_header(record: Any) -> bool:
    keys = {"schema", *_DECIDES, "items", "model"}
    return (
        isinstance(record, dict)
        and keys <= {*record}
        and record["schema"] == SCHEMA
        and isinstance(record["settings"], dict)
    )


def _no_results(path: Path, number: int) -> UsageError:
    return UsageError(f"{path}, line {number}: not a result that eval wrote", "use another file")


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise UsageError if two headers are of another model, other questions or other settings."""
    for key, called in _DECIDES.items():
        if before[key] != now[key]:
            what = differing_settings(before, now) if key == "settings" else ""
            other = f"another {called}" if key == "weights" else f"other {called}{what}"
            raise UsageError(f"{where} has results of {other}", remedy)


def differing_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the settings that differ, as ": temperature 0.0, now 1.0"; "" if none does."""
    old, new = before["settings"], now["settings"]
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ": " + "; ".join(f"{key} {old.get(key)}, now {new.get(key)}" for key in keys) if keys else ""
