"""Generated conversations over /v1/responses: streamed = whole, ids unique, and every event of OpenAI's own types."""

import json
from functools import cache
from random import Random
from typing import get_args

import pytest

from dsv4cli.engine.text.tokens import DSML, THINK_END
from tests.support.program import calls_block
from tests.support.response_events import checked_response, without_ids
from tests.support.scripted_engine import scripted

CONVERSATIONS = 200
WORDS = ("Hello", " world", "\n\n", " é😀", '"quoted"', " \\n", "<b>", " 42.", " 中文", "}", "  ")
FUNCTION = {"type": "function", "name": "find", "description": "Find.", "strict": False, "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}  # fmt: skip
TOOLS = [
    FUNCTION,
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": ".*"}},
    {"type": "namespace", "name": "crm", "description": "C.", "tools": [FUNCTION, {"type": "custom", "name": "query"}]},
    {"type": "web_search"},
]
OUTPUTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}


def some_text(draw):
    return "".join(draw.choices(WORDS, k=draw.randint(1, 12)))


def some_calls(draw):
    def given(name):
        if name in ("patch", "crm__query"):
            return {"input": some_text(draw)}
        return {"text": some_text(draw), "n": draw.randint(0, 9)} if draw.random() < 0.8 else {}

    names = draw.choices(("find", "patch", "crm__find", "crm__query", "unknown"), k=draw.randint(1, 3))
    return calls_block([{"function": {"name": one, "arguments": json.dumps(given(one))}} for one in names])


def some_answer(draw, thinks):
    """Well formed, or damaged as a model damages it."""
    text = some_text(draw) * (draw.random() < 0.8) + some_calls(draw) * (draw.random() < 0.5)
    text = (some_text(draw) * (draw.random() < 0.9) + THINK_END) * thinks + text
    match draw.randint(0, 9):
        case 0:
            return text[: draw.randint(0, len(text))]
        case 1:
            return text.replace(f"</{DSML}parameter>", "", 1)
        case 2:
            return text + some_text(draw)
    return text


def some_fields(draw):
    fields = {"temperature": draw.choice((0, 0.5, 1)), "store": draw.random() < 0.7}
    if draw.random() < 0.7:
        fields |= {"tools": draw.sample(TOOLS, draw.randint(1, len(TOOLS)))}
        fields |= {"parallel_tool_calls": draw.random() < 0.7}
    if draw.random() < 0.3:
        fields |= {"tool_choice": draw.choice(("auto", "none"))}
    if draw.random() < 0.6:
        summary = draw.choice(({}, {"summary": "auto"}))
        fields |= {"reasoning": {"effort": draw.choice(("none", "high", "max"))} | summary}
    if draw.random() < 0.4:
        fields |= {"include": ["reasoning.encrypted_content"]}
    if draw.random() < 0.3:
        fields |= {"max_output_tokens": draw.randint(1, 40)}
    if draw.random() < 0.3:
        fields |= {"instructions": some_text(draw), "metadata": {"a": "b"}, "truncation": "auto", "user": "u"}
    return fields


def some_input(draw, outputs):
    """The next turn: results of all calls, or a question."""
    results = [{"type": OUTPUTS[one["type"]], "call_id": one["call_id"], "output": draw.choice((
        "done", [{"type": "input_text", "text": "done"}]))} for one in outputs if one["type"] in OUTPUTS]  # fmt: skip
    return results or [{"role": "user", "content": draw.choice((some_text(draw), [
        {"type": "input_text", "text": some_text(draw)}]))}]  # fmt: skip


def ids_of(response):
    return [response["id"], *(item["id"] for item in response["output"]),
            *(item["call_id"] for item in response["output"] if "call_id" in item)]  # fmt: skip


@cache
def adapter(name):
    """The type of an event of this name, or of a response."""
    pydantic, responses = pytest.importorskip("pydantic"), pytest.importorskip("openai.types.responses")
    if name == "response":
        return pydantic.TypeAdapter(responses.Response)
    events = get_args(get_args(responses.ResponseStreamEvent)[0])
    return next(pydantic.TypeAdapter(one) for one in events if name in get_args(one.model_fields["type"].annotation))


def check_type(name, value):
    """That a value is of OpenAI's type, without a field that the type does not have."""
    check_extra(adapter(name).validate_python(value, strict=True))


def check_extra(value):
    if isinstance(value, list):
        for one in value:
            check_extra(one)
    elif hasattr(value, "model_extra"):
        assert not value.model_extra, value
        for name in type(value).model_fields:
            check_extra(getattr(value, name))


def converse(server, say, draw, check):
    """One conversation of up to three turns. Each answer is asked for twice. All ids that were made."""
    fields = some_fields(draw)
    thinks = fields.get("reasoning", {}).get("effort", "none") != "none"
    turn, previous, made = [{"role": "user", "content": some_text(draw)}], {}, []
    for _ in range(draw.randint(1, 3)):
        say(some_answer(draw, thinks))
        body = {"model": "m", "input": turn, **previous, **fields}
        status, whole = server.post("/v1/responses", body)
        assert status == 200, whole
        events = server.stream("/v1/responses", body)
        cut = sum(name.endswith("item.added") for name, _ in events) > len(events[-1][1]["response"]["output"])
        response = checked_response(events, cut_call=cut)
        assert without_ids(response) == without_ids(whole)
        check("response", whole)
        for name, event in events:
            check(name, event)
        made += ids_of(whole) + ids_of(response)
        following = some_input(draw, response["output"])
        if fields["store"]:
            turn, previous = following, {"previous_response_id": response["id"]}
        else:
            turn = [*turn, *response["output"], *following]
    return made


def conversations(count, check):
    said, draw, made = [""], Random(40), []
    with scripted(lambda _: said[0]) as server:
        for _ in range(count):
            made += converse(server, lambda text: said.__setitem__(0, text), draw, check)
    assert len(made) == len({*made}) > 5 * count


def test_a_stream_says_what_a_document_says():
    conversations(5, lambda *_: None)


@pytest.mark.slow
def test_every_event_is_of_openais_types():
    adapter("response")
    conversations(CONVERSATIONS, check_type)


@pytest.mark.slow
def test_what_the_store_says_is_of_openais_types():
    pydantic, responses = pytest.importorskip("pydantic"), pytest.importorskip("openai.types.responses")
    call = {"call_id": "1", "name": "f"}
    given = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", **call, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"type": "custom_tool_call", **call, "input": "e"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "f"}]},
    ]
    with scripted(lambda _: "Yes.") as server:
        document = server.post("/v1/responses", {"input": given, "background": True})[1]
        check_type("response", document)
        listed = server.get(f"/v1/responses/{document['id']}/input_items?order=asc")[1]
        check_extra(pydantic.TypeAdapter(responses.ResponseItemList).validate_python(listed, strict=True))
        assert [item["type"] for item in listed["data"]] == [item.get("type", "message") for item in given]
        counted = server.post("/v1/responses/input_tokens", {"input": given})[1]
        check_extra(pydantic.TypeAdapter(responses.InputTokenCountResponse).validate_python(counted, strict=True))
