"""`dsv4 chat` as its user meets it: a terminal, keys, Ctrl-C, kills."""

import json
import os
import select
import shutil
import signal
import stat
import sys
import threading

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from dsv4cli.commands.chat.editor import SlashCompleter
from dsv4cli.commands.chat.interrupts import Interrupts
from dsv4cli.commands.chat.model import Models
from tests.support.program import SMALL
from tests.support.slow import slow_rows
from tests.support.terminals import Terminal, says, speaking

CHAT = ("chat", "--model", SMALL)


@pytest.fixture
def terminal(tmp_path):
    """A chat in a terminal, with a state folder of its own."""
    running = []

    def start(
        *options, answers=("Yes.",), pause=0.0, reading=0.0, twice=0.0, change=lambda patch: None, ready=True, **more
    ):
        def prepare(patch):
            speaking(says(*answers, pause=pause), reading, twice)(patch)
            change(patch)

        one = Terminal(*CHAT, *options, prepare=prepare, XDG_STATE_HOME=str(tmp_path), **more)
        running.append(one)
        if ready:
            one.until("Ctrl-D quits\n", ">")
        return one

    yield start
    for one in running:
        one.end()


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
    one.until("Bold [red]x[/red] \ufffd[31m\n", "• a\n", f"{SMALL} · ", ">")
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
    os.write(one.master, b"caf\xe9\r")
    one.until("the question is not valid Unicode at character 4", ">")
    one.type(" secret\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[::2] == ["first", "first", "first", "a\nb", "c\nd", "e\nf", " secret"]
    history = tmp_path / "dsv4" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+first\n" in history.read_text()
    assert "secret" not in history.read_text()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("", ['"my notes.txt"', "notes", '"old talks/']),
        ("n", ["notes"]),
        ("my n", ['"my notes.txt"']),
        ("'my", ["'my notes.txt'"]),
        ('"old talks/', ['"old talks/one"']),
        ("none/", []),
    ],
)
def test_names_of_files_are_completed_in_quotes_where_they_have_spaces(tmp_path, monkeypatch, typed, completed):
    for name in ("my notes.txt", "notes", "old talks/one"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    found = list(SlashCompleter({}).get_completions(Document(f"/read {typed}"), CompleteEvent()))
    assert [one.text for one in found] == completed
    assert {one.start_position for one in found} <= {-len(typed)}


def test_ctrl_c_stops_an_answer_and_clears_a_line(terminal, tmp_path):
    one = terminal("--no-markdown", answers=("word " * 200,), pause=0.01)
    one.type("go\r")
    one.until("word word")
    one.type("typed ahead")  # the terminal drops it with Ctrl-C
    one.type("\x03")
    one.until("stopped", ">")
    one.type("half a line")
    one.until("half a line")
    one.type("\x03/json\r")
    one.until('"go"', '"word', ">")
    one.type("\x03")
    one.until("Ctrl-C again", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert "Traceback" not in one.shown
    question, answer = kept(tmp_path)
    assert question == "go"
    assert answer
    assert ("word " * 200).startswith(answer)


def test_ctrl_c_twice_at_the_prompt_quits(terminal, tmp_path):
    one = terminal(twice=60)
    one.type("\x03")
    one.until("Ctrl-C again", ">")
    one.type("\x03")
    assert one.leave() == 130
    assert "Traceback" not in one.shown


def test_ctrl_c_twice_in_an_answer_quits_and_keeps_it(terminal, tmp_path):
    def press_again(patch):
        again = Interrupts.again
        presses = iter([signal.SIGINT])

        def interrupted(self):
            second = again(self)
            for press in presses:  # inside the handler of the first
                signal.raise_signal(press)
            return second

        patch.setattr(Interrupts, "again", interrupted)

    one = terminal("--no-markdown", answers=("word " * 200,), pause=0.01, twice=60, change=press_again)
    one.type("go\r")
    one.until("word")
    one.type("\x03")
    assert one.leave() == 130
    assert "Traceback" not in one.shown
    assert kept(tmp_path)[1].startswith("word")


def test_ctrl_c_while_a_prompt_is_read_ends_that_at_once(terminal, tmp_path):
    (tmp_path / "long.txt").write_text("x" * 6000)
    one = terminal(reading=0.1)  # ten minutes for this prompt
    one.type(f"/read {tmp_path}/long.txt\r")
    one.until("prefilling 6,0", "0 % …")
    one.type("\x03")
    one.until("stopped; no answer yet", ">")
    one.type("hi\r")
    one.until("Yes.", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path) == ["hi", "Yes."]


def test_an_answer_and_a_half_typed_line_follow_a_resize(terminal, tmp_path):
    one = terminal(answers=("word " * 30,))
    one.type("first\r")
    assert max(map(len, one.until(f"{SMALL} · ", ">").splitlines())) > 60
    one.type("half a")
    one.until("half a")
    one.resize(30)
    one.type(" line\r")
    answer = [line for line in one.until(f"{SMALL} ·", ">").splitlines() if line.startswith("word")]
    assert [len(line) for line in answer] == [29] * 5
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[2] == "half a line"


def test_an_editor_writes_the_message(terminal, tmp_path):
    (tmp_path / "editor").write_text('#!/bin/sh\nprintf "%s, in\\nfull" "$(cat "$1")" > "$1"\n')
    (tmp_path / "editor").chmod(0o700)
    one = terminal(EDITOR=str(tmp_path / "editor"))
    one.type("begun\x18\x05")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[0] == "begun, in\nfull"


def test_what_is_typed_during_an_answer_is_the_next_message(terminal, tmp_path):
    one = terminal(answers=("word " * 8,), pause=0.005)
    one.type("go\r")
    one.until("go", "word")
    one.type("next\r")
    one.until(f"{SMALL} · ", "next", f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[::2] == ["go", "next"]


def test_characters_of_several_tokens_and_words_fit_a_narrow_terminal(terminal):
    one = terminal(answers=("Grüße, 世界 👩‍🚀 €.",), columns=40)
    one.type("hello\r")
    one.until("Grüße, 世界 👩‍🚀 €.\n", ">")
    one.type("/help\r")
    lines = one.until("quits, as", ">").splitlines()
    assert len(lines) > 30
    assert max(map(len, lines)) <= 40
    one.type("\x04")
    assert one.leave() == 0
    assert "\ufffd" not in one.shown


def test_a_dumb_terminal_shows_the_text_as_it_is(terminal):
    one = terminal(answers=("**Bold** \x1b[31m\x9b1m\x07.",), columns=40, TERM="dumb")
    one.type("hello\r")
    one.until("**Bold** \ufffd[31m\ufffd1m\ufffd.\n", ">")
    assert "\x1b" not in one.shown
    one.type('"""one\rtwo"""\r')
    one.until(f"{SMALL} · ", ">")
    one.type("/copy\r")
    one.until("this terminal does not support copying", ">")
    os.write(one.master, b"caf\xe9\r")
    one.until("the input is not valid utf-8", ">")
    one.type("hello\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0


def test_a_terminal_without_colours_keeps_the_layout(terminal):
    one = terminal(answers=("**Bold** \x1b[31m.\n\n- a\n",), NO_COLOR="1")
    one.type("hello\r")
    one.until("Bold \ufffd[31m.\n", "• a\n", f"{SMALL} · ", ">")
    answer = one.shown[one.shown.index("Bold") : one.shown.index("• a")]
    assert "\x1b" not in answer
    one.type("\x04")
    assert one.leave() == 0


def test_without_prompt_toolkit_lines_are_still_edited(terminal, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.delitem(sys.modules, "dsv4cli.commands.chat.editor", raising=False)
    one = terminal()
    assert "pip install prompt_toolkit" in one.plain
    one.type("hxllo\x01\x06\x04e\r")  # to the beginning, one forward, without the x
    one.until(f"{SMALL} · ", ">")
    one.type("/edit\r")
    one.settle("hello")  # Python's readline sees Ctrl-C once it waits for keys
    one.type("\x03")
    one.until("\nnothing changed; Ctrl-C again", ">")
    one.type("/edit\r")
    one.until("hello")
    one.type("!\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path) == ["hello!", "Yes."]


def test_a_state_folder_that_goes_away_is_made_again(terminal, tmp_path):
    one = terminal()
    one.type("hello\r")
    one.until(f"{SMALL} · ", ">")
    shutil.rmtree(tmp_path / "dsv4")
    one.type("again\r")
    one.until(f"{SMALL} · ", "the session was not saved", ">")
    one.type("more\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert "Traceback" not in one.plain
    assert kept(tmp_path)[::2] == ["hello", "again", "more"]


def test_a_kill_loses_nothing_that_was_finished(terminal, tmp_path):
    one = terminal("--no-markdown", answers=("1", "2 " * 5000), pause=0.01)
    one.type("one\r")
    one.until(f"{SMALL} · ", ">")
    one.type("two\r")
    one.until("two", "2 2")
    one.kill()
    again = terminal("--continue")
    assert "continuing after 2 messages" in again.plain
    again.type("/retry\r")
    again.until("Yes.", ">")
    again.type("\x04")
    assert again.leave() == 0
    assert kept(tmp_path) == ["one", "Yes."]


PASTED = "".join(
    f"line {number} of a long text that was pasted\r" for number in range(60)
)  # fits the terminal's buffer


def test_a_paste_while_the_model_loads_is_one_message(terminal, tmp_path):
    """The terminal marks a paste from the first moment on, and the editor finds the marks."""

    def wait_for_paste(patch):
        opened = Models.open

        def open_later(self):
            os.write(2, b"[loading]")
            while not select.select([0], [], [], 1)[0]:
                pass
            return opened(self)

        patch.setattr(Models, "open", open_later)

    one = terminal(change=wait_for_paste, ready=False)
    one.until("[loading]")
    assert one.shown.index("\x1b[?2004h") < one.shown.index("[loading]")
    one.type(f"\x1b[200~{PASTED}\x1b[201~\r")
    one.until(f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert one.shown.rstrip().endswith("\x1b[?2004l")
    assert kept(tmp_path)[::2] == [PASTED.replace("\r", "\n")]


def test_a_paste_while_an_answer_comes_is_one_message(terminal, tmp_path):
    one = terminal("--no-markdown", answers=("word " * 8,), pause=0.005)
    one.type("go\r")
    one.until("word")
    assert one.shown.rindex("\x1b[?2004h") > one.shown.rindex("\x1b[?2004l")
    one.type(f"\x1b[200~{PASTED}\x1b[201~\r")
    one.until(f"{SMALL} · ", f"{SMALL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[::2] == ["go", PASTED.replace("\r", "\n")]


@pytest.mark.parametrize(("term", "lines"), [("xterm", 300), *slow_rows(("dumb", 20))])
def test_ctrl_c_drops_what_was_typed_ahead(terminal, tmp_path, term, lines):
    """Lines that a terminal without marks has pasted, more than its buffer holds: the first is asked."""
    one = terminal("--no-markdown", answers=("word " * 200,), pause=0.01, TERM=term)
    typing = threading.Thread(target=one.type, args=("".join(f"line {n} of a long text\r" for n in range(lines)),))
    typing.start()
    one.until("word word")
    typing.join()
    one.type("\x03")
    one.until("stopped", ">")
    one.type("last\r")
    one.until("word word")
    one.type("\x03")
    one.until("stopped", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert kept(tmp_path)[::2] == ["line 0 of a long text", "last"]
