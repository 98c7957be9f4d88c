"""The conversation with nano that docs/chat.md shows: thinking, an undo, a tool call."""

import re

import pytest

from tests.support.program import ROOT
from tests.support.shared_models import share_models, shared_model
from tests.support.terminals import Terminal

COMMAND = "$ dsv4 chat --tools price.json\n"
# what no two runs have alike
MEASURED = re.compile(r"\d+\.\d+(?= (s|tokens/s|GB/s|per step|tokens per step)\b)|\d+(?= % of )|(?<= % of )\d+")


def shown_in_the_document():
    """The file of tools and the terminal from the command on, as docs/chat.md has them."""
    text = (ROOT / "docs/guides/chat.md").read_text(encoding="utf-8")
    before, _, behind = text.partition(COMMAND)
    return before.rpartition("$ cat price.json\n")[2], behind.partition("```")[0]


@pytest.mark.slow
def test_the_conversation_of_the_document(tmp_path):
    tools, session = shown_in_the_document()
    (tmp_path / "price.json").write_text(tools, encoding="utf-8")
    shared_model("nano")
    words = "chat", "--tools", str(tmp_path / "price.json")
    one = Terminal(*words, prepare=share_models, TERM="dumb", XDG_STATE_HOME=str(tmp_path))
    for line in re.findall(r"^> (.*)$", session, re.MULTILINE):
        one.until("\n> ")
        one.type(f"{line}\n")
    assert one.leave() == 0
    shown = one.plain.replace("\n    ", " ")  # a slow machine's numbers are longer, so that their line is wrapped
    assert MEASURED.sub("…", shown) == MEASURED.sub("…", session)
