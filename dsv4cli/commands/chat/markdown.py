"""Rendering of a Markdown block as terminal lines, keeping every line break and visible character of the source.

markdown-it finds the paragraphs, headings and tables. Each source line keeps its position, margin and number, so that
no text can get lost.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dsv4cli.commands.chat.inline import EMPHASIS, STRONG, inline
from dsv4cli.commands.chat.layout import DIM, Run, as_written, hung, painted, split_lines, width_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

HEADINGS = {1: "1;4", 2: "1;4", 3: STRONG, 4: f"{STRONG};{EMPHASIS}"}
RULE = re.compile(r" {0,3}([-*_])( ?\1){2,}\s*")
SHORT_RULE = 5
BULLET = re.compile(r"(?<!\S)[-*](?=\s)")
# after a minus or a star that may be an arithmetic operator
OPERAND = re.compile(r"[\d$(\\=]")
BAR = re.compile(r"(?<!\\)\|")
# a line that later text may reinterpret: only marks, HTML, or a fence in a quote
UNDECIDED = re.compile(r"[-*_=#\s>+\d.)`~]*\Z|\s*<|.*(?:```|~~~)")
NARROWEST_COLUMN = 6
# characters after which a line's kind is decided; a table's first line must have its first bar within them
DECIDED = 40
# a cell of a table's delimiter row
MARKS = re.compile(r":?-+:?")


class Laid(NamedTuple):
    """Rendered lines of a block, with escape codes. certain: number of leading lines that later text cannot change."""

    lines: list[str]
    certain: int


class SourcePart(NamedTuple):
    """Source lines from `begin` to `end` (exclusive) of one kind: "as is", "text", "table", or a heading's level."""

    begin: int
    end: int
    kind: str
    content: str = ""


def markdown_lines(text: str, columns: int, before: str = "", colours: bool = True) -> Laid:
    """Render a Markdown block for a terminal of this width. before: Markers of the list that the block continues."""
    head = f"{before}\n\n" if before else ""
    source = (head + text).expandtabs(4).split("\n")
    first = head.count("\n")
    laid = _laid(source, first, columns, colours)
    if len(source[-1]) >= DECIDED and not UNDECIDED.match(source[-1]):
        return laid
    sure = _laid(source[:-1], first, columns, colours).certain if len(source) - first > 1 else 0
    return Laid(laid.lines, min(sure, laid.certain))


def _laid(source: list[str], first: int, columns: int, colours: bool) -> Laid:
    lines: list[str] = []
    certain: int | None = None
    for part in _parts(source, first):
        shown, sure = _part_lines(source, part, columns)
        if certain is None and (sure < len(shown) or _may_become_a_table(source, part)):
            certain = len(lines) + (sure if sure < len(shown) else 0)
        lines += [painted(line, colours).rstrip() for line in shown]
    return Laid(lines, len(lines) if certain is None else certain)


def _may_become_a_table(source: list[str], part: SourcePart) -> bool:
    """Return whether the next source line could turn this paragraph's last line into a table header."""
    return part.kind == "table" or (
        part.end >= len(source) - 1 and any("|" in line[:DECIDED] for line in source[part.begin :])
    )


def _part_lines(source: list[str], part: SourcePart, columns: int) -> tuple[list[list[Run]], int]:
    """Return the rendered lines of a part, and how many of them later text cannot change."""
    lines = source[part.begin : part.end]
    if part.kind == "table":
        return table_lines(lines, columns)
    if part.kind == "as is":
        shown = [line for one in lines for line in _as_is(one, columns)]
        return shown, len(shown)
    return _paragraph(lines, part, columns)


def _as_is(line: str, columns: int) -> list[list[Run]]:
    rule = RULE.fullmatch(line)
    if rule and len(line.split()) <= SHORT_RULE and len(line.replace(" ", "")) <= SHORT_RULE:
        return [[Run("─" * columns, DIM)]]
    return as_written(line, columns)


def _paragraph(lines: list[str], part: SourcePart, columns: int) -> tuple[list[list[Run]], int]:
    prefixes, texts = _margins(lines, part)
    style = "" if part.kind == "text" else HEADINGS.get(int(part.kind), EMPHASIS)
    laid = inline("\n".join(texts), style)
    certain_lines = len(texts) if laid.certain >= sum(map(len, texts)) + len(texts) - 1 else None
    if certain_lines is None:
        certain_lines = "\n".join(texts)[: laid.certain].count("\n")
    shown: list[list[Run]] = []
    sure = 0
    for nth, (prefix, runs) in enumerate(zip(prefixes, split_lines(laid.runs), strict=True)):
        further = re.sub(r"[^\s>]", " ", prefix)
        marked = prefix if nth or OPERAND.match(texts[0]) else BULLET.sub("•", prefix)
        shown += hung(runs, columns, marked, further)
        if nth < certain_lines:
            sure = len(shown)
    return shown, sure


def _margins(lines: list[str], part: SourcePart) -> tuple[list[str], list[str]]:
    """Return the prefix of each line (indentation and markers) and its text. Heading marks are in neither."""
    prefixes, texts = [], []
    contents = [part.content] if part.kind != "text" else part.content.split("\n")
    for line, content in zip(lines, contents, strict=False):
        text, whole = content.strip(), line.rstrip()
        at = len(whole) - len(text) if whole.endswith(text) else len(whole) - len(whole.lstrip())
        if part.kind != "text":
            at = whole.index("#")
            texts.append(whole[at + int(part.kind) :].strip())
        else:
            texts.append(whole[at:])
        prefixes.append(line[:at])
    for line in lines[len(contents) :]:
        prefixes.append("")
        texts.append(line.strip())
    return prefixes, texts


def _parts(source: list[str], first: int) -> Iterator[SourcePart]:
    """Split the source, from line `first` on, into parts."""
    at = first
    for part in _found(source):
        if part.begin < first:
            continue
        if at < part.begin:
            yield SourcePart(at, part.begin, "as is")
        yield part
        at = part.end
    if at < len(source):
        yield SourcePart(at, len(source), "as is")


def _found(source: list[str]) -> Iterator[SourcePart]:
    """Yield the paragraphs, headings and tables of the source."""
    until = 0
    tokens = _parser().parse("\n".join(source))
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.map is None or token.map[0] < until:
            continue
        begin, end = token.map
        if token.type == "table_open":
            rows = begin
            if BAR.search(source[begin], 0, DECIDED):
                rows = next((at for at in range(begin, end) if not BAR.search(source[at])), end)
                yield SourcePart(begin, rows, "table")
            if rows < end:
                yield SourcePart(rows, end, "text", "\n".join(line.strip() for line in source[rows:end]))
            until = end
        elif following is not None and token.type in ("paragraph_open", "heading_open"):
            kind = "text" if token.type == "paragraph_open" else token.tag[1:]
            yield SourcePart(begin, end, kind, following.content)
            until = end


@cache
def _parser() -> "MarkdownIt":
    """Return a parser of blocks only, without underlined headings and link reference definitions.

    An underline would turn a paragraph that may already be shown into a heading. A reference would hide its line.
    """
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": True}).enable("table").disable(["inline", "lheading", "reference"])


def table_lines(lines: list[str], columns: int) -> tuple[list[list[Run]], int]:
    """Render a table in columns, or as written if too wide or irregular. No line is certain until it is complete."""
    rows = [_cells(line) for line in lines]
    head, marks, *body = rows
    natural = [max(width_of(_plain(row[nth])) for row in (head, *body) if nth < len(row)) for nth in range(len(head))]
    margin = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    widths = _fitted(natural, columns - len(margin) - 3 * (len(head) - 1))
    regular = all(len(row) <= len(head) for row in rows) and all(map(MARKS.fullmatch, marks))
    if not widths or not regular:
        return [line for one in lines for line in _as_is(one, columns)], 0
    shown = _row(head, widths, marks, margin, STRONG)
    shown.append([Run(margin), Run("─┼─".join("─" * width for width in widths), DIM)])
    for row in body:
        shown += _row(row, widths, marks, margin)
    return shown, 0


def _cells(line: str) -> list[str]:
    parts = BAR.split(line.strip())
    if parts and not parts[0].strip():
        parts = parts[1:]
    if parts and not parts[-1].strip() and len(parts) > 1 and line.rstrip().endswith("|"):
        parts = parts[:-1]
    return [part.replace("\\|", "|").strip() for part in parts]


def _plain(cell: str) -> str:
    return "".join(run.text for run in inline(cell).runs)


def _fitted(natural: list[int], width: int) -> list[int]:
    """Return column widths that fit, shrinking the widest columns; empty if they cannot fit."""
    widths = [max(width, 1) for width in natural]
    surplus = sum(widths) - width
    while surplus > 0:
        widest = max(widths)
        if widest <= NARROWEST_COLUMN:
            return []
        widths[widths.index(widest)] -= 1
        surplus -= 1
    return widths


def _row(row: list[str], widths: list[int], marks: list[str], margin: str, style: str = "") -> list[list[Run]]:
    """Return the lines of a table row, with its cells wrapped."""
    row = row + [""] * (len(widths) - len(row))
    cells = [hung(inline(cell, style).runs, width, "", "") for cell, width in zip(row, widths, strict=True)]
    lines = []
    for nth in range(max(map(len, cells))):
        line = [Run(margin)]
        for column, (cell, width, mark) in enumerate(zip(cells, widths, marks, strict=True)):
            runs = cell[nth] if nth < len(cell) else []
            space = width - sum(width_of(run.text) for run in runs)
            left = space if mark.endswith(":") and mark[0] != ":" else space // 2 if mark.endswith(":") else 0
            line += [Run(" │ ", DIM)] if column else []
            line += [Run(" " * left), *runs, Run(" " * (space - left))]
        lines.append(line)
    return lines
