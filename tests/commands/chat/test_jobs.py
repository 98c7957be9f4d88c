"""`dsv4 chat` as a job of a shell, and what is typed before it can be read."""

import fcntl
import os
import signal
import sys
import termios
import time

import pytest

from dsv4cli.commands.terminal import keys_wait, terminal_as_it_was
from dsv4cli.engine.weights import load as loading
from tests.support.program import SMALL
from tests.support.slow import slow
from tests.support.terminals import Terminal, says, speaking
from tests.support.waiting import comes

CHAT = ("chat", "--model", SMALL, "--no-markdown")


def as_a_job(patch):
    """The program becomes a job of its parent, a shell that says when it stops and lets it go on after a line."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    program = os.fork()
    if not program:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        return
    while True:
        _, status = os.waitpid(program, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            os._exit(os.waitstatus_to_exitcode(status) & 255)
        os.tcsetpgrp(0, os.getpgrp())
        shown = "and shows keys" if termios.tcgetattr(0)[3] & termios.ECHO else "and hides keys"
        os.write(1, f"[stopped {shown}]\n".encode())
        os.read(0, 100)
        os.tcsetpgrp(0, program)
        os.killpg(program, signal.SIGCONT)


@pytest.fixture
def terminal(tmp_path):
    running = []

    def start(*preparations, answer="Yes.", pause=0.0, **environment):
        def prepare(patch):
            speaking(says(answer, pause=pause), 0.0, 0.0)(patch)
            for one in preparations:
                one(patch)

        running.append(Terminal(*CHAT, prepare=prepare, XDG_STATE_HOME=str(tmp_path), **environment))
        return running[-1]

    yield start
    for one in running:
        one.end()


def ended(one):
    """The exit code, and whether the terminal shows what is typed."""
    while one._read():
        pass
    shows = bool(termios.tcgetattr(one.master)[3] & termios.ECHO)
    return one.leave(), shows


def test_ctrl_z_at_the_prompt_suspends_and_the_line_is_still_there(terminal):
    one = terminal(as_a_job)
    one.until("Ctrl-D quits\n", ">")
    one.type("half")
    one.until("half")
    one.type("\x1a")
    one.until("[stopped and shows keys]")
    one.type("fg\n")
    one.until("half")
    one.type(" a line\r")
    one.until(f"{SMALL} · ", ">")
    one.type("/history\r")
    one.until("> half a line\nYes.\n", ">")
    one.type("\x04")
    assert ended(one) == (0, True)


def test_ctrl_z_suspends_an_answer(terminal):
    one = terminal(as_a_job, answer="word " * 12, pause=0.02)
    one.until("Ctrl-D quits\n", ">")
    one.type("go\r")
    one.until("word word")
    one.type("\x1a")
    one.until("[stopped and shows keys]")
    one.type("fg\n")
    one.until("word word")
    one.type("unseen")
    assert "unseen" not in one.until(f"{SMALL} · ")
    one.until("unseen")
    one.type("\x03\x04")
    assert ended(one) == (0, True)


def unread(one):
    """Bytes of the whole lines that the terminal holds for its program."""
    other = os.open(f"/proc/{one.program}/fd/0", os.O_RDONLY | os.O_NOCTTY)
    try:
        return int.from_bytes(fcntl.ioctl(other, termios.FIONREAD, bytes(4)), sys.byteorder)
    finally:
        os.close(other)


def slowly(seconds):
    """Loading takes so long."""

    def prepare(patch):
        load = loading.load_model

        def load_slowly(*arguments, **more):
            sys.stderr.write("[loading]\n")
            time.sleep(seconds)
            return load(*arguments, **more)

        patch.setattr(loading, "load_model", load_slowly)

    return prepare


def test_what_is_typed_while_loading_waits_for_the_prompt(terminal):
    one = terminal(slowly(0.3))
    one.until("[loading]")
    one.type("early\rhalf")
    assert "early" not in one.until("Ctrl-D quits\n")
    one.until("early", "Yes.", f"{SMALL} · ", "half")
    one.type("\x03\x04")
    assert ended(one) == (0, True)


@pytest.mark.parametrize("environment", [{}, *slow({"TERM": "dumb"})], ids=["editor", "plain"])
def test_ctrl_d_that_is_typed_in_an_answer_leaves_after_it(terminal, environment):
    one = terminal(answer="word " * 12, pause=0.01, **environment)
    one.until("Ctrl-D quits\n", ">")
    one.type("go\r")
    one.until("word word")
    one.type("\x04")
    one.until(f"{SMALL} · ")
    if environment:
        one.until("> ")
        one.type("\r")  # only a whole line is read there
    assert ended(one) == (0, True)


@pytest.mark.parametrize(("way", "code"), [("key", 130), ("term", 143)])
def test_the_terminal_is_as_it_was_after_leaving_while_loading(terminal, way, code):
    one = terminal(slowly(30))
    one.until("[loading]")
    one.type("early\r")
    assert comes(lambda: unread(one) == 6)  # the terminal takes keys up by itself, at a time of its own
    one.type("\x03") if way == "key" else os.kill(one.program, signal.SIGTERM)
    assert ended(one) == (code, True)
    assert "early" not in one.shown


def test_an_edit_that_is_given_up_changes_nothing(terminal):
    one = terminal()
    one.until("Ctrl-D quits\n", ">")
    one.type("//one\r")
    one.until(f"{SMALL} · ", ">")
    for keys in ("\x03", "\x15\r"):  # Ctrl-C; nothing is left of it
        one.type("/edit\r")
        one.until("//one")
        one.type(keys)
        one.until(">")
        one.type("/history\r")
        one.until("> /one\nYes.\n", ">")
    one.type("/edit\r")
    one.until("//one")
    one.type(" more\r")
    one.until(f"{SMALL} · ", ">")
    one.type("/history\r")
    assert "> /one\n" not in one.until("> /one more\nYes.\n", ">")
    one.type("\x04")
    assert ended(one) == (0, True)


def test_what_restores_the_terminal_knows_how_it_was_before_keys_waited(monkeypatch):
    master, slave = os.openpty()
    with open(slave, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)

        def shows_keys():
            return bool(termios.tcgetattr(slave)[3] & termios.ECHO)

        with keys_wait():
            assert not shows_keys()
            terminal_as_it_was()()  # as where a rank is lost
            assert shows_keys()
        assert shows_keys()
    os.close(master)
