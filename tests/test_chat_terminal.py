"""`dsv4 chat` as its user meets it: a terminal, keys, Ctrl-C, kills."""

import json
import os
import signal
import stat
import time

import pytest

from tests.program import SMALL
from tests.terminals import Terminal, says

CHAT = ("chat", "--model", SMALL)


@pytest.fixture
def terminal(tmp_path):
    """A chat in a terminal, with a state folder of its own."""
    running = []

    def start(*options, answers=("Yes.",), pause=0.0, ends=True, **more):
        sample = says(*answers, pause=pause, ends=ends)
        one = Terminal(*CHAT, *options, sample=sample, **{"XDG_STATE_HOME": str(tmp_path), **more})
        running.append(one)
        one.until("Ctrl-D quits\n", ">")
        return one

    yield start
    for one in running:
        try:
            os.kill(one.program, signal.SIGKILL)
            os.waitpid(one.program, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def kept(tmp_path):
    """The messages of the newest journal."""
    journal = max((tmp_path / "dsv4/sessions").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    messages = []
    for line in journal.read_text().splitlines()[1:]:
        change = json.loads(line)
        messages = messages[: change["keep"]] + change["add"]
    return [message["content"] for message in messages]


def test_typing_history_completion_lines_and_paste(terminal, tmp_path):
    one = terminal(answers=("**Bold** [red]x[/red] \x1b[31m\n\n- a\n",))
    one.type("first\r")
    one.until("Bold [red]x[/red] \ufffd[31m\n", " • a\n", f"{SMALL} · ", ">")
    assert "\x1b[1mBold\x1b[0m" in one.shown
    one.type("\x1b[A\r")  # up: the history
    one.until(f"{SMALL} · ", ">")
    one.type("\x12fir\r\r")  # Ctrl-R
    one.until(f"{SMALL} · ", ">")
    one.type("a\x1b\rb\r")  # Alt-Enter
    one.until(f"{SMALL} · ", ">")
    one.type('"""c\rd"""\r')
    one.until(f"{SMALL} · ", ">")
    one.type("\x1b[200~e\rf\x1b[201~\r")  # a paste
    one.until(f"{SMALL} · ", ">")
    one.type("/conte\t")
    one.until("xt")
    one.type("\r")
    one.until("tokens used", ">")
    one.type(" secret\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[::2] == ["first", "first", "first", "a\nb", "c\nd", "e\nf", " secret"]
    history = tmp_path / "dsv4" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+first\n" in history.read_text()
    assert "secret" not in history.read_text()


def test_ctrl_c_stops_clears_and_quits(terminal, tmp_path):
    one = terminal(answers=("word " * 200,), pause=0.02)
    one.type("go\r")
    time.sleep(0.5)
    one.type("typed ahead")
    time.sleep(0.3)
    one.type("\x03")  # in the middle of an answer
    one.until("stopped", ">")
    time.sleep(0.7)
    one.type("half a line\x03")  # clears it
    time.sleep(0.7)
    one.type("/json\r")
    one.until('"go"', '"word', ">")
    time.sleep(0.7)
    one.type("\x03")
    one.until("Ctrl-C again")
    one.type("\x03")
    assert one.leave() == 130
    assert "Traceback" not in one.shown
    question, answer = kept(tmp_path)
    assert question == "go"
    assert answer
    assert ("word " * 200).startswith(answer)


def test_ctrl_c_twice_in_an_answer_quits_and_keeps_it(terminal, tmp_path):
    one = terminal("--no-markdown", answers=("word " * 200,), pause=0.02)
    one.type("go\r")
    one.until("word word")
    one.type("\x03")
    time.sleep(0.3)
    one.type("\x03")
    assert one.leave() == 130
    assert "Traceback" not in one.shown
    assert kept(tmp_path)[1].startswith("word word")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["dumb", "no-colour"])
def test_a_terminal_without_colours_shows_the_text_as_it_is(terminal, environment):
    one = terminal(answers=("**Bold** \x1b[31m\x9b1m\x07.",), columns=40, **environment)
    one.type("hello\r")
    one.until("**Bold** \ufffd[31m\ufffd1m\ufffd.\n", ">")
    if "TERM" in environment:
        assert "\x1b" not in one.shown
        one.type('"""one\rtwo"""\r')
        one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0


def test_a_kill_loses_nothing_that_was_finished(terminal, tmp_path):
    one = terminal(answers=("1", "2 " * 500), pause=0.01)
    one.type("one\r")
    one.until(f"{SMALL} · ", ">")
    one.type("two\r")
    time.sleep(0.3)
    one.kill()
    again = terminal("--continue")
    assert "going on after 2 messages" in again.plain
    again.type("/retry\r")
    again.until("Yes.", ">")
    again.type("\x04")
    assert again.leave() == 0
    assert kept(tmp_path) == ["one", "Yes."]
