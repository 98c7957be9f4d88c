"""The rules of the prompt format one by one: calls, user turns, dropped reasoning, tasks."""

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4cli.engine.text.prompt import Message, check_messages, encode_messages
from dsv4cli.engine.text.tokens import BOS, EOS, TASKS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(content: object, **more: object) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: object, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(call_id: str, content: object) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def call(name: str, arguments: str, id: str = "c") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(messages: Sequence[Message], *, thinking: bool = True, **options: Any) -> str:
    """The prompt of checked messages without its BOS."""
    text = "".join(encode_messages(check_messages(messages), release="v4", thinking=thinking, **options))
    return text.removeprefix(BOS)


def test_calls_are_written_without_escapes() -> None:
    calls = [call("f", '{"s": "a\\n<b>", "n": 1.0, "l": [1, "é"], "z": null}'), call("g", "{}"), call("h", "not json")]
    text = encode([user("q"), assistant(None, tool_calls=calls)], thinking=False)
    assert text.partition("</think>")[2] == (
        "\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">a\n<b></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.0</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">[1, "é"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="z" string="false">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="h">\n'
        '<｜DSML｜parameter name="arguments" string="true">not json</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}"
    )


def test_arguments_that_are_no_object_are_one_string() -> None:
    text = encode([user("q"), assistant("", tool_calls=[call("f", "[1]")])])
    assert '<｜DSML｜parameter name="arguments" string="true">[1]</｜DSML｜parameter>' in text


@pytest.mark.parametrize(
    ("messages", "turn"),
    [
        ([user("a"), result("x", "r"), user("b")], "a\n\n<tool_result>r</tool_result>\n\nb"),
        ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "a\n\nb"),
        (
            [result("x", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])],
            "<tool_result>a\n\n[Unsupported image_url]</tool_result>",
        ),
        ([result("x", "")], "<tool_result></tool_result>"),
    ],
)
def test_user_turn(messages: list[Message], turn: str) -> None:
    assert encode(messages) == f"<｜User｜>{turn}<｜Assistant｜><think>"


def test_results_follow_the_latest_calls_and_keep_their_slots() -> None:
    first = assistant("", tool_calls=[call("f", "{}", id) for id in "ab"])
    second = assistant("", tool_calls=[call("f", "{}", id) for id in "ba"])
    results = [result("a", "A"), user("between"), result("b", "B")]
    a, b = "<tool_result>A</tool_result>", "<tool_result>B</tool_result>"
    for calls, turn in [([first], f"{a}\n\nbetween\n\n{b}"), ([first, second], f"{b}\n\nbetween\n\n{a}")]:
        assert f"<｜User｜>{turn}<｜Assistant｜>" in encode([user("q"), *calls, *results])
        # the order also holds when the calls were read before
        assert encode(results, context=[user("q"), *calls]).startswith(f"<｜User｜>{turn}<｜Assistant｜>")
    # an unknown call counts as the first, and is stable
    turn = f"{b}\n\n<tool_result>Z</tool_result>\n\n{a}"
    assert turn in encode([user("q"), second, result("b", "B"), result("z", "Z"), result("a", "A")])


def test_reasoning_from_before_the_last_question() -> None:
    messages = [user("a"), assistant("b", reasoning_content="r"), user("c"), assistant("d", reasoning_content="s")]
    dropped = f"<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>s</think>d{EOS}"
    kept = f"<｜User｜>a<｜Assistant｜><think>r</think>b{EOS}<｜User｜>c<｜Assistant｜><think>s</think>d{EOS}"
    assert encode(messages) == dropped
    assert encode(messages, drop_thinking=False) == kept
    assert encode(messages, thinking=False) == kept.replace("<think>", "").replace("r</", "</").replace("s</", "</")
    tools = {"role": "system", "content": "", "tools": [TOOL]}
    assert encode([tools, *messages]).endswith(kept)
    assert encode(messages, context=[tools]) == kept
    assert encode(messages[2:], context=messages[:2]) == dropped.partition(EOS)[2]


def test_developer_messages_go_with_the_reasoning() -> None:
    messages = [{"role": "developer", "content": "d"}, assistant("b", reasoning_content="r"), user("c")]
    dropped = f"b{EOS}<｜User｜>c<｜Assistant｜>"
    assert encode(messages) == f"{dropped}<think>"
    assert encode(messages, drop_thinking=False) == f"<｜User｜>d<｜Assistant｜><think>r</think>{dropped}<think>"
    assert encode(messages, thinking=False) == f"<｜User｜>d<｜Assistant｜></think>{dropped}</think>"
    assert encode(messages[1:], context=messages[:1]) == f"{dropped}<think>"
    assert encode([user("a"), *messages[:1]]) == "<｜User｜>a<｜User｜>d<｜Assistant｜><think>"


def test_reminder_is_preceded_by_the_primer() -> None:
    messages = [user("q"), {"role": "latest_reminder", "content": "now"}, user("p")]
    assert encode(messages, thinking=False) == (
        "<｜User｜>q<｜Assistant｜></think><｜latest_reminder｜>now<｜User｜>p<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("task", TASKS)
def test_tasks(task: str) -> None:
    tail = f"<｜Assistant｜><think><｜{task}｜>" if task == "action" else f"<｜{task}｜>"
    assert encode([user("q", task=task)]) == f"<｜User｜>q{tail}"
    # the answer to a task has no reasoning, and no user text joins the task's turn, but a result does
    assert encode([user("q", task=task), assistant("a", reasoning_content="r")]) == f"<｜User｜>q{tail}a{EOS}"
    assert encode([user("q", task=task), user("p")]) == "<｜User｜>q<｜User｜>p<｜Assistant｜><think>"
    assert encode([user("q", task=task), result("c", "r")]) == f"<｜User｜>q\n\n<tool_result>r</tool_result>{tail}"
