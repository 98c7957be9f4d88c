"""A block of Markdown as lines of a terminal: every line break and everything visible that the model wrote stays.

markdown-it says which lines are paragraphs, headings, tables; each line is shown where it stands in the source, with
its own margin and number, so that nothing can get lost on the way.
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
# behind a minus or a star that may be the operator of a calculation
OPERAND = re.compile(r"[\d$(\\=]")
BAR = re.compile(r"(?<!\\)\|")
# a line that may still become another thing: marks alone, HTML, a fence in a quote
UNDECIDED = re.compile(r"[-*_=#\s>+\d.)`~]*\Z|\s*<|.*(?:```|~~~)")
NARROWEST_COLUMN = 6
# a line is decided when so much of it is there; the first bar of a table's first line lies in it
DECIDED = 40
# what a table has below a heading of it
MARKS = re.compile(r":?-+:?")


class Laid(NamedTuple):
    """A block's lines with their escape codes, and how many of them no later line can change."""

    lines: list[str]
    certain: int


class SourcePart(NamedTuple):
    """Lines of the source that belong together, without `end`. kind: "as is", "text", "table", or a heading's level."""

    begin: int
    end: int
    kind: str
    content: str = ""


def markdown_lines(text: str, columns: int, before: str = "", colours: bool = True) -> Laid:
    """A block laid out for a terminal of this width; `before` has the marks of the list that it goes on with."""
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
    """Whether the next line can make a table of this paragraph's last one."""
    return part.kind == "table" or (
        part.end >= len(source) - 1 and any("|" in line[:DECIDED] for line in source[part.begin :])
    )


def _part_lines(source: list[str], part: SourcePart, columns: int) -> tuple[list[list[Run]], int]:
    """The lines of a part, and how many of them are certain."""
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
    """What stands before the text of each line, and the text; a heading's marks are in neither."""
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
    """The source from line `first` on, in parts."""
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
    """Paragraphs, headings and tables."""
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
    """Blocks alone. What is underlined is no heading: it may be shown by then. No line is a mere reference."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": True}).enable("table").disable(["inline", "lheading", "reference"])


def table_lines(lines: list[str], columns: int) -> tuple[list[list[Run]], int]:
    """A table in columns, none of it certain before it is whole; as written where it is too wide or irregular."""
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


def _fitted(natural: list[int], room: int) -> list[int]:
    """Widths of columns that fit: the widest give way; none where that is not enough."""
    widths = [max(width, 1) for width in natural]
    surplus = sum(widths) - room
    while surplus > 0:
        widest = max(widths)
        if widest <= NARROWEST_COLUMN:
            return []
        widths[widths.index(widest)] -= 1
        surplus -= 1
    return widths


def _row(row: list[str], widths: list[int], marks: list[str], margin: str, style: str = "") -> list[list[Run]]:
    """The lines of a row, its cells wrapped."""
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
