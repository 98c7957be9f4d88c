"""Rendering of a streamed answer in `dsv4 chat`: Markdown blocks, and thinking on one line. Append-only."""

import re
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple

from dsv4cli.commands.chat.highlight import Code
from dsv4cli.commands.chat.inline import SPAN_OF_CODE
from dsv4cli.commands.chat.layout import CJK, DIM, Run, as_written, painted
from dsv4cli.commands.chat.markdown import markdown_lines
from dsv4cli.commands.chat.math_text import readable_line
from dsv4cli.harmless import harmless
from dsv4cli.output import Output, counted, duration_text, stdout_columns

ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s")
ITEMS = re.compile(r" *(?:(?:[-*+]|\d{1,9}[.)]) +)+(?=\S)")
# a fence, after the markers of a list item that begins with it; backticks around a word are no fence
FENCE = re.compile(r"((?: *(?:[-*+]|\d{1,9}[.)]) +)?)( *)(`{3,}(?=[^`]*$)|~{3,})")
HEADING = re.compile(r"#{1,6}\s")
# shown as a rule: an underline would turn the paragraph above, which may already be shown, into a heading
RULE = re.compile(r" {0,3}(-{2,}|=+)\s*$")
# start and end of displayed math, which an empty line also ends; each of its lines is shown separately
MATH = {"\\[": "\\]", "$$": "$$"}
MATH_LINE = re.compile(r"\s*(\\\[|\$\$|\\begin\{)")
ENVIRONMENT = re.compile(r"\\begin\{([^{}]+)\}")
# an incomplete block is rendered again once it has this many more characters, or has grown by this fraction if larger
FEW_CHARACTERS, FEW = 40, 1 / 16
# tokens of thinking per dot, and maximum dots on the line
TOKENS_A_DOT, MOST_DOTS = 16, 12


class MarkdownBlock(NamedTuple):
    """A complete block of an answer.

    Attributes:
        kind: Text of Markdown, one line of code or math, the start or end of a fence, or an empty line.
        text: For the start of a fence, its info string.
        before: Markers of the list items that the block continues, one line each.
    """

    kind: Literal["text", "code", "fence", "end", "math", "empty"]
    text: str = ""
    before: str = ""


@dataclass
class Blocks:
    """Splits streamed Markdown into blocks that later text cannot change.

    A text block is a heading, a rule, an item of the outermost list with its content, or the text between two empty
    lines. Each line of code and math is a block of its own, so that it is shown at once.
    """

    _line: str = ""
    _block: list[str] = field(default_factory=list)
    _fence: str = ""
    _margin: int = 0  # columns before the fence, removed from each line of code
    _math: str = ""  # the delimiter that ends the math
    _list: list[str] = field(default_factory=list)  # markers of the outer item and of nested ones

    def push(self, text: str) -> list[MarkdownBlock]:
        """Add text and return the blocks that it completes."""
        *lines, self._line = (self._line + text).split("\n")
        return [block for line in lines for block in self._take(line)]

    def under_way(self) -> MarkdownBlock:
        """Return the incomplete text block, up to its last complete word."""
        line = re.sub(rf"[^\s{CJK}]*$", "", self._line)
        lines = [*self._block, line]
        begins = ITEM.match(line) or HEADING.match(line) or RULE.match(line)
        if (self._block and begins) or FENCE.match(line) or MATH_LINE.match(line):
            lines.pop()  # belongs to the next block
        text = "" if self._fence or self._math else "\n".join(lines).rstrip()
        return MarkdownBlock("text", text, self._before(text))

    def flush(self) -> list[MarkdownBlock]:
        """Return the remaining blocks at the end of the answer."""
        line, self._line = self._line, ""
        blocks = (self._take(line) if line else []) + self._complete()
        self._fence = self._math = ""
        self._list = []
        return blocks

    def _take(self, line: str) -> list[MarkdownBlock]:
        if self._fence:
            return self._take_code(line)
        if not line.strip():
            self._math = ""
            return [*self._complete(), MarkdownBlock("empty")]
        if self._math:
            self._math = "" if self._math in line else self._math
            return [MarkdownBlock("math", line)]
        mark = FENCE.match(line)
        if mark:
            return self._begin_code(line, mark)
        alone = HEADING.match(line) or RULE.match(line)
        before = self._complete() if ITEM.match(line) or alone else []
        self._math = _math_begun(line)
        if self._math and MATH_LINE.match(line):
            return [*before, *self._complete(), MarkdownBlock("math", line)]
        self._block.append(line)
        return before + (self._complete() if alone or self._math else [])

    def _begin_code(self, line: str, mark: re.Match[str]) -> list[MarkdownBlock]:
        before = self._complete()
        if mark[1]:
            self._block.append(mark[1].rstrip())
            before += self._complete()
        self._margin, self._fence = mark.start(3), mark[3]
        return [*before, MarkdownBlock("fence", line[mark.end() :].strip())]

    def _take_code(self, line: str) -> list[MarkdownBlock]:
        mark = FENCE.match(line)
        if mark and not mark[1] and mark[3].startswith(self._fence) and not line[mark.end() :].strip():
            self._fence = ""
            return [MarkdownBlock("end")]
        margin = len(line) - len(line.lstrip(" "))
        return [MarkdownBlock("code", line[min(margin, self._margin) :])]

    def _complete(self) -> list[MarkdownBlock]:
        lines, self._block = self._block, []
        if not lines:
            return []
        block = MarkdownBlock("text", "\n".join(lines), self._before(lines[0]))
        if not block.before:
            self._list = []
        if self._list or ITEM.match(f"{lines[0]} "):
            self._list += [f"{mark[0]}x" for mark in map(ITEMS.match, lines) if mark]
        return [block]

    def _before(self, text: str) -> str:
        return "\n".join(self._list) if text[:1] == " " else ""


def _math_begun(line: str) -> str:
    """Return the delimiter that ends the math begun on this line; empty if it begins none or also ends it."""
    text = SPAN_OF_CODE.sub("", line)
    environment = ENVIRONMENT.search(text)
    if environment and f"\\end{{{environment[1]}}}" not in text:
        return f"\\end{{{environment[1]}}}"
    if text.rfind("\\[") > text.rfind("\\]"):
        return MATH["\\["]
    return MATH["$$"] if text.count("$$") % 2 else ""


@dataclass
class Renderer:
    """Renders one answer. Thinking is a line of dots, or shown in full if `thinking` is set.

    Attributes:
        tokens: Whether the number of tokens is known while the answer streams.
    """

    out: Output
    markdown: bool
    thinking: bool
    tokens: bool = True
    _blocks: Blocks = field(default_factory=Blocks)
    _thought_since: float | None = None
    _thoughts: int = 0
    _code: Code | None = None
    _empty: int | None = None  # empty lines held back until another line follows; None before the first line
    _wants_empty_line: bool = False  # at least one empty line comes next
    _columns: int = 0  # width of the incomplete block; below: its characters when it was last rendered
    _characters: int = 0
    _lines: int = 0  # lines of the block already shown

    def push(self, kind: str, text: str, thoughts: int = 0) -> None:
        """Show a piece of reasoning or content. Tool calls are shown by the turn, once they are complete.

        Args:
            kind: "reasoning", "content" or "calls".
            text: The piece.
            thoughts: Number of reasoning tokens so far, including this piece.
        """
        if kind == "reasoning":
            self._think(text, thoughts)
            return
        self._end_thinking()
        if kind == "content":
            self._say(text)

    def end(self) -> None:
        """Show the text held back so far and end the line. The next push starts a new answer."""
        self._end_thinking()
        if self.markdown:
            self._blocks_out(self._blocks.flush())
        self.out.end_line()
        self._code = self._empty = None
        self._wants_empty_line = False

    def _say(self, text: str) -> None:
        if self.markdown:
            self._blocks_out(self._blocks.push(harmless(text)))
            self._early_lines_out()
        else:
            self.out.stream(text)

    def _blocks_out(self, blocks: list[MarkdownBlock]) -> None:
        for block in blocks:
            if block.kind == "text":
                self._rest_out(markdown_lines(block.text, self._width(), block.before, self.out.colours.stdout).lines)
            elif block.kind == "empty":
                self._empty = None if self._empty is None else self._empty + 1
            else:
                self._other_out(block)
            self._columns = self._characters = self._lines = 0

    def _other_out(self, block: MarkdownBlock) -> None:
        if block.kind == "math":
            readable = readable_line(block.text)
            if readable is not None:
                self._out([painted(line) for line in as_written(readable, self._width())])
        elif block.kind == "code":
            assert self._code is not None
            self._out([painted(self._code.push(block.text), self.out.colours.stdout)])
        else:  # code has an empty line before and after it, even if the model wrote none
            self._wants_empty_line = True
            words = block.text.split(maxsplit=1)
            self._code = Code(words[0]) if words else Code("")
            if block.text:
                self._out([painted([Run(block.text, DIM)], self.out.colours.stdout)])

    def _early_lines_out(self) -> None:
        """Show those lines of a long incomplete block that later text cannot change."""
        block = self._blocks.under_way()
        if len(block.text) - self._characters >= max(FEW_CHARACTERS, FEW * self._characters):
            self._characters = len(block.text)
            laid = markdown_lines(block.text, self._width(), block.before, self.out.colours.stdout)
            self._rest_out(laid.lines[: min(laid.certain, len(laid.lines) - 1)])

    def _width(self) -> int:
        self._columns = self._columns or stdout_columns()
        return self._columns

    def _rest_out(self, lines: list[str]) -> None:
        """Show the lines of the block that are not shown yet."""
        if len(lines) > self._lines:
            self._out(lines[self._lines :])
            self._lines = len(lines)

    def _out(self, lines: list[str]) -> None:
        empty = 0 if self._empty is None else max(self._empty, int(self._wants_empty_line))
        self.out.rendered([""] * empty + lines)
        self._empty, self._wants_empty_line = 0, False

    def _think(self, text: str, thoughts: int) -> None:
        if self._thought_since is None:
            self._thought_since = perf_counter()
            self.out.reasoning("thinking" if not self.thinking else "")
        dots, self._thoughts = self._thoughts // TOKENS_A_DOT, thoughts
        if self.thinking:
            self.out.reasoning(text)
        else:
            self.out.reasoning("." * (min(thoughts // TOKENS_A_DOT, MOST_DOTS) - min(dots, MOST_DOTS)))

    def _end_thinking(self) -> None:
        if self._thought_since is None:
            return
        count = f"{counted(self._thoughts, 'token')}, " if self.tokens else ""
        took = f"{count}{duration_text(perf_counter() - self._thought_since)}"
        if self.thinking:
            self.out.end_line()
            self.out.reasoning(f"(thought: {took})\n")
        else:
            self.out.reasoning(f" ({took})\n")
        self._thought_since, self._thoughts = None, 0
