"""The chat templates against the encoder, on generated conversations, in transformers' and other engines of Jinja."""

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.server.efforts import WORDS, effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.text.chat_template import chat_template
from dsv4cli.engine.text.prompt import EFFORTS, Message, encode_messages, with_tools
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import ASSISTANT, EOS, USER
from tests.support.conversations import Talk, as_mappings, difference, talks
from tests.support.llama_jinja import answers
from tests.support.slow import slow

jinja2 = pytest.importorskip("jinja2")
NANO = Path(__file__).parents[3] / "dsv4cli" / "nano"
CASES = json.loads((Path(__file__).parents[2] / "data" / "encoding.json").read_text(encoding="utf-8"))["encode"]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"é": {"minimum": 1.0, "title": "<'&>"}}}}
TOOL = {"type": "function", "function": FUNCTION}
RELEASES: tuple[Release, ...] = ("v4", "0731")
Render = Callable[..., str]


class Refused(Exception):
    """Raised by a template."""


def refuse(message: str) -> None:
    raise Refused(message)


def environment(**filters: Any) -> Any:
    """Jinja as most programs set it up, with Jinja's own tojson: it escapes HTML and non-ASCII and sorts the keys."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.globals["raise_exception"] = refuse
    made.filters |= filters
    return made


@cache
def compiled(jinja: Any, release: Release) -> Any:
    return jinja.from_string(chat_template(release))


PLAIN, EXACT = environment(), environment(tojson=partial(json.dumps, ensure_ascii=False))


def render(messages: list[Message], release: Release = "v4", jinja: Any = EXACT, **variables: Any) -> str:
    """The prompt that the template writes."""
    variables = {"add_generation_prompt": True} | variables
    return str(compiled(jinja, release).render(messages=messages, **variables))


def encoded(messages: list[Message], release: Release = "v4", thinking: bool = False, **options: Any) -> str:
    return "".join(encode_messages(messages, release=release, thinking=thinking, **options))


def user(content: object, **more: object) -> Message:
    return {"role": "user", "content": content, **more}


def called(arguments: object, **more: object) -> list[Message]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("q"), {"role": "assistant", "content": "", "tool_calls": [call | more]}]


@pytest.fixture(scope="module")
def transformers_renders() -> Render:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(NANO / "tokenizer.json"))

    def renders(talk: Talk) -> str:
        values = talk.variables()
        template = chat_template(talk.release)
        text = tokenizer.apply_chat_template(values.pop("messages"), chat_template=template, tokenize=False, **values)
        return str(text)

    return renders


def differences(several: list[Talk], renders: Render) -> list[Any]:
    texts = ((talk, renders(talk), talk.official()) for talk in several)
    return [(talk, difference(ours, official)) for talk, ours, official in texts if ours != official]


def test_transformers_writes_200_conversations(transformers_renders: Render) -> None:
    assert differences([*islice(talks(1), 200)], transformers_renders) == []


@pytest.mark.slow
def test_transformers_writes_5000_conversations(transformers_renders: Render) -> None:
    assert differences([*islice(talks(2), 5000)], transformers_renders) == []


@pytest.mark.slow
def test_llama_cpp_writes_5000_conversations(tmp_path: Path) -> None:
    several = [*islice(talks(2), 5000)]
    files = {release: str(tmp_path / f"{release}.jinja") for release in RELEASES}
    for release, file in files.items():
        Path(file).write_text(chat_template(release), encoding="utf-8")
    found = answers([{"template": files[talk.release], "input": talk.variables()} for talk in several])
    texts = iter(one.get("text", one.get("error")) for one in found)
    assert differences(several, lambda talk: next(texts)) == []
    # what llama.cpp finds out about a template decides how it passes contents and arguments on
    for one in answers([{"template": file, "caps": True} for file in files.values()]):
        assert set(one["caps"].values()) == {True}


def test_generated_conversations_have_every_kind_of_input() -> None:
    several = [*islice(talks(1), 200)]
    messages = [message for talk in several for message in talk.messages]
    roles = {message["role"] for message in messages}
    assert roles == {"system", "user", "assistant", "tool", "developer", "latest_reminder"}
    fields = {name for message in messages for name, value in message.items() if value}
    wanted = {"tools", "response_format", "task", "wo_eos", "reasoning_content", "tool_calls", "tool_call_id"}
    assert fields == wanted | {"role", "content"}
    efforts = {(release, effort) for release in RELEASES for effort in (None, *EFFORTS[release])}
    assert {(talk.release, talk.effort) for talk in several if talk.thinking} == efforts
    assert {(talk.thinking, talk.drop_thinking) for talk in several} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert any(talk.tools for talk in several)
    assert any(talk.schema for talk in several)
    assert any(isinstance(message["content"], list) for message in messages)


@pytest.mark.parametrize("jinja", [EXACT, PLAIN], ids=["json.dumps", "Jinja's tojson"])
def test_recorded_texts_of_the_official_encoder(jinja: Any) -> None:
    for case in CASES:
        thinking, effort = case["thinking_mode"] == "thinking", case["reasoning_effort"]
        variables = {"thinking": thinking, "reasoning_effort": effort, "drop_thinking": case["drop_thinking"]}
        messages = [as_mappings(message) for message in case["messages"]]
        assert render(messages, case["release"], jinja, **variables) == case["text"]


def test_an_engine_that_escapes_json_writes_the_same() -> None:
    several = [*islice(talks(3), 60)]

    def renders(talk: Talk) -> str:
        return render(release=talk.release, jinja=PLAIN, **talk.variables())

    assert differences(several, renders) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("word", WORDS)
def test_efforts_are_those_of_the_server(release: Release, word: str) -> None:
    level = effort_of(Fields({"reasoning_effort": word}), release, "off").level
    thinking, effort = level != "off", None if level == "off" else level
    assert render([user("q")], release, reasoning_effort=word) == encoded([user("q")], release, thinking, effort=effort)
    assert render([user("q")], release, reasoning_effort=word, thinking=False) == encoded([user("q")], release)


@pytest.mark.parametrize(
    ("variables", "thinking"),
    [
        ({}, False),
        ({"thinking": None, "enable_thinking": None, "reasoning_effort": None, "drop_thinking": None}, False),
        ({"thinking": True}, True),
        ({"enable_thinking": True}, True),
        ({"thinking": False, "enable_thinking": True}, False),
        ({"thinking": True, "enable_thinking": False}, True),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none", "thinking": True}, False),
    ],
)
def test_thinking_is_off_unless_a_variable_turns_it_on(variables: dict[str, Any], thinking: bool) -> None:
    assert render([user("q")], **variables) == encoded([user("q")], thinking=thinking)


def test_tools_and_format_come_with_the_first_system_message() -> None:
    schema = {"type": "object"}
    for messages in ([user("q")], [user("q"), {"role": "system", "content": "s"}]):
        expected = with_tools(messages, [TOOL])
        expected = [one | {"response_format": schema} if one["role"] == "system" else one for one in expected]
        assert render(messages, tools=[TOOL], response_format=schema) == encoded(expected)


def test_without_a_generation_prompt_nothing_asks_for_an_answer() -> None:
    for messages in ([user("q")], [user("q", task="title")]):
        assert render(messages, add_generation_prompt=False).endswith(f"{USER}q")
    whole = render([user("q"), {"role": "assistant", "content": "a"}], add_generation_prompt=False, thinking=True)
    assert whole.endswith(f"{USER}q{ASSISTANT}<think></think>a{EOS}")
    assert whole.startswith(render([user("q")], thinking=True))


def test_reasoning_has_two_names() -> None:
    for name in ("reasoning_content", "reasoning"):
        messages = [user("q"), {"role": "assistant", "content": "a", name: "why"}]
        assert render(messages, thinking=True).endswith(f"<think>why</think>a{EOS}")


@pytest.mark.parametrize("name", ["from_json", *slow("fromjson")])
@pytest.mark.parametrize("arguments", ['{"a": {"b": [1.0, "é"]}, "c": "d"}', "[1]", '"text"', " { } "])
def test_arguments_may_be_text_where_the_engine_parses_json(name: str, arguments: str) -> None:
    jinja = environment(**{"tojson": partial(json.dumps, ensure_ascii=False), name: json.loads})
    assert render(called(arguments), jinja=jinja) == encoded(called(arguments))


@pytest.mark.parametrize(
    ("messages", "variables", "reason"),
    [
        (called('{"a": 1}'), {}, "cannot parse JSON: give the arguments of tool calls as objects"),
        (called([1]), {}, "the arguments of a tool call must be an object"),
        (called(None), {}, "the arguments of a tool call must be an object"),
        (called({}, function={"arguments": {}}), {}, "a tool call must be an object with a function that has a name"),
        (called({}, function="f"), {}, "a tool call must be an object with a function that has a name"),
        ([{"role": "robot", "content": "q"}], {}, "no message can have the role robot"),
        ([{"content": "q"}], {}, "no message can have the role"),
        ([user("q", task="sing")], {}, "unknown task sing"),
        ([user("q", tools=[TOOL])], {}, "only a system or developer message can have tools"),
        ([user("q", response_format={"type": "object"})], {}, "only a system or developer message can have"),
        ([user(7)], {}, "the content of a user message must be a string or a list of text parts"),
        ([user(0)], {}, "the content of a user message must be a string or a list of text parts"),
        ([user({"type": "text"})], {}, "the content of a user message must be a string or a list of text parts"),
        ([user(["q"])], {}, "a part of the content of a user message must be an object with a type"),
        ([user([{"text": "q"}])], {}, "a part of the content of a user message must be an object with a type"),
        ([user([{"type": "image_url"}])], {}, "accepts only text, and a user message has image_url"),
        ([user([{"type": "text"}])], {}, "accepts only text, and a user message has text"),
        ([{"role": "developer", "content": ""}, user("q")], {"thinking": True}, "a developer message must not be empt"),
        ([user("q"), {"role": "assistant", "content": "", "reasoning": [1]}], {"thinking": True}, "must be a string"),
        ([user("q")], {"thinking": "yes"}, "thinking and enable_thinking must be true or false"),
        ([user("q")], {"enable_thinking": 1}, "thinking and enable_thinking must be true or false"),
        ([user("q")], {"drop_thinking": "no"}, "drop_thinking must be true or false"),
        ([user("q")], {"reasoning_effort": "most"}, "reasoning_effort must be one of none, minimal, low, medium, high"),
        ([user("q")], {"reasoning_effort": 3}, "reasoning_effort must be one of"),
        ([user("q")], {"documents": [{"text": "d"}]}, "no format for documents"),
        ([user("q")], {"response_format": "json"}, "response_format must be a JSON schema"),
        ([user("q")], {"tools": [FUNCTION]}, "a tool must be an object with a function that has a name"),
        ([user("q")], {"tools": [{"function": {}}]}, "a tool must be an object with a function that has a name"),
    ],
)
def test_what_the_template_cannot_write_is_refused(
    messages: list[Message], variables: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        render(messages, **variables)


def six_digits(value: Any) -> str:
    """A tojson that writes floats as llama.cpp's does."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{six_digits(name)}: {six_digits(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def test_an_engine_that_rounds_floats_still_writes_them() -> None:
    jinja = environment(tojson=six_digits)
    for value in (0.0, -0.0, 1.0, -2.5, 0.1 + 0.2, 48.8584, 0.0001, 1e-5, 1234567.5, 1e6, 1e15, 1e16, 1e22, -3.25e-7):
        assert render(called({"a": [value]}), jinja=jinja) == encoded(called(json.dumps({"a": [value]}))), value
    for value in (1.23456789e-7, 1.2345678e19):
        with pytest.raises(Refused, match=r"this engine cannot write the number 1\.23457e"):
            render(called({"a": [value]}), jinja=jinja)


def test_only_the_effort_texts_of_the_releases_differ() -> None:
    old, new = (chat_template(release).splitlines() for release in RELEASES)
    changed = [one[0] for one in zip(old, new, strict=True) if one[0] != one[1]]
    assert [line.split("=")[0] for line in changed] == [
        "{#- Chat template of DeepSeek-V4, release of April 2026: writes the text of the official encoder "
        "(encoding_dsv4.py).",
        "{%- set effort_texts ",
    ]
    assert EFFORTS["0731"] != EFFORTS["v4"]
    for release in RELEASES:
        assert "@" not in chat_template(release)
        # llama.cpp recognizes the format, and V4 in it, by these words
        assert "dsml_token" in chat_template(release)
        assert "function_calls" not in chat_template(release)


def test_transformers_makes_the_ids_of_the_encoder() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(NANO / "tokenizer.json"))
    tokenizer.chat_template = chat_template("v4")
    messages = [{"role": "system", "content": "Be brief."}, user("What is 17 + 25?")]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert made == Tokenizer.from_file(NANO / "tokenizer.json").encode(encoded(messages))
