"""The input of a custom tool: the text of its JSON, however that is divided."""

import json
from random import Random

import pytest

from dsv4cli.engine.server.tool_input import ToolInput

TEXTS = ("", "a", 'x\n\\"\t\u2028\x01 {"input": "é😀"}', "\\" * 9, "\\u00e9 \\n")


def decoded(arguments, sizes):
    """The pieces and the whole of the input."""
    given, at, pieces = ToolInput(), 0, []
    while at < len(arguments):
        size = next(sizes)
        pieces.append(given.push(arguments[at : at + size]))
        at += size
    return [*pieces, given.finish()], given.text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_text_is_decoded_piece_by_piece(text, ascii_only):
    arguments, draw = json.dumps({"input": text}, ensure_ascii=ascii_only), Random(0)
    for most in (1, 3, 100):
        pieces, whole = decoded(arguments, iter(lambda most=most: draw.randint(1, most), None))
        assert ("".join(pieces), whole) == (text, text)
        assert all(one < "\ud800" or one > "\udfff" for piece in pieces for one in piece)  # no half of a pair
    pieces, _ = decoded(json.dumps({"input": "abc"}), iter(lambda: 1, None))
    assert [piece for piece in pieces if piece] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "a"}', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ("[1]", "[1]"),
        ('{"in', '{"in'),
    ],
)
def test_what_the_model_has_named_otherwise_is_still_an_input(arguments, expected):
    assert decoded(arguments, iter(lambda: 2, None))[1] == expected
