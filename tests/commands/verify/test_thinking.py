"""How verify notices that a server thinks although the request turns thinking off."""

import json

import pytest

from dsv4cli.engine.verification.calls import ServerReply
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.thinking import thinking_checks
from dsv4cli.engine.verification.vocabularies import open_tokenizer

PARIS = "The capital of France is Paris."
THOUGHT = "I know this."
WORK = "17 * 25: 17 * 20 = 340, 17 * 5 = 85, together 425"


@pytest.fixture(scope="module")
def server():
    return CheckedServer("http://x", "nano", tokenizer=open_tokenizer("nano"), completions=True)


def said(content, reasoning="", finish="stop", **usage):
    message = {"content": content, "reasoning_content": reasoning}
    return ServerReply(200, json.dumps({"choices": [{"message": message, "finish_reason": finish}], "usage": usage}))


def found(server, off, on, raw=PARIS):
    """What is wrong, with one answer without thinking, one with it, and the model's own answer without it."""
    check = next(one for one in thinking_checks(server, quick=True) if one.name == "replies.thinking-off")
    replies = {"replies.reasoning/0": on, "replies.thinking-off/0": off}
    replies["replies.thinking-off/raw"] = ServerReply(200, json.dumps({"choices": [{"text": raw}]}))
    assert {call.key for step in check.steps for call in step.plan({})} < {*replies}
    return [problem.what for problem in check.judge(replies)]


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (said(PARIS, completion_tokens=11), said(PARIS, THOUGHT)),
        (said(f"{WORK}\n"[:30], finish="length"), said(PARIS, THOUGHT)),
        # the model thinks of nothing else than the answer
        (said(PARIS), said(PARIS, PARIS)),
        # thinking cannot be turned on: another check says so
        (said(PARIS), said(PARIS)),
    ],
    ids=["right", "work", "same", "never"],
)
def test_an_answer_without_thinking_is_right(server, off, on):
    assert found(server, off, on) == []


@pytest.mark.parametrize(
    ("off", "on", "what"),
    [
        (said(PARIS, THOUGHT), said(PARIS, THOUGHT), "has reasoning"),
        (said(f"{THOUGHT}</think>{PARIS}"), said(PARIS, THOUGHT), "has reasoning"),
        (said(PARIS, completion_tokens_details={"reasoning_tokens": 5}), said(PARIS, THOUGHT), "has reasoning"),
        (said(PARIS, completion_tokens=16), said(PARIS, THOUGHT), "usage counts 16 tokens, and the text has 10"),
        (said(f"{THOUGHT}\n\n{PARIS}"), said(PARIS, THOUGHT), "begins with the model's reasoning"),
        (said(WORK[:40], finish="length"), said(PARIS, WORK), "begins with the model's reasoning"),
        (said(f"{THOUGHT}{PARIS}"), said(f"{THOUGHT}{PARIS}"), "begins with the model's reasoning"),
    ],
    ids=["shown", "marked", "counted", "hidden", "leaked", "cut", "always"],
)
def test_thinking_that_is_not_off_is_named(server, off, on, what):
    [said] = found(server, off, on)
    assert what in said


def test_only_the_models_own_answer_shows_that_a_server_without_a_parser_thinks(server):
    text = said(f"{THOUGHT}{PARIS}")
    assert found(server, text, text, raw="") == []


def test_one_question_of_several_with_the_same_text_is_no_error(server):
    """Small models calculate in the answer as they do in the reasoning."""
    check = next(one for one in thinking_checks(server, quick=False) if one.name == "replies.thinking-off")
    keys = [call.key for step in check.steps for call in step.plan({}) if not call.key.endswith("raw")]
    assert len(keys) == 3
    same = {key: said(WORK[:40], finish="length") for key in keys}
    same |= {key.replace("thinking-off", "reasoning"): said(PARIS, WORK) for key in keys}
    assert len([*check.judge(same)]) == 1
    assert [*check.judge(same | {keys[0]: said(PARIS)})] == []
    # without an answer to the first question, the others show nothing
    late = check.judge(same | {keys[0]: ServerReply(0, failure="no answer")})
    assert [problem.what for problem in late] == ["a chat request has no readable answer"]


def test_the_models_own_answer_is_compared_with_that_to_its_question(server):
    """A server that does not think at all, and does not answer the first question in time."""
    check = next(one for one in thinking_checks(server, quick=False) if one.name == "replies.thinking-off")
    replies = {"replies.thinking-off/raw": ServerReply(200, json.dumps({"choices": [{"text": PARIS}]}))}
    for number in range(3):
        replies |= {f"replies.{name}/{number}": said(WORK) for name in ("thinking-off", "reasoning")}
    replies["replies.reasoning/0"] = ServerReply(0, failure="no answer")
    assert [*check.judge(replies)] == []
