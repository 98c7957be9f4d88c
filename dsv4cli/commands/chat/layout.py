"""Wraps styled text at the terminal's width, at spaces and between Chinese or Japanese characters."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

# ideographs, kana, their punctuation and full-width forms, as the inside of a regular-expression class
CJK = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
# characters that must not begin a line, and characters that must not end one
CLOSING = "、。，．：；？！）〕］｝〉》」』】”’…％"
OPENING = "（〔［｛〈《「『【“‘"
UNIT = re.compile(rf"\s+|[{OPENING}]*(?:[{CJK}][{CLOSING}]*|[^\s{CJK}]+[{CLOSING}]*)|[{OPENING}]+")
DIM = "2"
# a prefix wider than 1/NARROW of the terminal is wrapped with its text, without hanging indentation
NARROW = 2


class Run(NamedTuple):
    """Text in one style. style: SGR parameters (ECMA-48), separated by semicolons."""

    text: str
    style: str = ""


def width_of(text: str) -> int:
    """Return the number of terminal columns that a text needs."""
    from rich.cells import cell_len

    return cell_len(text)


def painted(runs: Sequence[Run], colours: bool = True) -> str:
    """Return the text of runs, with their escape codes if `colours`."""
    styles = groupby(runs, key=lambda run: run.style if colours else "")
    return "".join(_painted("".join(run.text for run in same), style) for style, same in styles)


def _painted(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def split_lines(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs into lines."""
    lines: list[list[Run]] = [[]]
    for text, style in runs:
        first, *others = text.split("\n")
        lines[-1].append(Run(first, style))
        lines += [[Run(other, style)] for other in others]
    return lines


def wrapped(runs: Sequence[Run], columns: int) -> list[list[Run]]:
    """Wrap a line at `columns`. A word longer than that is broken."""
    text = "".join(run.text for run in runs)
    return [_slice(runs, begin, end) for begin, end in _spans(text, max(columns, 1))]


def hung(runs: Sequence[Run], columns: int, prefix: str, further: str) -> list[list[Run]]:
    """Wrap a line at `columns`, with `prefix` before the first line and `further` before the others."""
    style = DIM if ">" in prefix else ""
    if width_of(prefix) > columns // NARROW:
        return wrapped([Run(prefix, style), *runs], columns)
    lines = wrapped(runs, columns - width_of(prefix))
    return [[Run(further if nth else prefix, style), *line] for nth, line in enumerate(lines)]


def as_written(line: str, columns: int) -> list[list[Run]]:
    """Wrap a line without Markdown at `columns`, with its own indentation before each line."""
    text = line.expandtabs(4)
    margin = text[: len(text) - len(text.lstrip())]
    return hung([Run(text.strip())], columns, margin, margin)


def _spans(text: str, columns: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each wrapped line."""
    begin = end = 0
    for unit in UNIT.finditer(text):
        if unit[0].isspace():
            continue
        if end > begin and width_of(text[begin : unit.end()]) > columns:
            yield begin, end
            begin = unit.start()
        while width_of(text[begin : unit.end()]) > columns and unit.end() - begin > 1:
            stop = _filled(text, begin, unit.end(), columns)
            yield begin, stop
            begin = stop
        end = unit.end()
    yield begin, end


def _filled(text: str, begin: int, end: int, columns: int) -> int:
    """Return the end of the text that fits into `columns`; at least one character."""
    used = width_of(text[begin])
    for at in range(begin + 1, end):
        used += width_of(text[at])
        if used > columns:
            return at
    return end - 1


def _slice(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    cut, at = [], 0
    for text, style in runs:
        part = text[max(begin - at, 0) : max(end - at, 0)]
        if part:
            cut.append(Run(part, style))
        at += len(text)
    return cut
