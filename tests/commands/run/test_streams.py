"""`dsv4 run` in a process of its own: terminals, pipes, signals."""

import atexit
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from dsv4cli import __main__
from dsv4cli.commands.reading import Reading
from dsv4cli.commands.run.show import show_reading
from dsv4cli.engine.runtime import leader_step as drawing
from tests.support.forked import Forked
from tests.support.program import BYTES, ROOT, SMALL
from tests.support.slow import slow_rows
from tests.support.terminals import ESCAPES, Terminal, says, speaking

# a model of one layer that says words for ever; computing on a CPU imports no Triton
SAYS = """
import sys
import torch
torch.set_num_threads(1)
from itertools import cycle
from dsv4cli import cli
from dsv4cli.engine.runtime import leader_step as drawing
ids = cycle(byte + 3 for byte in b"words\\n")
drawing.sample = lambda *_: torch.tensor([next(ids)])
try:
    cli.main()
finally:
    assert "triton" not in sys.modules
"""
RUN = ["run", "hi", "--model", SMALL, "--draft", "off"]
SECONDS = 60


def command(*arguments: str, script: str = SAYS) -> list[str]:
    return [sys.executable, "-c", script, *arguments]


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "TERM"}}
    return {**clean, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}


def saying(text: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Prepares a program whose model says the bytes of `text` for ever."""
    ids = cycle(BYTES.encode(text))
    return lambda patch: patch.setattr(drawing, "sample", lambda *_: torch.tensor([next(ids)]))


def test_ctrl_c_keeps_the_text_and_leaves_a_new_line():
    terminal = Terminal(*RUN, prepare=saying("word "))
    terminal.until("word word")
    terminal.type("\x03")
    assert terminal.leave() == 130
    assert "is meaningless\x1b[0m\r\nword word" in terminal.shown
    assert terminal.shown.endswith("^C\r\n")
    assert "Traceback" not in terminal.shown


def test_a_long_prompt_is_seen_to_be_read():
    arguments = ("run", "x" * 2000, "--model", SMALL, "--prefill-chunk", "900")
    terminal = Terminal(*arguments, prepare=speaking(says("Yes."), 0.0, 0.0))
    assert terminal.leave() == 0
    words = ESCAPES.sub("", terminal.shown)
    found = re.search(r"\r(prefilling 2,004 tokens: 0 % …)\r( +)\r(.+? …)\r( +)\r(.+? …)\r( +)\rYes\.\r\n", words)
    assert found, words
    parts, wiped = found.groups()[::2], found.groups()[1::2]
    assert [*map(len, wiped)] == [*map(len, parts)]
    for part, text in ((44, parts[1]), (89, parts[2])):
        assert re.fullmatch(rf"prefilling 2,004 tokens: {part} %, [\d,]+ tokens/s, \d\.\d s left …", text)


def test_a_short_prompt_is_not_announced():
    terminal = Terminal("run", "x" * 900, "--model", SMALL, prepare=speaking(says("Yes."), 0.0, 0.0))
    assert terminal.leave() == 0
    assert "reading" not in terminal.shown


def test_prompts_that_wait_behind_answers_are_not_announced():
    told = []
    out = SimpleNamespace(wait=told.append)
    requests = [SimpleNamespace(prompt=[1] * 600, done=done) for done in (600, 0)]
    steps = [(number, SimpleNamespace(tokens=tokens), []) for number, tokens in ((0, []), (0, [7]), (1, []))]
    assert list(show_reading(out, requests, iter(steps))) == steps
    assert [text.partition(",")[2].partition(",")[0] for text in told[:2]] == ["200 tokens: 0 % …", "200 tokens: 50 %"]
    assert told[2:] == [""] * 3


def test_the_rate_of_reading_counts_from_where_it_began(monkeypatch):
    """In a conversation much has been read before."""
    told = []
    reading = Reading(SimpleNamespace(wait=told.append))
    monkeypatch.setattr("dsv4cli.commands.reading.perf_counter", iter((10.0, 12.0, 16.0)).__next__)
    for done in (4000, 5000, 7000, 8000):
        reading.show(done, 8000)
    assert told == [
        "prefilling 8,000 tokens: 50 % …",
        "prefilling 8,000 tokens: 62 %, 500 tokens/s, 6.0 s left …",
        "prefilling 8,000 tokens: 87 %, 500 tokens/s, 2.0 s left …",
        "",
    ]


def test_ctrl_c_while_the_program_is_imported(monkeypatch):
    class Typed:
        def find_spec(self, name, path, target=None):
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dsv4cli.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Typed(), *sys.meta_path])
    monkeypatch.setattr(atexit, "register", lambda end: None)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(("word", "code"), [*slow_rows(("--version", 0)), ("--nothing", 2)])
def test_the_end_takes_nothing_apart(word, code):
    """With PyTorch and a GPU's memory that takes a second."""
    program = f"""
import os
import sys
class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart")
sys.kept, sys.argv = Kept(), ["dsv4", "{word}"]
from dsv4cli.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, "taken apart" in ended.stdout) == (code, False)
    assert ("Traceback" in ended.stderr, ended.stdout == "") == (False, code > 0)


@pytest.mark.slow
def test_ctrl_c_while_the_model_loads():
    terminal = Terminal("run", "hi", "--model", "random:flash,layers=4,experts=16")
    terminal.until("loading")
    terminal.type("\x03")
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.shown
    assert "\x1b[?25h" in terminal.shown  # the cursor is back
    assert terminal.shown.endswith("\r\n")


def test_no_control_character_of_the_model_reaches_a_terminal():
    prepare = saying("a\x1b[31mb\x9b1m\r\x07")
    terminal = Terminal(*RUN, "--max-tokens", "24", prepare=prepare, NO_COLOR="1", TERM="dumb")
    assert terminal.leave() == 0
    assert "a\ufffd[31mb\ufffd1m\ufffd\ufffda" in terminal.shown
    assert not set("\x1b\x9b\x07") & set(terminal.shown)


@pytest.mark.slow
def test_sigterm_keeps_what_was_printed():
    program = subprocess.Popen(
        command(*RUN), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "words\n"
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=SECONDS)
    assert program.returncode == 143
    assert ("words" * 999).startswith(out.replace("\n", ""))
    assert out == "" or out.endswith("\n")
    assert "Traceback" not in err
    assert len(err.splitlines()) == 2  # what was loaded, and that it is random


def shell(*arguments: str, then: str) -> subprocess.CompletedProcess[str]:
    """The program as the first command of a line of bash."""
    line = f"{shlex.join(command(*arguments))} {then}"
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_program_quietly():
    done = shell(*RUN, then="| head -1; echo ${PIPESTATUS[0]}")
    assert done.stdout == "words\n0\n"
    assert len(done.stderr.splitlines()) == 2


def test_a_disk_that_is_full():
    program = Forked("-c", SAYS, *RUN, "--max-tokens", "6", to="/dev/full", CUDA_VISIBLE_DEVICES="")
    code, _, err = program.ended()
    assert code == 5
    assert "Traceback" not in err
    assert "no space left on the disk while writing" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "code", "out"),
    [("<&- 2>&-", 0, "words\n"), (">&-", 1, ""), ("> /dev/full", 5, ""), ("2> /dev/full", 5, "")],
)
def test_closed_streams(closed, code, out):
    done = shell(*RUN, "--max-tokens", "6", then=closed)
    assert (done.returncode, done.stdout) == (code, out)
    assert "Traceback" not in done.stderr
    assert ("no space left on the disk while writing" in done.stderr) is (closed == "> /dev/full")
    assert ("stdout is closed" in done.stderr) is (closed == ">&-")
