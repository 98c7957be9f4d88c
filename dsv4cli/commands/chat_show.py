"""What a turn of `dsv4 chat` shows as it comes: blocks of Markdown, thinking in one line; only ever appended."""

import re
from dataclasses import dataclass, field
from textwrap import dedent
from time import perf_counter

from dsv4cli.output import Output, counted, duration_text, markdown_lines, stdout_columns

FENCE = re.compile(r"( *)(`{3,}|~{3,})")
ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s")
HEADING = re.compile(r"#{1,6}\s")
# below a paragraph they would make a heading of it, which may be shown by then
RULE = re.compile(r" {0,3}(-{2,}|=+)\s*$")
# whole spans of inline markup; what may be markup that is still open, or change what stands before it
SPAN = re.compile(r"`[^`\n]+`|\*\*[^*`\s][^*`]*\*\*|\*[^*`\s][^*`]*\*|\[[^\[\]`*]*\]\([^()\s]*\)")
OPEN = re.compile(r"[*_`\[\]<>~|\\&]")
# a block is laid out again after so many characters
FEW_CHARACTERS = 40
# a dot for so many tokens of thinking, and so many dots in its line at most
TOKENS_A_DOT, MOST_DOTS = 16, 12


@dataclass
class Blocks:
    """Cuts Markdown that comes in pieces into blocks that nothing behind them can change.

    A block is a heading, a rule, an item of the outer list with what is below it, or what stands between two empty
    lines; of an item's later blocks the margin is left out. Lines of code are blocks of their own, so that they come at
    once and as they are.
    """

    _line: str = ""
    _block: list[str] = field(default_factory=list)
    _fence: str = ""
    _margin: int = 0  # what stands before the fence, and is not of the code
    _in_list: bool = False

    def push(self, text: str) -> list[tuple[bool, str]]:
        """What has become complete: whether it is code, and its text."""
        *lines, self._line = (self._line + text).split("\n")
        return [block for line in lines for block in self._take(line)]

    def settled(self) -> str:
        """The words of the block under way, as far as nothing behind them can change how they look."""
        line = re.sub(r"\S*$", "", self._line)
        lines = [*self._block, line]
        if self._block and (ITEM.match(line) or HEADING.match(line) or RULE.match(line)):
            lines.pop()  # begins the next block
        text = "\n".join(lines).rstrip()
        open_still = OPEN.search(SPAN.sub("", text)) or text[:1].isspace()
        return "" if self._fence or open_still else text

    def flush(self) -> list[tuple[bool, str]]:
        """What is left when nothing follows."""
        line, self._line = self._line, ""
        blocks = (self._take(line) if line else []) + self._complete()
        self._fence = ""
        return blocks

    def _take(self, line: str) -> list[tuple[bool, str]]:
        mark = FENCE.match(line)
        if self._fence:
            if mark and mark[2].startswith(self._fence) and not line[mark.end() :].strip():
                self._fence = ""
                return []
            margin = len(line) - len(line.lstrip(" "))
            return [(True, line[min(margin, self._margin) :])]
        if mark:
            self._margin, self._fence = len(mark[1]), mark[2]
            return self._complete()
        if not line.strip():
            return self._complete()
        alone = HEADING.match(line) or RULE.match(line)
        before = self._complete() if ITEM.match(line) or alone else []
        self._block.append(line)
        return before + (self._complete() if alone else [])

    def _complete(self) -> list[tuple[bool, str]]:
        block, self._block = "\n".join(self._block), []
        if not block:
            return []
        self._in_list = bool(ITEM.match(block)) or (self._in_list and block[0] == " ")
        return [(False, dedent(block) if self._in_list else block)]


@dataclass
class Show:
    """One answer on its way to the user. Thinking is a line with dots, or in full where that is wished."""

    out: Output
    markdown: bool
    thinking: bool
    _blocks: Blocks = field(default_factory=Blocks)
    _thought_since: float | None = None
    _thoughts: int = 0
    _kind: str = ""  # of the block shown last
    _columns: int = 0  # of the block under way: how wide it is laid out, and of how many characters last
    _characters: int = 0
    _lines: int = 0  # of it that are shown

    def push(self, kind: str, text: str) -> None:
        """A piece of reasoning or content; the text of calls is shown when they are complete, by the turn."""
        if kind == "reasoning":
            self._think(text)
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
        self._kind = ""

    def _say(self, text: str) -> None:
        if self.markdown:
            self._blocks_out(self._blocks.push(text))
            self._early_lines_out()
        else:
            self.out.stream(text)

    def _blocks_out(self, blocks: list[tuple[bool, str]]) -> None:
        for code, text in blocks:
            if code:
                self._begin("code")
                self.out.stream(f"    {text}\n" if text else "\n")  # a tab stays one
            else:
                self._lines_out(text, self._laid_out(text))
            self._columns = self._characters = self._lines = 0

    def _early_lines_out(self) -> None:
        """Those lines of a long block that are certain before it is complete."""
        text = self._blocks.settled()
        if len(text) >= self._characters + FEW_CHARACTERS:
            self._characters = len(text)
            self._lines_out(text, self._laid_out(text)[:-1])

    def _laid_out(self, text: str) -> list[str]:
        self._columns = self._columns or stdout_columns()
        return markdown_lines(text, self._columns, colour=self.out.colours.stdout)

    def _lines_out(self, text: str, lines: list[str]) -> None:
        """Shows what of the block's lines is not shown yet."""
        if len(lines) > self._lines:
            if not self._lines:
                self._begin("item" if ITEM.match(text) else "text")
            self.out.rendered(lines[self._lines :])
            self._lines = len(lines)

    def _begin(self, kind: str) -> None:
        if self._kind and (kind != self._kind or kind == "text"):
            self.out.line()
        self._kind = kind

    def _think(self, text: str) -> None:
        if self._thought_since is None:
            self._thought_since = perf_counter()
            self.out.aside("thinking" if not self.thinking else "")
        self._thoughts += 1
        if self.thinking:
            self.out.aside(text)
        elif self._thoughts % TOKENS_A_DOT == 0 and self._thoughts <= TOKENS_A_DOT * MOST_DOTS:
            self.out.aside(".")

    def _end_thinking(self) -> None:
        if self._thought_since is None:
            return
        took = f"{counted(self._thoughts, 'token')}, {duration_text(perf_counter() - self._thought_since)}"
        if self.thinking:
            self.out.end_line()
            self.out.aside(f"(thought: {took})\n")
        else:
            self.out.aside(f" ({took})\n")
        self._thought_since, self._thoughts = None, 0
