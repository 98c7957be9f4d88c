"""Input files of `run`: what they may hold (what they may not: tests/test_run_refusals.py)."""

import json

import pytest

from dsv4cli.engine.inputs import ScoreItem, from_prompt, read_messages, read_prompts, read_scores
from dsv4cli.errors import UsageError

TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_a_prompt_is_a_user_message_behind_the_system_message():
    assert from_prompt("hi", None) == [{"role": "user", "content": "hi"}]
    assert from_prompt("hi", "s") == TALK
    assert from_prompt("hi", "")[0] == {"role": "system", "content": ""}


@pytest.mark.parametrize("value", [TALK, {"messages": TALK}, {"messages": TALK, "tools": None}])
def test_a_conversation(tmp_path, value):
    path = tmp_path / "m.json"
    for start in ("", "\ufeff"):  # Windows' editors write a byte order mark
        path.write_text(start + json.dumps(value, indent=1), encoding="utf-8")
        assert read_messages(path) == TALK


def test_tools_go_into_the_system_message(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"messages": TALK, "tools": TOOLS}))
    assert read_messages(path) == [TALK[0] | {"tools": TOOLS}, TALK[1]]


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "p.jsonl"
    text = "a\u2028b\u2029c\x85d"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\r\n\n  \n{json.dumps({'messages': TALK})}", encoding="utf-8", newline="")
    assert read_prompts(path, None) == [from_prompt(text, None), TALK]


def test_the_system_message_of_the_command_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi"}\n{"prompt": "ho"}')
    assert read_prompts(path, "s") == [TALK, from_prompt("ho", "s")]


def test_lines_to_score(tmp_path):
    path = tmp_path / "s.jsonl"
    lines = [{"ids": [1, 2]}, {"text": " "}, {"messages": TALK, "tools": TOOLS}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with_tools = [TALK[0] | {"tools": TOOLS}, TALK[1]]
    assert read_scores(path) == [ScoreItem(ids=[1, 2]), ScoreItem(text=" "), ScoreItem(messages=with_tools)]


def test_a_pair_of_escapes_is_one_character(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert read_prompts(path, None) == [from_prompt("😀", None)]
    path.write_text('{"prompt": "\\ude00\\ud83d"}')
    with pytest.raises(UsageError, match=r"line 1: a .u escape is half of a surrogate pair"):
        read_prompts(path, None)
