"""Replies taken apart: recorded from the official parser, every refusal, and streams cut in every way."""

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dsv4cli.engine.text.prompt import check_messages, encode_messages
from dsv4cli.engine.text.reply import MalformedReply, ParsedReply, ReplyStream, parse_reply, split_reply
from dsv4cli.engine.text.tokens import BOS, DSML, EOS, THINK_END, THINK_START
from tests.support.slow import slow_except

CASES = json.loads((Path(__file__).parents[2] / "data" / "encoding.json").read_text(encoding="utf-8"))["parse"]
CALLS = f"\n\n<{DSML}tool_calls"


def calls(*invokes: str) -> str:
    """A block of calls with these lines inside."""
    return f"{CALLS}>\n" + "".join(f"{invoke}\n" for invoke in invokes) + f"</{DSML}tool_calls>"


def invoke(name: str, *parameters: str) -> str:
    return f'<{DSML}invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{DSML}invoke>"


def parameter(name: str, value: str, is_text: str = "true") -> str:
    return f'<{DSML}parameter name="{name}" string="{is_text}">{value}</{DSML}parameter>'


def arguments(reply: ParsedReply) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in reply.tool_calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded(case: dict[str, Any]) -> None:
    thinking = case["thinking_mode"] == "thinking"
    if "error" in case:
        with pytest.raises(MalformedReply):
            parse_reply(case["text"], thinking=thinking)
    else:
        assert parse_reply(case["text"], thinking=thinking).as_message() == case["message"]


def test_recorded_cases_are_all_here() -> None:
    assert len(CASES) == 9
    assert sum("error" in case for case in CASES) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (calls(), []),
        (calls(invoke("f")), [("f", "{}")]),
        (calls(invoke("f", parameter("a", 'x\n"<é>"'))), [("f", '{"a": "x\\n\\"<é>\\""}')]),
        (calls(invoke("f", parameter("a", "{not json", "false"))), [("f", '{"a": {not json}')]),
        (calls(invoke("f"), invoke("f")), [("f", "{}"), ("f", "{}")]),
    ],
)
def test_calls(text: str, expected: list[tuple[str, str]]) -> None:
    for end in (EOS, ""):
        reply = parse_reply(f"Hm.{text}{end}", thinking=False)
        assert reply.content == "Hm."
        assert arguments(reply) == expected


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("cut off", f"the reply ends without {EOS}"),
        ("", f"the reply ends without {EOS}"),
        (f"a{EOS}b", 'text follows the end of the reply: "b"'),
        (f"a{EOS}{EOS}", "text follows the end"),
        (f"a{BOS}{EOS}", f"the content contains the token {BOS}"),
        (f"a{THINK_START}{EOS}", f"the content contains the token {THINK_START}"),
        (f"a{THINK_END}{EOS}", f"the content contains the token {THINK_END}"),
        (f"a{DSML}{EOS}", f"the content contains the token {DSML}"),
        (f"{calls(invoke('f'))} ok{EOS}", 'text follows the end of the reply: " ok'),
        (f"{calls(invoke('f'))}{EOS}x", "text follows the end"),
        (f"{CALLS}>", f"the reply ends without </{DSML}tool_calls>"),
        (f"{CALLS}>\n{invoke('f')}\n{EOS}", f"the reply ends without </{DSML}tool_calls>"),
        (f"{CALLS}>\n{invoke('f')}</{DSML}tool_calls>{EOS}", 'does not end its line: ">"'),
        (f"{CALLS}>{invoke('f')}\n</{DSML}tool_calls>{EOS}", 'does not end its line: ">"'),
        (calls("see below", invoke("f")), 'does not end its line: ">\\nsee below\\n"'),
        (calls(f'<{DSML}invoke nme="f">\n</{DSML}invoke>'), 'a tool call has no name: " nme'),
        (calls(f'<{DSML}invoke name="f"></{DSML}invoke>'), "a tool call has no name"),
        (calls(f'<{DSML}invoke name="f">\n'), f"the reply ends without </{DSML}invoke"),
        (calls(invoke("f", parameter("a", "1"), parameter("a", "2"))), "the call of f has the parameter a twice"),
        (calls(invoke("f", parameter("a", "1"), parameter("a", "1"))), "the call of f has the parameter a twice"),
        (calls(invoke("f", parameter("a", "1", "yes"))), "a parameter of f is not a name, its type and a closed value"),
        (calls(invoke("f", f'<{DSML}parameter name="a" string="true">1')), f"the reply ends without /{DSML}parameter"),
        (calls(invoke("f", f'<{DSML}parameter name="a">1</{DSML}parameter>')), "a parameter of f is not a name"),
        (calls(invoke("f", parameter("a", "1") + "!")), 'a parameter of f does not end its line: ">!\\n"'),
    ],
)
def test_malformed(text: str, wrong: str) -> None:
    with pytest.raises(MalformedReply) as caught:
        parse_reply(text, thinking=False)
    assert wrong in caught.value.message


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (f"never closed{EOS}", f"the reply ends without {THINK_END}"),
        (f"call{calls(invoke('f'))}{THINK_END}a{EOS}", f"tool calls come before {THINK_END}"),
        (f"a{THINK_START}b{THINK_END}c{EOS}", f"the reasoning contains the token {THINK_START}"),
        (f"a{EOS}b{THINK_END}c{EOS}", f"the reasoning contains the token {EOS}"),
        (f"a{THINK_END}b{THINK_END}c{EOS}", f"the content contains the token {THINK_END}"),
    ],
)
def test_malformed_reasoning(text: str, wrong: str) -> None:
    with pytest.raises(MalformedReply) as caught:
        parse_reply(text, thinking=True)
    assert wrong in caught.value.message


@pytest.mark.parametrize("thinking", [True, False])
def test_a_reply_is_read_back_as_it_was_written(thinking: bool) -> None:
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "x\\ny", "b": [1, {"c": null}], "d": true}'},
    }
    none = {"type": "function", "function": {"name": "g", "arguments": "{}"}}
    reply = ParsedReply("Look:", "why\n" if thinking else "", [call, none])
    question = [{"role": "user", "content": "q"}]
    prompt = "".join(encode_messages(question, release="v4", thinking=thinking))
    text = "".join(encode_messages(check_messages([*question, reply.as_message()]), release="v4", thinking=thinking))
    assert text.startswith(prompt)
    assert parse_reply(text.removeprefix(prompt), thinking=thinking) == reply


@pytest.mark.parametrize(
    ("text", "thinking", "reply"),
    [
        ("because", True, ParsedReply("", "because")),
        (f"because{EOS}", True, ParsedReply("", "because")),
        (f"because{THINK_END}so", True, ParsedReply("so", "because")),
        (f"because{THINK_END}", True, ParsedReply("", "because")),
        (f"a{THINK_END}b{THINK_END}c", True, ParsedReply(f"b{THINK_END}c", "a")),
        ("so far", False, ParsedReply("so far")),
        (f"so{CALLS}>\n<", False, ParsedReply(f"so{CALLS}>\n<")),
        ("", True, ParsedReply("")),
    ],
)
def test_split(text: str, thinking: bool, reply: ParsedReply) -> None:
    assert split_reply(text, thinking=thinking) == reply


STREAMED = [
    (f"because{THINK_END}so{EOS}", True, [("reasoning", "because"), ("content", "so")]),
    (f"{THINK_END}so{EOS}", True, [("content", "so")]),
    (f"so{EOS}", False, [("content", "so")]),
    ("", False, []),
    ("a < b </thin", True, [("reasoning", "a < b </thin")]),
    (f"a{THINK_END}b{THINK_END}", True, [("reasoning", "a"), ("content", f"b{THINK_END}")]),
    (f"a\n\n\n{calls(invoke('f'))}{EOS}", False, [("content", "a\n\n\n"), ("calls", calls(invoke("f")))]),
    (f"r{CALLS}>{THINK_END}{CALLS}x", True, [("reasoning", "r\n\n"), ("calls", f"{CALLS[2:]}>{CALLS}x")]),
    (f"a\n\n<{DSML}tool_result>{EOS}\n", False, [("content", "a"), ("calls", f"\n\n<{DSML}tool_result>\n")]),
    (f"r{CALLS}>x{EOS}", True, [("reasoning", "r\n\n"), ("calls", f"{CALLS[2:]}>x")]),
    (
        f"a{DSML}b{THINK_END}c</{DSML}x",
        True,
        [("reasoning", "a"), ("calls", f"{DSML}b"), ("content", "c"), ("calls", f"</{DSML}x")],
    ),
    (f"{EOS[:-1]}{EOS}", False, [("content", EOS[:-1])]),
    (f"</thi{EOS}nk>", True, [("reasoning", "</think>")]),
    (f"a\n{EOS}\n<{DSML}tool_calls", False, [("content", "a\n\n"), ("calls", CALLS[2:])]),
]


def classified(pieces: list[str], thinking: bool) -> list[tuple[str, str]]:
    """What the stream makes of the pieces, neighbours of one kind joined."""
    stream = ReplyStream(thinking)
    out = [found for piece in pieces for found in stream.push(piece)] + stream.flush()
    assert all(text for _, text in out)
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(out, key=lambda found: found[0])]


@pytest.mark.parametrize(("text", "thinking", "expected"), slow_except(STREAMED[::2], STREAMED))
def test_stream_does_not_depend_on_the_cuts(text: str, thinking: bool, expected: list[tuple[str, str]]) -> None:
    assert classified([text], thinking) == expected
    assert classified(list(text), thinking) == expected
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert classified([text[:i], text[i:j], text[j:]], thinking) == expected


def test_stream_of_random_marks() -> None:
    rng = random.Random(0)
    parts = [THINK_END, EOS, CALLS, DSML, f"</{DSML}", "\n", "<", "</", "｜", "a", CALLS[:-1], EOS[:4], THINK_END[1:]]
    for _ in range(500):
        text = "".join(rng.choices(parts, k=rng.randrange(8)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        thinking = rng.random() < 0.5
        assert classified(pieces, thinking) == classified([text], thinking)
        assert DSML not in "".join(part for kind, part in classified(pieces, thinking) if kind != "calls")


def test_stream_agrees_with_the_parser() -> None:
    for case in (case for case in CASES if "message" in case):
        thinking = case["thinking_mode"] == "thinking"
        found = dict(classified(list(case["text"]), thinking))
        assert found.get("content", "") == case["message"]["content"]
        assert found.get("reasoning", "") == case["message"]["reasoning_content"]
        assert ("calls" in found) == bool(case["message"]["tool_calls"])


def test_stream_holds_back_no_more_than_a_mark() -> None:
    stream = ReplyStream(thinking=True)
    assert stream.push("so <") == [("reasoning", "so ")]
    assert stream.push("b") == [("reasoning", "<b")]
    assert stream.push("\n\n") == [("reasoning", "\n\n")]  # calls cannot begin here
    assert stream.push(f"{THINK_END}x\n\n") == [("content", "x")]
    assert stream.push("y") == [("content", "\n\ny")]
    assert stream.push(CALLS) == [("calls", CALLS)]
    assert stream.push(f">\n<{THINK_END}\n\n") == [("calls", f">\n<{THINK_END}\n\n")]
    assert stream.push("<") == []
    assert stream.flush() == [("calls", "<")]
    assert stream.flush() == []


def test_a_text_may_end_where_the_official_parser_looks_for_no_more() -> None:
    begun = f"Hm.{CALLS}>\n{invoke('f')}"
    assert parse_reply(f"Hm.{CALLS}", thinking=False) == ParsedReply("Hm.")
    assert arguments(parse_reply(begun.removesuffix(">"), thinking=False)) == [("f", "{}")]
    for cut in (f"Hm.{CALLS}>", f"Hm.{CALLS}{EOS}", begun, begun.removesuffix(">") + EOS):
        with pytest.raises(MalformedReply):
            parse_reply(cut, thinking=False)
