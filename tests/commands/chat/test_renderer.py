"""What an answer of `dsv4 chat` looks like as it comes: the same however it is cut, and never later than it must."""

from random import Random

import pytest

from dsv4cli.commands.chat import renderer
from dsv4cli.commands.chat.markdown import markdown_lines
from dsv4cli.commands.chat.renderer import Blocks, Renderer
from dsv4cli.output import Colours, Output
from tests.support.slow import slow_except

LONG = "Some words that are **bold** or `code`, and *others* that [lead](http://away) " * 4
PLAIN = "plain words that have no marks in them " * 3
TEXTS = (
    LONG,
    f"# Title\n{LONG}\n\n- an item {LONG}\n  and more\n- 2 * 3 and snake_case {LONG}\n  - inner\n1. one\n2. two\n\nend",
    f"{LONG}\n---\n{LONG}\n===\nplain words " * 2,
    f"```python\nx = '*'\n\n  y\n```\n{LONG}\n\n    indented {LONG}\n\n> quoted {LONG}",
    f"| a | b |\n|---|---|\n| {'1 ' * 60}| 2 |\n\n世界 {LONG}",
    f"an ** open mark {LONG}",
    "a\x1b[31m [red]b[/red] " * 30,
    "hard  \nbreak " * 20,
    f"{PLAIN}:\n- {PLAIN}\n- {PLAIN}\n# {PLAIN}\n{PLAIN}",
)  # fmt: skip


@pytest.fixture
def shown(capsys, monkeypatch):
    """What is shown of pieces, on a terminal of so many columns."""

    def show(pieces, columns):
        monkeypatch.setattr(renderer, "stdout_columns", lambda: columns)
        one = Renderer(Output(Colours(stdout=True)), markdown=True, thinking=False)
        for piece in pieces:
            one.push("content", piece)
        one.end()
        return capsys.readouterr().out

    return show


def cut(text, rng):
    while text:
        size = rng.randrange(1, 12)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("text", slow_except(TEXTS[::3], TEXTS), ids=range(len(TEXTS)))
def test_blocks_look_the_same_however_they_are_cut(shown, text):
    for columns in (20, 79):
        whole = shown([text], columns)
        assert shown(cut(text, Random(columns)), columns) == whole
        assert shown(text, columns) == whole


def test_a_long_paragraph_is_shown_line_by_line(capsys, monkeypatch):
    monkeypatch.setattr(renderer, "stdout_columns", lambda: 40)
    one = Renderer(Output(Colours(stdout=True)), markdown=True, thinking=False)
    for word in LONG.split(" "):
        one.push("content", f"{word} ")
    before = capsys.readouterr().out.splitlines()
    one.end()
    lines = markdown_lines(LONG, 40).lines
    assert before == lines[: len(before)]
    assert len(lines) - len(before) <= 3
    assert capsys.readouterr().out.splitlines() == lines[len(before) :]


def test_a_resize_loses_no_word(capsys, monkeypatch):
    monkeypatch.setattr(renderer, "stdout_columns", lambda: 40)
    one = Renderer(Output(Colours(stdout=True)), markdown=True, thinking=False)
    one.push("content", PLAIN[:90])
    monkeypatch.setattr(renderer, "stdout_columns", lambda: 25)
    one.push("content", f"{PLAIN[90:]}\n\n{PLAIN}")
    one.end()
    assert capsys.readouterr().out.split() == PLAIN.split() * 2


CUTS = (
    ("# A\nb\nc\n---\n\ni", ["# A", "b\nc", "---", "", "i"]),
    ("* d\n\n      e\n      f\n* g\n\n    h\n\ni\n\n    j",
     ["* d", "", "      e\n      f", "* g", "", "    h", "", "i", "", "    j"]),
    ("1. k\n   ```sh\n   l\n\n     m\n   ```\n   n",
     ["1. k", "fence:sh", "code:l", "code:", "code:  m", "end:", "   n"]),
    ("~~~\n```\n~~~~\n- o\n```\np\n```\nq", ["fence:", "code:```", "end:", "- o", "fence:", "code:p", "end:", "q"]),
    ("- ```c x\n  y\n  ```\n``` a ``` b\n```d`", ["-", "fence:c x", "code:y", "end:", "``` a ``` b\n```d`"]),
    ("so\n\\[\n- b\n\\]\n- c \\[ x\n* d\n\n* e `\\[`\n* f",
     ["so", "math:\\[", "math:- b", "math:\\]", "- c \\[ x", "math:* d", "", "* e `\\[`", "* f"]),
)  # fmt: skip


@pytest.mark.parametrize(("text", "texts"), CUTS, ids=range(len(CUTS)))
def test_blocks_are_cut_where_nothing_behind_changes_them(text, texts):
    blocks = Blocks()
    pushed = blocks.push(text) + blocks.flush()
    names = [f"{block.kind}:" if block.kind not in ("text", "empty") else "" for block in pushed]
    assert [f"{name}{block.text}" for name, block in zip(names, pushed, strict=True)] == texts


def test_what_goes_on_in_a_list_knows_its_marks():
    blocks = Blocks()
    pushed = blocks.push("1. a\n   - b\n\n     c\n\nd\n\n   e\n")
    assert [(block.text, block.before) for block in pushed + blocks.flush() if block.kind == "text"] == [
        ("1. a\n   - b", ""),
        ("     c", "1. x\n   - x"),
        ("d", ""),
        ("   e", ""),
    ]
