"""Reader of the official continuations in the formats of antirez/ds4: .vec files and manifest.tsv. No torch.

Each case of a .vec file has the name of its prompt file, and the bytes of each token in hexadecimal, followed by the
API's likeliest tokens. Those are ignored because the API returns no meaningful probabilities. A manifest lists prompt
files and continuation files. Paths in both are relative to the root of their repository.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.text.inputs import BadLine, from_prompt, read_text
from dsv4cli.errors import UsageError

_CASE = re.compile(r"case (?P<id>\S+) \d+ (?P<steps>\d+) (?P<file>\S+)")
_STEP = re.compile(r"step (?P<number>\d+) (?P<bytes>(?:[0-9a-fA-F]{2})+) \d+")
_TOP = re.compile(r"top (?:[0-9a-fA-F]{2})+ \S+")
_REPAIR = "use the file as it was published"
Found = tuple[list[tuple[int, EvalItem]], list[BadLine]]


def is_vectors(text: str) -> bool:
    """Return whether a text is a .vec file: its first line that is not a comment begins a case."""
    return re.match(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*case \S+ \d+ \d+ \S", text) is not None


def is_manifest(first: str) -> bool:
    """Return whether a file that begins with this line is a manifest."""
    cells = first.split("\t")
    return cells[0].startswith("#") and {"prompt_file", "continuation_file"} <= set(cells)


def read_vectors(text: str, path: Path) -> Found:
    """Return the cases of a .vec file with their line numbers, and the bad lines."""
    good: list[tuple[int, EvalItem]] = []
    bad: list[BadLine] = []
    for number, lines in _cases(text):
        try:
            good.append((number, _case(lines, path)))
        except UsageError as error:
            bad.append(BadLine(number, error))
    return good, bad


def _cases(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each case, with the number of the first line."""
    begun, lines = 0, list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            begun = begun or number
            lines.append(line)
        if line == "end":
            yield begun, lines
            begun, lines = 0, []
    if lines:
        yield begun, lines


def _case(lines: list[str], path: Path) -> EvalItem:
    head = _CASE.fullmatch(lines[0])
    if head is None or lines[-1] != "end":
        raise UsageError("expected a case that begins with `case` and ends with `end`", _REPAIR)
    tokens: list[bytes] = []
    for line in lines[1:-1]:
        step = _STEP.fullmatch(line)
        if step is not None and int(step["number"]) == len(tokens):
            tokens.append(bytes.fromhex(step["bytes"]))
        elif not _TOP.fullmatch(line):
            raise UsageError(f"case {head['id']} has the line {line[:60]!r}", _REPAIR)
    if len(tokens) != int(head["steps"]) or not tokens:
        raise UsageError(f"case {head['id']} has {len(tokens)} tokens, not {head['steps']}", _REPAIR)
    prompt = from_prompt(_beside(path, head["file"]), None)
    return EvalItem(head["id"], prompt, "continuation", tokens=tuple(tokens))


def read_manifest(text: str, path: Path) -> Found:
    """Return the cases of a manifest.tsv with their line numbers, and the bad lines."""
    good: list[tuple[int, EvalItem]] = []
    bad: list[BadLine] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.rstrip("\r").split("\t")
        try:
            if len(cells) < 3:
                raise UsageError("expected an id, a prompt file and a continuation file, separated by tabs", _REPAIR)
            prompt, continuation = (_beside(path, name) for name in cells[1:3])
            if not continuation:
                raise UsageError(f"{cells[2]} is empty", "remove the line: there is nothing to score")
        except UsageError as error:
            bad.append(BadLine(number, error))
            continue
        item = EvalItem(cells[0], from_prompt(prompt, None), "continuation", continuation)
        good.append((number, item))
    return good, bad


def _beside(path: Path, name: str) -> str:
    """Return the text of the file with this relative path, searched in the folder of `path` and in all its parents."""
    found = next((folder / name for folder in path.resolve().parents if (folder / name).is_file()), None)
    if found is None:
        raise UsageError(
            f"{name} is not in the folder of {path} or its parents", "keep the files where their repository has them"
        )
    return read_text(found)
