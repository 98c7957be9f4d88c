"""Replies that the strict parser refuses: what is made of them, and what never is."""

import json
from random import Random
from time import thread_time

import pytest

from dsv4cli.engine.text.prompt_text import CALLS_OPEN
from dsv4cli.engine.text.repair import repair_reply
from dsv4cli.engine.text.reply import ParsedReply, ReplyStream, parse_reply
from dsv4cli.engine.text.tokens import DSML, EOS, SPECIAL, THINK_END, THINK_START
from tests.support.program import calls_block
from tests.support.slow import slow


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


FIRST, SECOND = call("f", {"a": "x\ny", "n": 3}), call("g", {})
BLOCK = calls_block([FIRST, SECOND])
INVOKE_END, CALLS_END = f"</{DSML}invoke>\n", f"</{DSML}tool_calls>"


def without(text, part):
    assert part in text
    return text.replace(part, "", 1)


UNENDED = without(BLOCK, CALLS_END)


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning", "calls"),
    [
        (f"so{EOS}", False, "so", "", []),
        (f"why{THINK_END}so", True, "so", "why", []),  # cut off, which is no fault
        (f"why{THINK_END}so{BLOCK}{EOS}", True, "so", "why", [FIRST, SECOND]),
        (f"so{BLOCK}", False, "so", "", [FIRST, SECOND]),
    ],
)
def test_what_is_well_formed_is_read_strictly(text, thinking, content, reasoning, calls):
    assert repair_reply(text, thinking=thinking) == (ParsedReply(content, reasoning, calls), [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "words"),
    [
        (f"why{EOS}", "", "why", [], "the thinking was not finished"),
        (f"why{BLOCK}{EOS}", "", "why", [FIRST, SECOND], f"{THINK_END} was missing"),
        (
            f"why{BLOCK}\n{THINK_END}\n{EOS}",
            "",
            "why",
            [FIRST, SECOND],
            f"{THINK_END} was missing before the tool calls",
        ),
        (f"a{BLOCK}b{THINK_END}so{EOS}", "so", "a", [], "markup of tool calls inside the thinking was left out"),
        (f"{THINK_START}why{THINK_END}so{EOS}", "so", "why", [], f"the token {THINK_START} was left out of the reas"),
        (f"why{THINK_END}so{THINK_END}{EOS}", "so", "why", [], f"the token {THINK_END} was left out of the content"),
        (f"why{THINK_END}so{EOS}{EOS}", "so", "why", [], "text after the end of the reply was left out"),
        (f"</thi{EOS}nk>", "", "</thi", [], "text after the end"),
    ],
)
def test_thinking(text, content, reasoning, calls, words):
    reply, repairs = repair_reply(text, thinking=True)
    assert reply == ParsedReply(content, reasoning, calls)
    assert words in repairs[0]


@pytest.mark.parametrize(
    ("block", "calls", "words"),
    [
        (without(BLOCK, CALLS_END), [FIRST, SECOND], ["the tool calls were not well formed"]),
        (BLOCK.lstrip(), [FIRST, SECOND], ["the tool calls were not well formed"]),
        (without(BLOCK, INVOKE_END), [FIRST, SECOND], ["the call of f was not closed"]),
        (BLOCK.replace(f"3</{DSML}parameter>", "3"), [FIRST, SECOND], ["the parameter n was not closed"]),
        (without(BLOCK, ' string="false"'), [FIRST, SECOND], ["the parameter n did not say whether it is text"]),
        (without(BLOCK, ' name="g"'), [FIRST], ["a tool call without a name was left out"]),
        (
            without(BLOCK, ' name="n"'),
            [],
            ["the call of f has a parameter without a name", "the call of g was left out"],
        ),
        (without(BLOCK, f"{CALLS_OPEN}>"), [FIRST, SECOND], ["the tool calls were not well formed"]),
        (
            BLOCK.replace('"n"', '"a"'),
            [],
            ["the call of f has the parameter a twice", "the call of g was left out"],
        ),
        (f"\n\n<{DSML}tool_calls>", [], ["markup of tool calls without a call was left out"]),
        (f" {DSML} ", [], ["markup of tool calls without a call was left out"]),
        (
            UNENDED.replace("x\ny", f"x\ny\n</{DSML}param>z"),
            [],
            ["the call of f has text that belongs to no parameter", "the call of g was left out"],
        ),
        (UNENDED.replace(">3<", f">3{DSML}<"), [FIRST, SECOND], ["markup inside the parameter n was left out"]),
        (UNENDED.replace('"g"', f'"g{DSML}"'), [FIRST], ["a tool call without a name was left out"]),
        (
            UNENDED.replace('"n"', f'"n{DSML}"'),
            [],
            ["the call of f has a parameter without a name", "the call of g was left out"],
        ),
    ],
)
def test_calls(block, calls, words):
    reply, repairs = repair_reply(f"so{block}{EOS}", thinking=False)
    assert (reply.content, arguments(reply.tool_calls)) == ("so", arguments(calls))
    assert len(repairs) == len(words)
    assert all(found.startswith(given) for found, given in zip(repairs, words, strict=True))


def arguments(calls):
    """Names and values; a value that was not closed ends with its line."""
    read = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
    return [(name, {key: str(value).rstrip("\n") for key, value in values.items()}) for name, values in read]


def test_a_call_that_was_cut_off_is_left_out_wherever_that_is():
    for cut in range(len(BLOCK)):
        reply, repairs = repair_reply(f"so{BLOCK[:cut]}", thinking=False)
        assert reply.tool_calls == [FIRST, SECOND][: len(reply.tool_calls)]
        if DSML in BLOCK[:cut]:
            assert reply.content == "so"
            # behind these the official parser, which is the strict one, sees no more to read
            assert repairs or BLOCK[:cut].endswith((CALLS_OPEN, INVOKE_END[:-2]))
        whole = BLOCK[:cut].count(INVOKE_END[:-2])
        assert len(reply.tool_calls) in (whole, max(0, whole - 1))


@pytest.mark.parametrize("count", [300, *slow(1500)])
def test_nothing_that_a_model_may_write_leaks_or_fails(count):
    rng = Random(0)
    parts = [*SPECIAL, CALLS_OPEN, BLOCK, BLOCK[:40], BLOCK[30:], CALLS_END, INVOKE_END, *BLOCK.split("\n")]
    parts += ["a", "\n", "<"]
    parts += [f"<{DSML}", f"</{DSML}", EOS[:4], EOS[4:], THINK_END[:3], THINK_END[3:]]
    for _ in range(count):
        text, thinking = "".join(rng.choices(parts, k=rng.randrange(9))), rng.random() < 0.5
        reply, repairs = repair_reply(text, thinking=thinking)
        for token in SPECIAL:
            assert token not in reply.content + reply.reasoning_content or not repairs
        assert DSML not in reply.content + reply.reasoning_content
        assert DSML not in json.dumps(reply.tool_calls, ensure_ascii=False) or not repairs
        stream = ReplyStream(thinking)
        pieces = [piece for one in text for piece in stream.push(one)] + stream.flush()
        for kind in ("reasoning", "content"):
            assert DSML not in "".join(part for found, part in pieces if found == kind)
        if not repairs:
            end = "" if EOS in text or text.endswith(CALLS_OPEN) or reply.tool_calls else EOS
            assert parse_reply(text + end, thinking=thinking) == reply
        elif reply.tool_calls:
            assert all(isinstance(json.loads(one["function"]["arguments"]), dict) for one in reply.tool_calls)


def test_a_long_reply_takes_as_long_a_character_as_a_short_one():
    """Repairing holds up all other requests of a server, so its time must not grow with the square of the length."""

    def seconds(length):
        content, start = "中" * length, thread_time()
        reply, words = repair_reply(f"{content}<｜User｜>{EOS}", thinking=False)
        used = thread_time() - start
        assert (reply.content, len(words)) == (content, 1)
        return used

    # CPU time of this thread for 8 times the text: 8 times as much, or 64 times where it is quadratic
    assert min(seconds(320_000) for _ in range(2)) < 24 * min(seconds(40_000) for _ in range(4))
