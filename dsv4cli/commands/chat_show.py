"""What a turn of `dsv4 chat` shows as it comes: blocks of Markdown, thinking in one line; only ever appended."""

import re
from dataclasses import dataclass, field
from time import perf_counter

from dsv4cli.output import Output, counted, duration_text

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s")
HEADING = re.compile(r"#{1,6}\s")
# a dot for so many tokens of thinking, and so many dots in its line at most
TOKENS_A_DOT, MOST_DOTS = 16, 12


@dataclass
class Blocks:
    """Cuts Markdown that comes in pieces into blocks that nothing behind them can change.

    A block is a heading, an item of the outer list with all below it, or what stands between two empty lines. Lines of
    code are blocks of their own, so that they come at once and as they are.
    """

    _line: str = ""
    _block: list[str] = field(default_factory=list)
    _fence: str = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """What has become complete: whether it is code, and its text."""
        *lines, self._line = (self._line + text).split("\n")
        return [block for line in lines for block in self._take(line)]

    def flush(self) -> list[tuple[bool, str]]:
        """What is left when nothing follows."""
        line, self._line = self._line, ""
        blocks = (self._take(line) if line else []) + self._complete()
        self._fence = ""
        return blocks

    def _take(self, line: str) -> list[tuple[bool, str]]:
        mark = FENCE.match(line)
        if self._fence:
            if mark and mark[1].startswith(self._fence) and not line[mark.end() :].strip():
                self._fence = ""
                return []
            return [(True, line)]
        if mark and not self._block_is_list():
            self._fence = mark[1]
            return self._complete()
        if not line.strip():
            return self._complete()
        before = self._complete() if ITEM.match(line) or HEADING.match(line) else []
        self._block.append(line)
        return before + (self._complete() if HEADING.match(line) else [])

    def _block_is_list(self) -> bool:
        return bool(self._block) and ITEM.match(self._block[0]) is not None

    def _complete(self) -> list[tuple[bool, str]]:
        block, self._block = "\n".join(self._block), []
        return [(False, block)] if block else []


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
        else:
            self.out.stream(text)

    def _blocks_out(self, blocks: list[tuple[bool, str]]) -> None:
        for code, text in blocks:
            kind = "code" if code else "item" if ITEM.match(text) else "text"
            if self._kind and (kind != self._kind or kind == "text"):
                self.out.line()
            self._kind = kind
            if code:
                self.out.line(f"    {text}" if text else "")
            else:
                self.out.markdown(text)

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
