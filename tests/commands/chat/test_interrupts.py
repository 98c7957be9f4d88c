"""`dsv4 chat` interrupted and killed at random: whatever was finished is there again."""

import os
import random
import signal
import time

import pytest

from dsv4cli.commands.chat.journal import find_journal, read_journal
from tests.support.program import SMALL
from tests.support.terminals import Terminal, says, speaking


def chat(tmp_path, *options):
    prepare = speaking(says("one two three four five. " * 2, pause=0.008), reading=0.001, twice=0)
    arguments = ("chat", "--model", SMALL, "--no-markdown", *options)
    return Terminal(*arguments, prepare=prepare, TERM="dumb", XDG_STATE_HOME=str(tmp_path))


def questions(tmp_path):
    kept = read_journal(find_journal(tmp_path / "dsv4" / "sessions", "1"))
    return [message["content"] for message in kept.messages if message["role"] == "user"]


@pytest.mark.slow
def test_fifty_random_interrupts(tmp_path):
    rng = random.Random(0)
    one = chat(tmp_path)
    one.until("quits\n", "> ")
    for number in range(50):
        one.type(f"question {number}\n")
        time.sleep(rng.uniform(0.05, 0.6))
        os.kill(one.program, signal.SIGINT)
        one.settle("> ")
    one.type("last\n")
    one.until(f"{SMALL} · ", "> ")
    one.type("\x04")
    assert one.leave() == 0
    assert "Traceback" not in one.shown
    asked = questions(tmp_path)
    assert len(asked) == one.plain.count(f"{SMALL} · ") > 10  # every turn that was reported
    assert one.plain.count("stopped") > 10
    assert asked == [*sorted(asked[:-1], key=lambda text: int(text.split()[1])), "last"]


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    rng = random.Random(0)
    finished: list[str] = []
    for number in range(20):
        one = chat(tmp_path, *(["--continue"] if finished else []))
        one.until("quits\n", "> ")
        one.type(f"question {number}\n")
        one.until(f"{SMALL} · ", "> ")
        finished.append(f"question {number}")
        one.type("unfinished\n")
        time.sleep(rng.uniform(0, 0.3))
        one.kill()
        kept = questions(tmp_path)
        assert [text for text in kept if text != "unfinished"] == finished
