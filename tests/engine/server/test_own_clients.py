"""The clients that come with the program, with a real server: `dsv4 chat --url` and the page."""

import json

import pytest

from tests.support.browser import CHROMIUM, browser
from tests.support.program import Program

PRICES = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "get_price", "description": "Get the price of an item.", "parameters": PRICES}


@pytest.fixture
def chat(monkeypatch, capsys, tmp_path, nano):
    """Types lines into `dsv4 chat --url`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program = Program(monkeypatch, capsys)

    def call(*lines, options=()):
        return program("chat", "--url", nano.url, *options, stdin="".join(f"{line}\n" for line in lines).encode())

    return call


def test_a_terminal_talks_with_the_server(chat, nano):
    done = chat("What is 17 + 25?", "Now subtract 4.", "/tokens 42", "/context")
    assert done.code == 0
    # the server counts a last answer as one that goes on: without its end token
    assert done.out == "17 + 25 = 42.\n42 - 4 = 38.\n2 tokens: 55 53\n44 of 8,192 tokens used, 8,148 left\n"
    opening, *rest = done.err.splitlines()
    assert opening == f"{nano.url}: nano, a context of 8,192 tokens"
    assert rest[0].startswith("nano · 26 of 8,192 tokens · ")
    assert nano.bugs == []


@pytest.mark.slow
def test_a_budget_of_thinking_reaches_the_server(chat):
    done = chat("What is 48 minus 24?", options=("--think", "high", "--think-budget", "3", "--show-thinking"))
    assert done.code == 0
    assert done.out  # not a good one: three tokens are no thought
    assert len(done.err.partition("(thought")[0].splitlines()[1].split()) <= 3


@pytest.mark.slow
def test_a_terminal_carries_out_the_calls_that_the_server_streams(chat, nano, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": PRICE}]))
    result = json.dumps({"price": 12, "currency": "dollars"})
    options = ("--tools", str(tmp_path / "tools.json"), "--tool-exec", f"echo '{result}'", "--yes")
    done = chat("What is the price of the clock?", options=options)
    assert done.out == 'get_price({"item": "clock"})\nThe clock costs 12 dollars.\n'
    assert nano.bugs == []


def test_what_the_server_refuses_is_said_and_the_conversation_goes_on(chat):
    done = chat("x" * 60000, "What is 17 + 25?")
    assert (done.code, done.out) == (6, "17 + 25 = 42.\n")
    assert "rejects the request (400): " in done.err


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_the_page_talks_with_the_server(nano, tmp_path):
    with browser(tmp_path) as tab:
        tab.open(nano.url)
        tab.until("document.getElementById('model').textContent === 'nano'")
        for number, (question, answer) in enumerate([("What is 17 + 25?", "= 42."), ("Now subtract 4.", "= 38.")], 1):
            tab.value("document.getElementById('question').focus()")
            tab.type(question)
            tab.press("Enter")
            tab.until("!document.body.hasAttribute('data-answering')")
            assert tab.text(f"#turns > li:nth-child({number}) .text").endswith(answer)
        assert tab.text("#turns > li:last-child .facts").startswith("11 tokens · ")
        assert tab.complaints == []
    assert nano.bugs == []
