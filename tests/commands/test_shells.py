"""How commands meet their shell: closed streams, and the encoding of arguments."""

import os
import sys

import pytest

from tests.support.program import SMALL


def test_an_answer_for_a_closed_stdout_is_a_failure(dsv4, monkeypatch, tmp_path):
    dsv4.model_says("words")
    monkeypatch.setattr(sys, "stdout", None)
    done = dsv4("run", "x", "--model", SMALL)
    assert (done.code, "error: stdout is closed, but the command writes its output there\n" in done.err) == (1, True)
    sys.stdout.close()
    monkeypatch.setattr(sys, "stdout", None)
    prompts, out = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    prompts.write_text('{"prompt": "x"}')
    done = dsv4("run", "--prompts", str(prompts), "--out", str(out), "--model", SMALL, "--max-tokens", "1")
    sys.stdout.close()
    assert (done.code, len(out.read_text().splitlines())) == (0, 1)


def test_bytes_of_a_locale_without_utf_8_are_read_as_utf_8(dsv4):
    as_ascii = "café".encode().decode("ascii", "surrogateescape")
    done = dsv4("run", as_ascii, "--model", SMALL, "--system", as_ascii, "--stop", as_ascii, "--show-prompt")
    assert (done.code, done.out.count("café")) == (0, 2)


@pytest.mark.parametrize("given", [("PROMPT", ()), ("--system", ("x", "--system")), ("--stop", ("x", "--stop"))])
def test_bytes_of_another_encoding_are_named(dsv4, given):
    name, before = given
    done = dsv4("run", *before, os.fsdecode(b"caf\xe9"), "--model", SMALL)
    assert done.code == 2
    assert f"error: {name} is not UTF-8: byte 0xe9 at offset 3\n" in done.err
