"""Text of others: none of it commands a terminal, begins a line of ours or hides, and what can be pasted is exact."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4cli import cli
from dsv4cli.errors import UsageError
from dsv4cli.harmless import brief_line, harmless, harmless_line, shell_word
from dsv4cli.output import Colours, Output

# signs that Unicode calls format characters and that are seen: they stand before digits and between hieroglyphs
SEEN = {
    *map(chr, (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13456)))
}


def test_a_line_shows_every_invisible_character():
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    hidden = {char for char in every if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs")} - SEEN
    assert [hex(ord(char)) for char in hidden if len(harmless_line(char)) < 4 and char not in "\n\r\t"] == []
    shown = set(harmless_line("".join(every)))
    assert shown & (hidden - {"\u200c", "\u200d"}) == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nerror: b", r"a\nerror: b"),
        ("a\r\tb\x1b[31m\x9b\x7f", r"a\r\tb\x1b[31m\u009b\x7f"),
        ("ab\u202ecd\u2066\u200f\u2028", r"ab\u202ecd\u2066\u200f\u2028"),
        ("lay\u200bers.\u200d0\ufe0f", r"lay\u200bers.\u200d0\ufe0f"),
        ("\U000e0041\ud800\udc80\udcff", r"\U000e0041\ud800\x80\xff"),
        ("👨‍👩‍👧 ❤️‍🔥 1️⃣ می‌خواهم שלום", "👨‍👩‍👧 ❤️‍🔥 1️⃣ می‌خواهم שלום"),
        ("é\u200d\u200d\u200dé", r"é\u200d\u200d\u200dé"),
        (r"C:\new [red]x[/red]", r"C:\new [red]x[/red]"),
    ],
)
def test_a_line_stays_one_line_and_shows_what_hides(text, shown):
    assert harmless_line(text) == shown
    assert harmless_line(shown) == shown


def test_text_of_many_lines_keeps_its_scripts_and_loses_its_commands():
    text = "a\n\tb 👨‍👩‍👧 می‌خواهم \u200fשלום\u200e"
    assert harmless(text) == text
    assert harmless("\x1b[2J\u202eab\u202c\u2066c\u2069\r\x9b\ud800") == "�[2J�ab��c����"
    assert harmless("a\u2028b") == "a\nb"


def test_a_long_word_and_a_long_line_are_cut_with_their_length():
    name = "layers." + "x" * 10**6
    assert brief_line(f"tensor {name} is missing") == (
        f"tensor {name[:200]}…{'x' * 100} (1,000,007 characters) is missing"
    )
    short = brief_line("\n " * 10**6 + "end")
    assert len(short) < 13_000
    assert short.endswith("end (2,000,003 characters)")
    path = "/" + "/".join(["x" * 200] * 15)
    assert brief_line(path, 4096) == path


AWKWARD = ["a b", "it's", "a\nb", "\u202e\x1b[31m", "-rf", "$(x) `y`", "é ü", "\\n'\t", "می‌خواهم", "*~#"]


@pytest.mark.parametrize("name", AWKWARD)
def test_a_pasted_word_is_exactly_the_name(name, tmp_path):
    word = shell_word(name)
    assert word == shell_word(Path(name))
    assert word == harmless_line(word)
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, cwd=tmp_path, check=True)
    assert os.fsdecode(done.stdout).removeprefix("./") == name
    assert shell_word("plain-name_1.0/x") == "plain-name_1.0/x"


def test_a_name_that_is_no_utf_8_is_pasted_by_its_bytes():
    word = shell_word(os.fsdecode(b"a\xe9 b"))
    assert word == r"$'a\xe9 b'"
    assert shell_word("\ud800").isascii()


EVIL = "x\nerror: forged\x1b[2J\u202e" + "y" * 10**6


@pytest.mark.parametrize("say", ["line", "status", "hint", "warning", "paragraph", "error", "table"])
def test_what_is_said_stays_in_its_line(capsys, say):
    out = Output(Colours())
    if say == "error":
        out.error(UsageError(EVIL, EVIL))
    else:
        getattr(out, say)([[EVIL, "b"], ["c", "d"]] if say == "table" else EVIL)
    done = capsys.readouterr()
    assert not {"\x1b", "\u202e"} & set(done.out + done.err)
    assert not [line for line in (done.out + done.err).splitlines() if line.startswith("error: forged")]
    assert say == "line" or len(done.out + done.err) < 7000


def test_a_json_document_is_exact_and_turns_no_direction(capsys):
    Output(Colours(), as_json=True).document({"a": EVIL})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"a": EVIL}
    assert not {"\x1b", "\u202e"} & set(shown)


@pytest.mark.parametrize(
    "arguments", [["no\x1b[2J\ncommand"], ["--no\x1b[2J\noption"], ["run", "--tp", "1\x1b[2J\nerror: x"]]
)
def test_a_wrong_argument_reaches_the_terminal_as_text(arguments):
    done = CliRunner().invoke(cli.app, arguments, prog_name="dsv4")
    assert (done.exit_code, done.stdout) == (2, "")
    assert r"\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr
    assert len(done.stderr.splitlines()) == 4
