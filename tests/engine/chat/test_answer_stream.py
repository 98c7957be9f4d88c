"""An answer as a client gets it: what is given joins to the message, however the answer is damaged; no markup leaks."""

import json
from random import Random

import pytest

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.chat.answer_stream import AnswerStream, Delta
from dsv4cli.engine.runtime.request import Token
from dsv4cli.engine.text.prompt_text import CALLS_CLOSE, CALLS_OPEN
from dsv4cli.engine.text.tokens import DSML, EOS, SPECIAL, THINK_END, THINK_START
from tests.support.program import BYTES, calls_block
from tests.support.slow import slow


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


FIRST = {"a": 'x\ny "é" </b>', "n": [3, {"k": None}], "z": " "}
CALLS = [call("f", FIRST), call("g", {}), call("h", {"p": "</", "q": 1})]
TOOLS = [{"function": {"name": "w", "parameters": {"properties": {"p": {}, "q": {}}}}}, {"function": {"name": "g"}}]
BLOCK, LAST = calls_block(CALLS), calls_block(CALLS[2:])


def arguments(call):
    return {key: str(value) for key, value in json.loads(call["function"]["arguments"]).items()}


def streamed(ids, *, thinking=False, last="stop", **given) -> tuple[AnswerStream, list[list[Delta]]]:
    """The stream of an answer of these tokens, and what each has added; last: why it ends, None if it is cut."""
    ids = [*ids, BYTES.eos_id] if last == "stop" else ids
    added = []
    answer = Answer(BYTES, thinking, given.pop("stops", ()), given.pop("tools", TOOLS))
    stream = AnswerStream(answer, **given)
    for number, id in enumerate(ids, 1):
        added.append(stream.push(Token(id, -0.5, [], last if number == len(ids) else None)))
        if stream.answer.finish:
            break
    added.append(stream.cut())
    return stream, added


def joined(added: list[list[Delta]]) -> dict[str, object]:
    """What a client makes of it: content, reasoning_content, and name and arguments of each call."""
    texts, calls = {"reasoning": "", "content": ""}, []
    for delta in (delta for deltas in added for delta in deltas):
        if delta.kind != "calls":
            assert (delta.index, delta.name, bool(delta.text)) == (-1, "", True)
            texts[delta.kind] += delta.text
        elif delta.name:
            assert (delta.index, delta.text) == (len(calls), "")
            calls.append([delta.name, ""])
        else:
            assert delta.text
            calls[delta.index][1] += delta.text
    return {"content": texts["content"], "reasoning_content": texts["reasoning"], "tool_calls": calls}


def checked(ids, **given) -> tuple[AnswerStream, list[list[Delta]]]:
    """That a stream joins to its message, which has no special token and no half call."""
    stream, added = streamed(ids, **given)
    message, found = stream.message(), joined(added)
    calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message["tool_calls"]]
    if stream.open_call is not None:
        assert stream.open_call == len(calls) == len(found["tool_calls"]) - 1
        found["tool_calls"].pop()
    assert found == {key: message[key] for key in ("content", "reasoning_content")} | {"tool_calls": calls}
    assert all(isinstance(json.loads(own, parse_constant=pytest.fail), dict) for _, own in calls)
    return stream, added


def test_what_each_token_adds():
    """Text at once but for spaces and what may be markup, names and texts of calls as they come, JSON once closed."""
    text = f"why {THINK_END}Hi \n\n<{DSML}tool_calls>\n" + BLOCK.partition(">\n")[2]
    ids = BYTES.encode(text)
    stream, added = checked(ids, thinking=True)
    given = [(BYTES.decode([id]), deltas) for id, deltas in zip(ids, added, strict=False) if deltas]
    assert given[:6] == [
        ("w", [Delta("reasoning", "w")]),
        ("h", [Delta("reasoning", "h")]),
        ("y", [Delta("reasoning", "y")]),
        ("H", [Delta("reasoning", " "), Delta("content", "H")]),
        ("i", [Delta("content", "i")]),
        (DSML, [Delta("content", " ")]),
    ]
    assert given[6:10] == [
        (">", [Delta("calls", "", 0, "f")]),
        (">", [Delta("calls", '{"a": "', 0)]),
        ("x", [Delta("calls", "x", 0)]),
        ("\n", [Delta("calls", "\\n", 0)]),
    ]
    of_calls = [delta for deltas in added for delta in deltas if delta.kind == "calls"]
    assert Delta("calls", ', "n": [3, {"k": null}]', 0) in of_calls
    assert Delta("calls", "{}", 1) in of_calls
    assert stream.finish == "tool_calls"
    assert not added[-2]  # nothing is left for the end


@pytest.mark.parametrize("every", [23, *slow(1)])
def test_nothing_is_whole_that_was_cut_off(every):
    """The calls that were closed, and one that may be open. The text is cut at its limit or by the end token."""
    ids = BYTES.encode(f"why{THINK_END}Hi{BLOCK}")
    for length in range(0, len(ids), every):
        for last in ("stop", "length", None):
            stream, added = checked(ids[:length], thinking=True, last=last)
            calls = stream.message()["tool_calls"]
            assert last == "stop" or stream.finish == (last if length else None)
            if last == "stop" and calls:  # the last one may lack the tags that close it
                assert arguments(calls[-1]).items() <= arguments(CALLS[len(calls) - 1]).items()
                assert stream.finish == "tool_calls"
                calls = calls[:-1]
            assert calls == CALLS[: len(calls)]
            if stream.open_call is not None:
                with pytest.raises(ValueError, match="line 1 column"):
                    json.loads(joined(added)["tool_calls"][-1][1])


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning", "names"),
    [
        (f"</think>so{EOS[:3]}", False, f"so{EOS[:3]}", "", []),  # a bare </think>
        (f"a{THINK_START}b</think> \n", True, " \n", "ab", []),
        (f"a{BLOCK}", True, "", "a", ["f", "g", "h"]),  # calls inside the thinking, which nothing else ends
        (f"a{LAST}b</think>so", True, "so", "a", []),
        (f"a \n{LAST.lstrip()}", False, "a", "", ["h"]),
        (f"a\n{LAST}", False, "a\n", "", ["h"]),
        (LAST.replace("<｜DSML｜tool_calls", "<｜DSML｜toolcalls"), False, "", "", ["h"]),
        (LAST.replace("<｜DSML｜tool_calls", "<｜DSML｜tool"), False, "", "", ["h"]),
        (LAST.replace("<｜DSML｜", "<｜DSML｜ ").replace("</｜DSML｜", "</｜DSML｜ "), False, "", "", ["h"]),
        (LAST.replace(' string="true"', "").replace(' string="false"', ""), False, "", "", ["h"]),
        (LAST.replace("｜DSML｜parameter>", "｜DSML｜param>", 1), False, "", "", ["h"]),
        (LAST.replace(">1<", ">NaN<"), False, "", "", ["h"]),
        (LAST.replace('"q"', '"p"'), False, "", "", []),  # twice: which value is meant?
        (LAST.replace('"p"', f'"p{DSML}"'), False, "", "", []),
        (LAST.replace('"p"', f'"p{DSML}"') + " and more", False, " and more", "", []),
        (LAST.replace('"h"', f'"h{DSML}"'), False, "", "", []),
        (LAST.replace('"h"', '"h "x""'), False, "", "", ['h "x"']),
        (LAST.replace("</</", "</<\n/"), False, "", "", ["h"]),
        (
            BLOCK.replace('\n</｜DSML｜invoke>\n<｜DSML｜invoke name="h', '<｜DSML｜invoke name="h'),  # not closed
            False,
            "",
            "",
            ["f", "g", "h"],
        ),
        (LAST.replace(">1<", f">{'[' * 2000}<"), False, "", "", ["h"]),
        (f"so{CALLS_OPEN}>\nsee below", False, "so\nsee below", "", []),
        (f"{LAST} and more", False, "", "", ["h"]),
    ],
)
def test_damaged_answers_are_repaired(text, thinking, content, reasoning, names):
    stream, _ = checked(BYTES.encode(text), thinking=thinking)
    message = stream.message()
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    assert [one["function"]["name"] for one in message["tool_calls"]] == names
    assert stream.finish == ("tool_calls" if names else "stop")


def test_what_stands_before_calls_in_the_thinking_comes_before_the_content():
    _, added = checked(BYTES.encode(f"a <{LAST.lstrip()}{THINK_END}so"), thinking=True)
    given = [(delta.kind, delta.text) for deltas in added for delta in deltas]
    assert given == [("reasoning", "a"), ("reasoning", " <"), ("content", "s"), ("content", "o")]


def test_a_misspelt_first_tag_does_not_hold_up_the_calls():
    text = BLOCK.replace("<｜DSML｜tool_calls", "<｜DSML｜toolcalls")
    _, added = checked(BYTES.encode(text))
    assert not added[-2]


def test_text_that_looks_like_a_token_is_text():
    """Markup is what has the token's id; what is made of other tokens stays, also in the values of calls."""
    text = f"see <think>, </think> and <{DSML}tool_calls> {EOS} <｜User｜>"
    stream, added = streamed(BYTES.encode_plain(text))
    assert stream.message()["content"] == joined(added)["content"] == text
    value = f"</{DSML}parameter> {EOS}"
    before, _, after = LAST.partition("></<")
    ids = [*BYTES.encode(f"{before}>"), *BYTES.encode_plain(value), *BYTES.encode(f"<{after}")]
    stream, added = streamed(ids)
    [one] = stream.message()["tool_calls"]
    assert json.loads(one["function"]["arguments"]) == {"p": value, "q": 1}
    assert joined(added)["tool_calls"] == [["h", one["function"]["arguments"]]]


@pytest.mark.parametrize("value", ["NaN", "1e999", "-1e400", "[1E+999]", r'["\ud83d"]'])
def test_what_not_every_reader_takes_is_text(value):
    stream, _ = checked(BYTES.encode(LAST.replace(">1<", f">{value}<")))
    assert arguments(stream.message()["tool_calls"][0]) == {"p": "</", "q": value}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("w", {"arguments": {"p": "é", "q": [1]}}, {"p": "é", "q": [1]}),
        ("w", {"input": '{"q": null}'}, {"q": None}),
        ("w", {"input": "{q}"}, None),  # no JSON
        ("w", {"input": '["p"]'}, None),
        ("w", {"input": '{"p": NaN}'}, None),
        ("w", {"input": '{"p": [1e999]}'}, None),
        ("w", {"input": {"p": 1, "r": 2}}, None),  # one that the function does not have
        ("w", {"input": {"p": 1}, "q": 2}, None),
        ("w", {"p": {"q": 1}}, None),
        ("g", {"input": {"p": 1}}, None),
        ("unknown", {"input": {"p": 1}}, None),
    ],
)
def test_arguments_that_stand_in_one_of_their_own_making(name, arguments, expected):
    stream, _ = checked(BYTES.encode(calls_block([call(name, arguments)])))
    [one] = stream.message()["tool_calls"]
    assert json.loads(one["function"]["arguments"]) == (arguments if expected is None else expected)


def test_a_stop_text_may_look_like_a_token():
    stream, added = streamed(BYTES.encode_plain("one <think> two"), stops=("k> t",))
    assert stream.message()["content"] == joined(added)["content"] == "one <thin"
    assert stream.finish == "stop"


def test_a_token_that_is_no_part_of_the_format_has_no_text(monkeypatch):
    monkeypatch.setitem(BYTES.special, 300, "<｜fim▁hole｜>")
    stream, added = streamed([*BYTES.encode("é")[:1], 300, *BYTES.encode("é")[1:], 301])
    assert stream.message()["content"] == joined(added)["content"] == "é⟨301⟩"


def test_a_token_does_not_leak_where_a_stop_text_splits_it():
    stream, _ = checked(BYTES.encode("so<｜User｜>y"), stops=("｜>x",))
    assert stream.message()["content"] == "soy"


def test_a_call_that_has_but_a_name_is_none():
    stream, _ = checked(BYTES.encode(BLOCK.partition("invoke name")[0] + 'invoke name="f">\n'))
    assert (stream.message()["tool_calls"], stream.open_call, stream.finish) == ([], 0, "stop")


def test_nothing_follows_the_end():
    """Where the end token does not end the answer: the message has nothing behind it."""
    stream, added = streamed([*BYTES.encode("so"), BYTES.eos_id, *BYTES.encode("more")], last="length")
    assert stream.message()["content"] == joined(added)["content"] == "so"


def test_an_answer_may_have_no_calls():
    stream, added = streamed(BYTES.encode(f"so{BLOCK}"), calls=False)
    assert joined(added) == {"content": "so", "reasoning_content": "", "tool_calls": []}
    assert (stream.message()["tool_calls"], stream.finish) == ([], "stop")


PARTS = [
    *SPECIAL, BLOCK, BLOCK, LAST, CALLS_OPEN, CALLS_CLOSE, *BLOCK.split("\n"), *BLOCK.splitlines(keepends=True), "a",
    "\n", "\n\n", " ", "<", "/", ">", f"<{DSML}", f"</{DSML}", EOS[:4], EOS[4:], THINK_END[:3], THINK_END[3:],
    THINK_END, THINK_END, "｜DS", "ML｜", f"<{DSML}toolcalls>\n",
]  # fmt: skip


def damaged(rng: Random) -> str:
    """A text of any parts, or an answer with some of it gone, replaced or cut off."""
    if rng.random() < 0.5:
        return "".join(rng.choices(PARTS, k=rng.randrange(9)))
    text = rng.choice(["why</think>", "", "why\n\n</think>\n", "x</think> so\n"])
    text += rng.choice([BLOCK, LAST, f"Hi {BLOCK}"])
    for _ in range(rng.randrange(3)):
        at, length = rng.randrange(len(text)), rng.choice([0, 1, 1, 3, 10, 40])
        text = text[:at] + rng.choice(["", rng.choice(PARTS)]) + text[at + length :]
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text


@pytest.mark.parametrize(("seed", "count"), [(0, 70), pytest.param(1, 10_000, marks=pytest.mark.slow)])
def test_whatever_a_model_writes(seed, count):
    rng = Random(seed)
    for _ in range(count):
        text, thinking, last = damaged(rng), rng.random() < 0.5, rng.choice(["stop", "stop", "length", None])
        stream, _ = checked(BYTES.encode(text), thinking=thinking, last=last)
        message = stream.message()
        for token in SPECIAL:
            assert token not in message["content"], text
            assert token not in message["reasoning_content"], text
