"""A conversation with nano: thinking, an undo, a tool call; what was said before is not read again."""

import json

import pytest

from tests.program import Program

TOOL = {
    "type": "function",
    "function": {
        "name": "get_price",
        "description": "Get the price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
LINES = """\
What is 17 + 25?
/think high
What is 48 minus 24?
/undo
/think off
What is the capital of Italy?
What is the price of the clock?
{"price": 12, "currency": "dollars"}
/stats
"""
ANSWERS = """\
17 + 25 = 42.
48 - 24 = 24.
The capital of Italy is Rome.
get_price({"item": "clock"})
The clock costs 12 dollars.
"""


@pytest.mark.slow
def test_a_conversation_with_nano(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    options = ("--tools", str(tmp_path / "tools.json"), "--temperature", "0", "--seed", "7")
    done = Program(monkeypatch, capsys)("chat", *options, stdin=LINES.encode())
    assert (done.code, done.out[: len(ANSWERS)]) == (0, ANSWERS)
    assert done.err.count("thinking (") == 1
    numbers = dict(line.rsplit(maxsplit=1) for line in done.out[len(ANSWERS) :].splitlines() if "token" in line[:7])
    read, found = (int(numbers[name].replace(",", "")) for name in ("tokens read", "tokens found in the cache"))
    # the tool and the first question are read once; every later prompt begins with them
    assert read < 400
    assert found > 3 * read
