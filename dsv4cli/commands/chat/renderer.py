"""What a turn of `dsv4 chat` shows as it comes: blocks of Markdown, thinking in one line; only ever appended."""

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
# a fence, behind the marks of the item that begins with it; backticks around a word are no fence
FENCE = re.compile(r"((?: *(?:[-*+]|\d{1,9}[.)]) +)?)( *)(`{3,}(?=[^`]*$)|~{3,})")
HEADING = re.compile(r"#{1,6}\s")
# below a paragraph they would make a heading of it, which may be shown by then
RULE = re.compile(r" {0,3}(-{2,}|=+)\s*$")
# displayed math, to its end or to an empty line: each of its lines is shown by itself
MATH = {"\\[": "\\]", "$$": "$$"}
MATH_LINE = re.compile(r"\s*(\\\[|\$\$|\\begin\{)")
ENVIRONMENT = re.compile(r"\\begin\{([^{}]+)\}")
# a block is laid out again after so many characters, or such a share of those it had
FEW_CHARACTERS, FEW = 40, 1 / 16
# a dot for so many tokens of thinking, and so many dots in its line at most
TOKENS_A_DOT, MOST_DOTS = 16, 12


class MarkdownBlock(NamedTuple):
    """A piece of an answer: a `text` of Markdown, a line of `code` or `math`, the beginning (its text: the words behind
    the marks) or the `end` of a fence, or an empty line. `before`: the marks of the list that it goes on with."""

    kind: Literal["text", "code", "fence", "end", "math", "empty"]
    text: str = ""
    before: str = ""


@dataclass
class Blocks:
    """Cuts Markdown that comes in pieces into blocks that nothing behind them can change.

    A text is a heading, a rule, an item of the outer list with what is below it, or what stands between two empty
    lines. Lines of code and math are blocks of their own, so that they come at once and as they are.
    """

    _line: str = ""
    _block: list[str] = field(default_factory=list)
    _fence: str = ""
    _margin: int = 0  # what stands before the fence, and is not of the code
    _math: str = ""  # what ends it
    _list: list[str] = field(default_factory=list)  # the marks of the outer item and of those in it

    def push(self, text: str) -> list[MarkdownBlock]:
        """What has become complete."""
        *lines, self._line = (self._line + text).split("\n")
        return [block for line in lines for block in self._take(line)]

    def under_way(self) -> MarkdownBlock:
        """The text under way, as far as its words are whole."""
        line = re.sub(rf"[^\s{CJK}]*$", "", self._line)
        lines = [*self._block, line]
        begins = ITEM.match(line) or HEADING.match(line) or RULE.match(line)
        if (self._block and begins) or FENCE.match(line) or MATH_LINE.match(line):
            lines.pop()  # of the next block
        text = "" if self._fence or self._math else "\n".join(lines).rstrip()
        return MarkdownBlock("text", text, self._before(text))

    def flush(self) -> list[MarkdownBlock]:
        """What is left when nothing follows."""
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
    """What ends the math that a line begins; nothing where it also ends there."""
    text = SPAN_OF_CODE.sub("", line)
    environment = ENVIRONMENT.search(text)
    if environment and f"\\end{{{environment[1]}}}" not in text:
        return f"\\end{{{environment[1]}}}"
    if text.rfind("\\[") > text.rfind("\\]"):
        return MATH["\\["]
    return MATH["$$"] if text.count("$$") % 2 else ""


@dataclass
class Renderer:
    """One answer on its way to the user. Thinking is a line with dots, or in full on request.

    tokens: the number of an answer's tokens is known while it comes.
    """

    out: Output
    markdown: bool
    thinking: bool
    tokens: bool = True
    _blocks: Blocks = field(default_factory=Blocks)
    _thought_since: float | None = None
    _thoughts: int = 0
    _code: Code | None = None
    _empty: int | None = None  # empty lines that wait for a line behind them; none wait before the first line
    _apart: bool = False  # one at least
    _columns: int = 0  # of the block under way: how wide it is laid out, and of how many characters last
    _characters: int = 0
    _lines: int = 0  # of it that are shown

    def push(self, kind: str, text: str, thoughts: int = 0) -> None:
        """A piece of reasoning or content; the text of calls is shown when they are complete, by the turn.

        Args:
            kind: "reasoning", "content" or "calls".
            text: the piece.
            thoughts: how many tokens the reasoning has with it.
        """
        if kind == "reasoning":
            self._think(text, thoughts)
            return
        self._end_thinking()
        if kind == "content":
            self._say(text)

    def end(self) -> None:
        """Shows what was held back and ends the line; the next push begins a new answer."""
        self._end_thinking()
        if self.markdown:
            self._blocks_out(self._blocks.flush())
        self.out.end_line()
        self._code = self._empty = None
        self._apart = False

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
        else:  # code stands apart, whether or not the model has left a line free
            self._apart = True
            words = block.text.split(maxsplit=1)
            self._code = Code(words[0]) if words else Code("")
            if block.text:
                self._out([painted([Run(block.text, DIM)], self.out.colours.stdout)])

    def _early_lines_out(self) -> None:
        """Those lines of a long block that are certain before it is complete."""
        block = self._blocks.under_way()
        if len(block.text) - self._characters >= max(FEW_CHARACTERS, FEW * self._characters):
            self._characters = len(block.text)
            laid = markdown_lines(block.text, self._width(), block.before, self.out.colours.stdout)
            self._rest_out(laid.lines[: min(laid.certain, len(laid.lines) - 1)])

    def _width(self) -> int:
        self._columns = self._columns or stdout_columns()
        return self._columns

    def _rest_out(self, lines: list[str]) -> None:
        """Shows what of the block's lines is not shown yet."""
        if len(lines) > self._lines:
            self._out(lines[self._lines :])
            self._lines = len(lines)

    def _out(self, lines: list[str]) -> None:
        empty = 0 if self._empty is None else max(self._empty, int(self._apart))
        self.out.rendered([""] * empty + lines)
        self._empty, self._apart = 0, False

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
