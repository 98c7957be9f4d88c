"""Input files of `run`: what they may hold (what they may not: tests/commands/run/test_refusals.py)."""

import json

import pytest

from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.inputs import ScoreItem, from_prompt, read_messages, read_scores
from dsv4cli.engine.text.questions import Question, read_questions

TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def asked(path, system=None):
    questions, bad = read_questions(path, system)
    assert bad == []
    return [one.messages for one in questions]


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
    assert asked(path) == [from_prompt(text, None), TALK]


def test_the_system_message_of_the_command_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi"}\n{"prompt": "ho"}')
    assert asked(path, "s") == [TALK, from_prompt("ho", "s")]


def test_lines_to_score(tmp_path):
    path = tmp_path / "s.jsonl"
    lines = [{"ids": [1, 2]}, {"text": " "}, {"messages": TALK, "tools": TOOLS}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with_tools = [TALK[0] | {"tools": TOOLS}, TALK[1]]
    assert read_scores(path) == [ScoreItem(ids=[1, 2]), ScoreItem(text=" "), ScoreItem(messages=with_tools)]


def test_a_pair_of_escapes_is_one_character(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert asked(path) == [from_prompt("😀", None)]
    path.write_text('{"prompt": "\\ude00\\ud83d"}')
    _, [bad] = read_questions(path, None)
    assert (bad.number, bad.error.message) == (1, "not Unicode: a \\u escape is half of a surrogate pair")


BATCH = {
    "custom_id": "a-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "gpt-4o",
        "messages": TALK,
        "tools": None,
        "temperature": 0,
        "top_p": 0.5,
        "max_completion_tokens": 7,
        "seed": 3,
        "stop": "\n",
        "n": 2,
        "stream": False,
        "presence_penalty": 0,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "top_k": 5,
        "min_p": 0.25,
        "response_format": {"type": "text"},
        "user": "me",
    },
}


def test_a_batch_request(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n" + json.dumps(BATCH) + "\n" + json.dumps({"prompt": "hi", "id": 5, "stop": ["a", "b"]}))
    [batch, plain], bad = read_questions(path, None)
    assert bad == []
    wishes = {"temperature": 0.0, "top_p": 0.5, "seed": 3, "max_tokens": 7, "stops": ("\n",), "samples": 2}
    wishes |= {"presence_penalty": 0.0, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "top_k": 5, "min_p": 0.25}
    assert batch == Question(2, 0, TALK, {"custom_id": "a-1"}, model="gpt-4o", **wishes)
    assert plain == Question(3, 1, from_prompt("hi", None), {"id": 5}, stops=("a", "b"))


def test_what_a_line_does_not_choose_is_the_commands(tmp_path):
    usual, limits = Sampling(0.6, 0.9, 100), Limits(50, 400, 8, 1, ("x",))
    free = Question(9, 4, TALK)
    assert (free.sampling(usual, 0), free.limits(limits)) == (Sampling(0.6, 0.9, 104), limits)
    own = Question(9, 4, TALK, temperature=0.0, seed=7, max_tokens=3, stops=(), top_k=5, repetition_penalty=1.1)
    assert own.sampling(usual, 0) == Sampling(0.0, 0.9, 7, top_k=5, repetition_penalty=1.1)
    assert own.limits(limits) == Limits(3, 400, 8, 1, ())
    seeds = {free.sampling(usual, sample).seed for sample in range(500)}
    assert len(seeds) == 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "/v1/embeddings"}, "'POST /v1/embeddings' is not supported"),
        ({"body": []}, '"body" is not a JSON object'),
        ({"extra": 1}, "unknown key 'extra' next to body"),
        ({"custom_id": [1]}, '"custom_id" is neither a string nor a number'),
        ({"body": {"messages": TALK, "temperature": -1}}, '"temperature" cannot be -1'),
        ({"body": {"messages": TALK, "presence_penalty": 3}}, '"presence_penalty" cannot be 3'),
        ({"body": {"messages": TALK, "repetition_penalty": 0}}, '"repetition_penalty" cannot be 0'),
        ({"body": {"messages": TALK, "top_k": 1.5}}, '"top_k" is not a whole number'),
        ({"body": {"messages": TALK, "min_p": 2}}, '"min_p" cannot be 2'),
        ({"body": {"messages": TALK, "temperature": True}}, '"temperature" is not a number'),
        ({"body": {"messages": TALK, "max_tokens": 0}}, '"max_tokens" cannot be 0'),
        ({"body": {"messages": TALK, "seed": 1.5}}, '"seed" is not a whole number'),
        ({"body": {"messages": TALK, "n": 0}}, '"n" cannot be 0'),
        ({"body": {"messages": TALK, "stop": [""]}}, '"stop" is neither a string nor a list of strings'),
        ({"body": {"messages": TALK, "logit_bias": {"5": 1}}}, '"logit_bias" is not supported here'),
        ({"body": {"messages": TALK, "colour": 1}}, "unknown key 'colour'"),
        ({"body": {}}, "none of the keys prompt, messages"),
    ],
)
def test_a_batch_request_that_cannot_be_answered(tmp_path, change, words):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(BATCH | change))
    _, [bad] = read_questions(path, None)
    assert bad.error.message.startswith(words)
