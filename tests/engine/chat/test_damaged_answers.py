"""Damaged tool calls: each is given out exactly as it is written or not at all, streamed and whole alike."""

import json
import re
from random import Random

import pytest

from dsv4cli.engine.text.tokens import DSML, THINK_END
from tests.engine.chat.test_answer_stream import checked
from tests.support.program import BYTES, calls_block
from tests.support.slow import slow

OPEN, CLOSE = f"\n\n<{DSML}tool_calls>\n", f"</{DSML}tool_calls>"
INVOKE, INVOKE_CLOSE = f'<{DSML}invoke name="f">\n', f"</{DSML}invoke>\n"
TEXT = f'<{DSML}parameter name="a" string="true">x\ny</{DSML}parameter>\n'
NUMBER = f'<{DSML}parameter name="n" string="false">3</{DSML}parameter>\n'
SECOND = f'<{DSML}invoke name="g">\n\n{INVOKE_CLOSE}'
WHOLE = f"{OPEN}{INVOKE}{TEXT}{NUMBER}{INVOKE_CLOSE}{SECOND}{CLOSE}"
F, G = ("f", {"a": "x\ny", "n": 3}), ("g", {})
TOOLS = [
    {"function": {"name": "f", "parameters": {"properties": {"a": {}, "n": {}}, "required": ["a", "n"]}}},
    {"function": {"name": "g", "parameters": {}}},
]


def changed(part: str, by: str, times: int = 1) -> str:
    assert part in WHOLE
    return WHOLE.replace(part, by, times)


def invoked(body: str) -> str:
    """One call of f with this between its tags."""
    return f"{OPEN}{INVOKE}{body}{INVOKE_CLOSE}{CLOSE}"


# what the model wrote, the content, the calls
DAMAGED = {
    "nothing": (WHOLE, "so", [F, G]),
    # blocks and tags without calls: text stays
    "empty block": (f"{OPEN}{CLOSE}\n\nText.", "so\n\nText.", []),
    "empty block on one line": (f"\n\n<{DSML}tool_calls>{CLOSE}Text.", "soText.", []),
    "empty block, then calls": (f"{OPEN}{CLOSE} Text.{WHOLE}", "so Text.", [F, G]),
    "two empty blocks": (f"{OPEN}{CLOSE} One.{OPEN}{CLOSE} Two.", "so One. Two.", []),
    "closed block": (f"{CLOSE} Text.", "so Text.", []),
    "closed call": (f"</{DSML}invoke> Text.", "so Text.", []),
    "closed parameter": (f" </{DSML}parameter>Text.", "so Text.", []),
    "unknown tag closed": (f"</{DSML}thing> Text.", "so Text.", []),
    "closed block, then calls": (f"{CLOSE} Text.{WHOLE}", "so Text.", [F, G]),
    "single mark": (f" {DSML} Text.", "so  Text.", []),
    "block without an end": (f"{OPEN}Text.", "so\nText.", []),
    "block with text": (f"{OPEN}Text.\n{CLOSE} More.", "so\nText.\n More.", []),
    "text behind calls": (f"{WHOLE} Text.", "so", [F, G]),
    "text behind a call that is left out": (f"{invoked('?')} Text.", "so Text.", []),
    # tags of the block
    "no block": (changed(OPEN, "\n\n"), "so", [F, G]),
    "block not closed": (changed(CLOSE, ""), "so", [F, G]),
    "block closed early": (changed(TEXT, TEXT + CLOSE), "so", []),
    "block named otherwise": (changed("tool_calls", "function_calls"), "so", [F, G]),
    "block without a mark": (changed(CLOSE, "</tool_calls>"), "so", [F, G]),
    "a second block": (WHOLE + WHOLE, "so", [F, G, F, G]),
    # tags of a call
    "call not closed": (changed(INVOKE_CLOSE, ""), "so", [F, G]),
    "call not closed, no arguments": (changed(TEXT + NUMBER + INVOKE_CLOSE, ""), "so", []),
    "call not closed, an argument lacks": (changed(NUMBER + INVOKE_CLOSE, ""), "so", []),
    "call closed early": (changed(TEXT, TEXT + INVOKE_CLOSE), "so", []),
    "call closed twice": (changed(INVOKE_CLOSE, INVOKE_CLOSE * 2), "so", [F, G]),
    "call opened twice": (changed(INVOKE, INVOKE * 2), "so", []),
    "call not opened": (changed(INVOKE, ""), "so", []),
    "call without a name": (changed(' name="f"', ""), "so", []),
    "call with an empty name": (changed('name="f"', 'name=""'), "so", []),
    "call with another attribute": (changed('name="f"', 'function="f"'), "so", []),
    "second call without a name": (changed(' name="g"', ""), "so", [F]),
    "call opened without a mark": (changed(INVOKE, '<invoke name="f">\n'), "so", [F, G]),
    "call closed without a mark": (changed(INVOKE_CLOSE, "</invoke>\n"), "so", [F, G]),
    "second call with half a tag": (changed(f'{DSML}invoke name="g"', f'{DSML} name="g"') + WHOLE, "so", [F]),
    "call misspelt": (changed(f"<{DSML}invoke", f"<{DSML}call"), "so", []),
    # bodies
    "JSON object": (invoked('{"a": "x\\ny", "n": 3}\n'), "so", [F]),
    "JSON object and a parameter": (invoked(f'{{"a": "x"}}\n{NUMBER}'), "so", []),
    "JSON object with a name twice": (invoked('{"a": 1, "a": 2}\n'), "so", []),
    "attribute twice": (changed('name="n"', 'name="n" name="n"'), "so", [F, G]),
    "attribute twice, otherwise": (changed('name="n"', 'name="m" name="n"'), "so", []),
    "JSON list": (invoked('["x", 3]\n'), "so", []),
    "half of a JSON object": (invoked('{"a": "x"\n'), "so", []),
    "text": (invoked("a = x\n"), "so", []),
    "text before a parameter": (changed(NUMBER, f"and {NUMBER}"), "so", []),
    "mark before a parameter": (changed(NUMBER, f"{DSML}{NUMBER}"), "so", []),
    # tags of a parameter
    "parameter opened without a mark": (changed(f'<{DSML}parameter name="n"', '<parameter name="n"'), "so", [F, G]),
    "parameter opened without a mark and type": (
        changed(f'<{DSML}parameter name="n" string="false">', '<parameter name="n">'), "so", [F, G]
    ),
    "parameter without any mark": (changed(NUMBER, '<parameter name="n">3</parameter>\n'), "so", [F, G]),
    "parameter closed without a mark": (changed(f"3</{DSML}parameter>", "3</parameter>"), "so", [F, G]),
    "text closed without a mark": (changed(f"y</{DSML}parameter>", "y</parameter>"), "so", []),
    "parameter without a type": (changed(' string="false"', ""), "so", [F, G]),
    "parameter without a name": (changed(' name="n"', ""), "so", []),
    "parameter with a tag that was closed early": (changed('"n"', '"n">'), "so", []),
    "parameter with half a tag": (changed(' string="false">', ' string="fal'), "so", []),
    "parameter not opened": (changed(f'<{DSML}parameter name="n" string="false">', ""), "so", []),
    "number not closed": (changed(f"3</{DSML}parameter>", "3"), "so", [F, G]),
    "text not closed": (changed(f"y</{DSML}parameter>", "y"), "so", []),
    "parameter closed twice": (changed(NUMBER, f"{NUMBER}</{DSML}parameter>\n"), "so", [F, G]),
    "parameter closed by a short name": (changed(f"3</{DSML}parameter>", f"3</{DSML}param>"), "so", [F, G]),
    "parameter twice": (changed('"n"', '"a"'), "so", []),
    "the same parameter twice": (changed(NUMBER, NUMBER * 2), "so", [F, G]),
    "mark in a name": (changed('"n"', f'"n{DSML}"'), "so", []),
    "mark in a value": (changed("x\ny", f"x{DSML}y"), "so", []),
    "mark at the end of a value": (changed("3<", f"3{DSML}<"), "so", [F, G]),
    "tag in a value": (changed("x\ny", f"x\n<{DSML}b>y"), "so", []),
    "two values in one": (changed("3<", '3, "m": 4<'), "so", [("f", {"a": "x\ny", "n": '3, "m": 4'}), G]),
    "parameter behind the block": (WHOLE + NUMBER, "so", [F, G]),
    "parameter before its call": (changed(INVOKE + TEXT, TEXT + INVOKE), "so", []),
    "parameter behind the last call": (changed(f"{CLOSE}", NUMBER + CLOSE), "so", [F]),
    # no damage: markup without marks is text inside of a value
    "value like a tag": (changed("x\ny", "</parameter>\n"), "so", [("f", {"a": "</parameter>\n", "n": 3}), G]),
    "arguments that the function requires": (changed(NUMBER, ""), "so", [("f", {"a": "x\ny"}), G]),  # as written
}  # fmt: skip


SOUND = [DAMAGED[name][0] for name in ("nothing", "value like a tag", "arguments that the function requires")]


@pytest.mark.parametrize(("text", "content", "calls"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_made_of_damage(text, content, calls):
    stream, _ = checked(BYTES.encode(f"so{text}"), tools=TOOLS)
    message = stream.message()
    found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert (message["content"], found) == (content, calls)
    assert stream.finish == ("tool_calls" if calls else "stop")
    assert bool(stream.repairs) == (text not in SOUND)


def test_the_text_behind_an_empty_block_comes_at_once():
    _, added = checked(BYTES.encode(f"so{OPEN}{CLOSE} Text."))
    texts = ["".join(delta.text for delta in deltas) for deltas in added]
    assert texts[-7:-2] == [" T", "e", "x", "t", "."]


def test_calls_behind_a_closing_tag_come_before_the_end():
    _, added = checked(BYTES.encode(f"so{CLOSE} Text.{OPEN}{CLOSE}{WHOLE}"))
    assert not added[-2]


@pytest.mark.parametrize("every", [5, *slow(1)])
def test_a_call_that_was_cut_off_has_no_closing_brace(every):
    """A client that takes what has come for JSON must not be able to carry it out."""
    for cut in range(0, len(WHOLE), every):
        _, added = checked(BYTES.encode(f"so{WHOLE[:cut]}"), last="length", tools=TOOLS)
        given = "".join(delta.text for deltas in added for delta in deltas if delta.index == 0)
        assert ("}" in given) == (f"</{DSML}invoke" in WHOLE[:cut])


CALLS = [
    ("f", {"text": 'two\nlines, "quoted"', "list": [1, {"k": None}], "yes": True}),
    ("g", {}),
    ("h", {"path": "/a/b", "count": 12}),
]
BLOCK = calls_block(
    [{"type": "function", "function": {"name": name, "arguments": json.dumps(given)}} for name, given in CALLS]
)
REQUIRED = [
    {"function": {"name": name, "parameters": {"properties": given, "required": [*given]}}} for name, given in CALLS
]
# tags, their parts, and the values between them, which stay whole
PARTS = re.findall(rf'<|/?{DSML}|tool_calls|invoke|parameter| \w+="\w+"|>\n?|\n+|[^<>\n]+(?:\n[^<>\n]+)*', BLOCK)
VALUES = {str(value) if isinstance(value, str) else json.dumps(value) for _, given in CALLS for value in given.values()}
# what may change and leaves each value as it is
MARKUP = [at for at in range(2, len(PARTS) - 1) if not {*PARTS[at - 2 : at + 2]} & VALUES]
TAGS = re.findall(rf"</?{DSML}[^>]*>\n?", BLOCK)


def damaged(rng: Random) -> str:
    """The block with one part of its markup gone, doubled, moved, or with something in front of it; perhaps cut off."""
    parts = list(PARTS)
    at, to = rng.choice(MARKUP), rng.choice(MARKUP)
    match rng.randrange(5):
        case 0:
            parts[rng.choice([at for at, part in enumerate(parts) if part not in VALUES])] = ""
        case 1:
            parts[at] *= 2
        case 2:
            parts[at] = rng.choice(["x", " ", "\n", "<", f"{DSML}", f"</{DSML}", *TAGS[-2:]])
        case 3:
            parts[at] += rng.choice(["x", " and ", "{}", "<", DSML, f"<{DSML}b>", TAGS[-1], "</parameter>"])
        case 4:
            part, parts[at] = parts[at], ""
            parts[to] = part + parts[to]
    text = "".join(parts)
    return text[: rng.randrange(len(text))] if rng.random() < 0.2 else text


@pytest.mark.parametrize(("seed", "count"), [(0, 60), pytest.param(1, 3_000, marks=pytest.mark.slow)])
def test_a_call_is_whole_or_absent(seed, count):
    rng = Random(seed)
    assert "".join(PARTS) == BLOCK
    assert {part for part in PARTS if part in VALUES} == VALUES
    for _ in range(count):
        text, last = damaged(rng), rng.choice(["stop", "length", None])
        before = rng.choice(["", "so", f"why{THINK_END}so"])
        stream, _ = checked(BYTES.encode(before + text), thinking=THINK_END in before, last=last, tools=REQUIRED)
        message = stream.message()
        found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
        assert found == [one for one in CALLS if one in found], text
        assert DSML not in message["content"] + message["reasoning_content"], text
