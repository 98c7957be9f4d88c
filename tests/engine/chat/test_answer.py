"""One answer as it arrives: what is certain when, stop strings, and how it is read at the end."""

from itertools import groupby

import pytest

from dsv4cli.engine.chat.answer import Answer
from dsv4cli.engine.runtime.request import Token
from dsv4cli.engine.text.prompt_text import CALLS_OPEN
from tests.support.program import BYTES, calls_block

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}


def answer_to(text: str, *, thinking: bool = False, stops: tuple[str, ...] = (), last: str = "stop"):
    """The finished answer and its pieces, joined by kind; tokens are bytes, `last` is why the model ends."""
    ids = BYTES.encode(text)
    if last == "stop":
        ids.append(BYTES.eos_id)
    answer, pieces = Answer(BYTES, thinking, stops), []
    for number, token in enumerate(ids, 1):
        pieces += answer.push(Token(token, -0.5, [(token, -0.5)], last if number == len(ids) else None))
        if answer.finish:
            break
    return answer, [(kind, "".join(part for _, part in run)) for kind, run in groupby(pieces, lambda piece: piece[0])]


@pytest.mark.parametrize("last", ["stop", "length"])
@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("", False, "", ""),
        ("plain €😀", False, "", "plain €😀"),
        ("a</think>b", True, "a", "b"),
        ("</think>b", True, "", "b"),
        ("a</think>", True, "a", ""),
    ],
)
def test_what_comes_in_pieces_is_what_is_recorded(text, thinking, reasoning, content, last):
    if not text and last == "length":
        return  # an answer has a token
    answer, pieces = answer_to(text, thinking=thinking, last=last)
    record = answer.record()
    assert list(record) == ["content", "reasoning_content", "tool_calls", "ids", "finish_reason"]
    assert (record["reasoning_content"], record["content"]) == (reasoning, content)
    assert record["finish_reason"] == answer.finish == last
    assert record["ids"] == BYTES.encode(text) + [BYTES.eos_id] * (last == "stop")
    assert pieces == [piece for piece in (("reasoning", reasoning), ("content", content)) if piece[1]]
    assert answer.complaint == ""


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("abcabd", ("abd",), 3),
        ("a€b", ("€",), 1),  # none of the three bytes that it is made of
        ("a€b", ("b",), 4),
        ("ab", ("a",), 0),
        ("ab", ("abc",), 3),  # with the end token
        ("ab", (), 3),
    ],
)
def test_the_tokens_of_the_text_before_a_stop_string(text, stops, shown):
    answer, _ = answer_to(text, stops=stops)
    assert answer.shown == shown


def test_a_token_is_shown_with_its_text():
    """What may be the beginning of a stop string, and a character that is not whole, are held back."""
    answer, shown = Answer(BYTES, False, ("bcd",)), []
    for token in BYTES.encode("abce€"):
        answer.push(Token(token, 0.0, [], None))
        shown.append(answer.shown)
    assert shown == [1, 1, 1, 4, 4, 4, 7]


@pytest.mark.parametrize(
    ("text", "stops", "content"),
    [
        ("abcabd", ("abd",), "abc"),
        ("aaab", ("aab",), "a"),
        ("one two", ("two", "one t"), ""),  # the earliest end counts, and there the earliest beginning
        ("a€b", ("€",), "a"),
        ("ab", ("abc",), "ab"),
        ("ab", ("x", "b"), "a"),
        ("end", ("<", "▁of▁", "<｜end▁of▁sentence｜>"), "end"),  # the end token is no text
        ("a<b", ("<",), "a"),
        ("", ("a",), ""),
    ],
)
def test_stop_strings(text, stops, content):
    answer, pieces = answer_to(text, stops=stops)
    assert (answer.record()["content"], answer.finish) == (content, "stop")
    assert pieces == ([("content", content)] if content else [])


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        (">", "a", "b"),
        (">c", "a", "b"),
        ("k>b", "a", "b>c"),
        ("a</", "a", "b>c"),
        ("think", "a", "b>c"),
        ("</think>", "a", ""),
        ("a</think>b", "", ""),
    ],
)
def test_a_stop_string_takes_the_end_of_thinking_as_a_whole(stop, reasoning, content):
    answer, pieces = answer_to("a</think>b>c", thinking=True, stops=(stop,))
    record = answer.record()
    assert (record["reasoning_content"], record["content"]) == (reasoning, content)
    assert pieces == [piece for piece in (("reasoning", reasoning), ("content", content)) if piece[1]]


def test_a_stop_string_in_one_token_ends_in_its_middle():
    answer = Answer(BYTES, False, ("think",))
    assert answer.push(Token(BYTES.encode("<think>")[0], -0.5, [], None)) == [("content", "<")]
    assert answer.finish == "stop"


def test_text_is_shown_as_soon_as_it_is_certain():
    answer = Answer(BYTES, False, ("abd", "bx"))
    shown = [answer.push(Token(byte + 3, -0.5, [], None)) for byte in "xabcab€".encode()]
    texts = ["".join(text for _, text in pieces) for pieces in shown]
    assert texts == ["x", "", "", "abc", "", "", "", "", "ab€"]


def test_half_a_character_at_the_end_is_shown_as_such():
    answer = Answer(BYTES, False)
    assert answer.push(Token(0xE2 + 3, -0.5, [], None)) == []
    assert answer.push(Token(0x82 + 3, -0.5, [], "length")) == [("content", "\ufffd")]
    assert answer.record()["content"] == "\ufffd"


def test_calls():
    answer, pieces = answer_to("hm" + calls_block([CALL]))
    assert (answer.finish, answer.complaint) == ("tool_calls", "")
    assert (answer.record()["content"], answer.record()["tool_calls"]) == ("hm", [CALL])
    assert [kind for kind, _ in pieces] == ["content", "calls"]


@pytest.mark.parametrize(
    ("text", "thinking", "last", "finish", "content", "complaint"),
    [
        (f"hm{CALLS_OPEN}>\nx", False, "stop", "stop", f"hm{CALLS_OPEN}>\nx", "ends without"),
        (f"hm{CALLS_OPEN}>\nx", False, "length", "length", f"hm{CALLS_OPEN}>\nx", ""),
        ("only thoughts", True, "stop", "stop", "", "ends without </think>"),
        ("a<think>b", False, "stop", "stop", "a<think>b", "contains the token <think>"),
    ],
)
def test_an_answer_that_the_strict_parser_refuses_stays_text(text, thinking, last, finish, content, complaint):
    answer, pieces = answer_to(text, thinking=thinking, last=last)
    assert (answer.finish, answer.record()["content"], answer.record()["tool_calls"]) == (finish, content, [])
    assert complaint in answer.complaint
    assert bool(complaint) == bool(answer.complaint)
    assert "".join(part for _, part in pieces) == text


def test_a_stop_string_inside_calls_leaves_text():
    text = "hm" + calls_block([CALL])
    answer, _ = answer_to(text, stops=('"b"',))
    stopped, _ = answer_to(text, stops=("invoke name",))
    assert answer.finish == "tool_calls"  # not in the text as the model writes it
    assert (stopped.finish, stopped.record()["tool_calls"]) == ("stop", [])
    assert stopped.record()["content"] == text.partition("invoke name")[0]


def test_logprobs():
    answer, _ = answer_to("a")
    assert answer.logprobs() == [
        {"id": id, "logprob": -0.5, "top": [[id, -0.5]]} for id in (ord("a") + 3, BYTES.eos_id)
    ]
