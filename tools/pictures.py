"""Make the README's pictures: `make pictures` records `dsv4 chat` in a terminal as SVG and the server's page as PNG.

Both are real: nano answers in a pseudo-terminal, and Chromium, where there is one, shows a running server's page.
"""

import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.support.browser import CHROMIUM, Page, browser

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PORT = 8765

COLUMNS, ROWS = 84, 27
# seconds of silence after which an answer counts as finished, and the limit of a run in seconds
QUIET, LIMIT = 2.0, 120.0
QUESTIONS = ("What is 17 + 25?", "What is the capital of Italy?", "What is the opposite of light?")
# Rich's own template loads a font from another host
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Terminal:
    """A program in a pseudo-terminal, and the screen that it draws."""

    def __init__(self, *command: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._pid, self._master = pty.fork()
        # the line editor asks where the cursor is
        self.screen.write_process_input = self.type  # type: ignore[method-assign]
        if not self._pid:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execvp(command[0], command)

    def type(self, data: str) -> None:
        """Type text."""
        os.write(self._master, data.encode())

    def wait_for(self, text: str) -> None:
        """Wait until the screen shows text. Raises TimeoutError."""
        end = time.monotonic() + LIMIT
        while not any(text in line for line in self.screen.display):
            self._read(QUIET)
            if time.monotonic() > end:
                raise TimeoutError(f"{text!r} is not on the screen:\n" + "\n".join(self.screen.display))

    def settle(self) -> None:
        """Wait until nothing new is drawn."""
        while self._read(QUIET):
            pass

    def close(self) -> None:
        """End the program."""
        os.close(self._master)
        os.waitpid(self._pid, 0)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        try:
            read = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # the program has ended
            return False
        self._stream.feed(read)
        return bool(read)


def lines_of(screen: pyte.Screen) -> Iterator[Text]:
    """Yield the lines of a screen down to the last one that is not blank, styled."""
    used = max((row for row, line in enumerate(screen.display) if line.strip()), default=0)
    for row in range(used + 1):
        text = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            text.append(
                cell.data,
                Style(
                    color=_color(cell.fg),
                    bgcolor=_color(cell.bg),
                    bold=cell.bold,
                    italic=cell.italics,
                    underline=cell.underscore,
                    reverse=cell.reverse,
                ),
            )
        text.rstrip()
        yield text


def _color(name: str) -> str | None:
    if name == "default":
        return None
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, name).replace("bright", "bright_").replace("bright_brown", "bright_yellow")


def record_chat(path: Path) -> None:
    """Write a conversation with nano as SVG."""
    terminal = Terminal(sys.executable, "-m", "dsv4cli", "chat", "--temperature", "0")
    terminal.wait_for(">")
    terminal.settle()
    for question in QUESTIONS:
        terminal.type(question + "\r")
        terminal.settle()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in lines_of(terminal.screen):
        console.print(line, no_wrap=True, overflow="crop")
    terminal.close()
    path.write_text(console.export_svg(title="dsv4 chat", code_format=SVG, unique_id="dsv4"), encoding="utf-8")


def record_page(path: Path) -> None:
    """Write the page of a server of nano as PNG, with an answer."""
    command = [sys.executable, "-m", "dsv4cli", "serve", "--port", str(PORT), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server, TemporaryDirectory() as folder:
        try:
            while not _answers():
                time.sleep(0.1)
            with browser(Path(folder)) as page:
                _ask(page, path)
        finally:
            server.terminate()


def _answers() -> bool:
    try:
        socket.create_connection(("127.0.0.1", PORT), 1).close()
    except OSError:
        return False
    return True


def _ask(page: Page, path: Path) -> None:
    page.resize(1000, 640)
    page.open(f"http://127.0.0.1:{PORT}")
    page.until("document.getElementById('model').textContent")
    for question in QUESTIONS[:2]:
        page.value("document.getElementById('question').focus()")
        page.type(question)
        page.press("Enter")
        page.until("!document.body.hasAttribute('data-answering')")
    page.picture(path)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    record_chat(PICTURES / "chat.svg")
    if CHROMIUM:
        record_page(PICTURES / "page.png")
    else:
        print("docs/pictures/page.png was not made: there is no Chromium", file=sys.stderr)
