"""POST /v1/messages over the wire, as Anthropic has it: blocks, events and their order, results, what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsv4cli.engine.chat.answer_stream import Delta
from dsv4cli.engine.server import messages
from dsv4cli.engine.server.messages import MessageBlocks

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
    }
]
WEATHER = "What is the weather in Paris?"
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def asking(content, **fields):
    return {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": content}], **fields}


def answered(nano, content, **fields):
    status, document = nano.post("/v1/messages", asking(content, **fields))
    assert status == 200, document
    return document


def test_an_answer_is_a_message(nano):
    document = answered(nano, SUM)
    assert document.pop("id").startswith("msg_")
    assert document == {
        "type": "message",
        "role": "assistant",
        "model": "nano",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 14 - (cached := document["usage"]["cache_read_input_tokens"]),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 12,
        },
    }


@pytest.mark.slow
def test_thinking_is_a_block_of_its_own_where_it_was_asked_for(nano):
    thinking, text = answered(nano, SUM, **THINKING)["content"]
    assert (thinking["type"], text) == ("thinking", {"type": "text", "text": ANSWER})
    assert thinking["thinking"]
    assert thinking["signature"]
    assert [block["type"] for block in answered(nano, SUM, thinking={"type": "disabled"})["content"]] == ["text"]


def test_thinking_that_the_server_wants_is_not_shown_to_who_has_not_asked(nano, monkeypatch):
    app = nano.server.config.app
    usual = replace(app.service.defaults, think="high")
    monkeypatch.setattr(app, "service", replace(app.service, defaults=usual))
    document = answered(nano, SUM)
    assert document["content"] == [{"type": "text", "text": ANSWER}]
    assert document["usage"]["output_tokens"] > 12
    events = nano.stream("/v1/messages", asking(SUM))
    assert {data["delta"]["type"] for name, data in events if name == "content_block_delta"} == {"text_delta"}


def test_events_come_in_anthropics_order(nano):
    document = answered(nano, SUM, **THINKING)
    events = nano.stream("/v1/messages", asking(SUM, **THINKING))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    blocks = [(data["index"], data["content_block"]["type"]) for name, data in events if name == "content_block_start"]
    assert blocks == [(0, "thinking"), (1, "text")]
    deltas = [(data["index"], data["delta"]) for name, data in events if name == "content_block_delta"]
    thought = "".join(delta.get("thinking", "") for index, delta in deltas if index == 0)
    assert thought == document["content"][0]["thinking"]
    assert [delta["type"] for index, delta in deltas if index == 0][-1] == "signature_delta"
    assert "".join(delta["text"] for index, delta in deltas if index == 1) == ANSWER
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == document["usage"]["output_tokens"]


@pytest.mark.slow
def test_a_call_and_its_result(nano):
    document = answered(nano, WEATHER, tools=TOOLS)
    call = document["content"][-1]
    assert (call["type"], call["name"], call["input"]["city"]) == ("tool_use", "get_weather", "Paris")
    assert document["stop_reason"] == "tool_use"
    events = nano.stream("/v1/messages", asking(WEATHER, tools=TOOLS))
    begun = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert begun[-1]["name"] == "get_weather"
    parts = [data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta"]
    assert json.loads("".join(parts)) == call["input"]
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": '{"temperature": 21}'}],
    }
    body = asking(WEATHER, tools=TOOLS)
    body["messages"] += [{"role": "assistant", "content": document["content"]}, {"role": "user", "content": [result]}]
    status, document = nano.post("/v1/messages", body)
    assert status == 200
    assert "21" in document["content"][0]["text"]


def test_of_a_result_that_is_no_text_there_is_a_note(nano):
    """One picture in a conversation must not have all that follows refused."""
    parts = [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "http://x"}}]
    asked = asking(SUM)["messages"]
    blocks = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": parts}]}]
    noted = "a\n\n[Unsupported image]"
    same = {"messages": [*asked, {"role": "tool", "tool_call_id": "1", "content": noted}]}
    status, counted = nano.post("/v1/messages/count_tokens", {"messages": asked + blocks})
    assert status == 200
    assert counted["input_tokens"] == nano.post("/tokenize", same)[1]["count"]
    parts[0] = {"type": "text"}
    status, document = nano.post("/v1/messages/count_tokens", {"messages": asked + blocks})
    assert (status, "messages[1].content[0].content[0].text" in document["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("arguments", "given"), [('{"a": 1}', {"a": 1}), ("[1]", {"arguments": [1]}), ("{", {"arguments": "{"})]
)
def test_what_a_tool_is_given_is_an_object(arguments, given):
    assert messages._input(arguments) == given


@pytest.mark.slow
def test_which_tools_may_be_called(nano):
    required = answered(nano, SUM, tools=TOOLS, tool_choice={"type": "any"})
    assert [block["type"] for block in required["content"]] == ["tool_use"]
    named = answered(nano, SUM, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
    assert named["content"][0]["name"] == "get_weather"
    none = answered(nano, WEATHER, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=8)
    assert [block["type"] for block in none["content"]] == ["text"]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["Always end with 'over'.", [{"type": "text", "text": "Always end with 'over'."}]])
def test_a_system_prompt(nano, system):
    [block] = answered(nano, "What is the capital of Italy?", system=system)["content"]
    assert block["text"] == "The capital of Italy is Rome. over"


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("rest", ["\n\nBe kind: yes=no;\n\nRule 2.", "You are kind.", ""])
def test_claude_codes_billing_line_is_no_part_of_the_prompt(nano, rest):
    def prompt(system):
        return nano.post("/v1/messages/count_tokens", asking(SUM, system=system))[1]["input_tokens"]

    blocks = [{"type": "text", "text": text} for text in (BILLING.format("36ee5"), rest.strip())]
    assert prompt(BILLING.format("0aaa9") + rest) == prompt(rest.strip())
    assert prompt(blocks) == prompt(rest.strip())


def test_a_billing_line_elsewhere_is_text(nano):
    """Only the client's own first line is left out."""
    body = asking(SUM, system=f"Explain this:\n{BILLING.format(1)}")
    shorter = asking(SUM, system="Explain this:")
    counts = [nano.post("/v1/messages/count_tokens", one)[1]["input_tokens"] for one in (body, shorter)]
    assert counts[0] > counts[1] + 10


def test_requests_that_differ_in_the_billing_line_share_their_prefix(nano):
    rules = " ".join(f"Rule {number}: name the source." for number in range(40))
    usages = []
    for nonce in ("36ee5", "0aaa9"):
        system = [{"type": "text", "text": text} for text in (BILLING.format(nonce), rules)]
        usages.append(answered(nano, SUM, system=system, max_tokens=1)["usage"])
        counted = nano.post("/v1/messages/count_tokens", asking(SUM, system=system))[1]["input_tokens"]
    assert usages[1]["cache_read_input_tokens"] > 0.9 * usages[0]["input_tokens"]
    # a token of the prompt counts as new or as cached, not as both
    sums = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    assert sums[0] == sums[1] == counted


def test_parallel_calls_are_blocks_of_their_own():
    blocks = MessageBlocks(SimpleNamespace(tool_id=lambda nth: f"id{nth}"))
    deltas = [("call", "", 0, "f"), ("call", "{}", 0), ("call", "", 1, "g"), ("call", "{}", 1)]
    events = [event for delta in deltas for event in blocks.take(Delta(*delta))] + blocks.close()
    said = [json.loads(event.partition(b"data: ")[2]) for event in events]
    begun = [(one["index"], one["content_block"]["id"]) for one in said if one["type"] == "content_block_start"]
    assert begun == [(0, "id0"), (1, "id1")]
    assert [one["index"] for one in said if one["type"] == "content_block_delta"] == [0, 0, 1, 1]
    assert [one["index"] for one in said if one["type"] == "content_block_stop"] == [0, 1]


@pytest.mark.slow
def test_why_an_answer_has_ended(nano):
    stopped = answered(nano, SUM, stop_sequences=["xyz", " = 4"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " = 4")
    assert stopped["content"] == [{"type": "text", "text": "17 + 25"}]
    assert answered(nano, SUM, max_tokens=2)["stop_reason"] == "max_tokens"


def test_the_same_prompt_as_openai_s(nano):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": WEATHER},
    ]
    functions = [
        {
            "type": "function",
            "function": {"name": one["name"], "description": one["description"], "parameters": one["input_schema"]},
        }
        for one in TOOLS
    ]
    asked = {"messages": turns, "system": "Be brief.", "tools": TOOLS, **THINKING}
    same = {
        "messages": [{"role": "system", "content": "Be brief."}, *turns],
        "tools": functions,
        "reasoning_effort": "high",
    }
    status, counted = nano.post("/v1/messages/count_tokens", asked)
    assert status == 200
    assert counted["input_tokens"] == nano.post("/tokenize", same)[1]["count"]


def test_answers_in_a_row_are_one(nano):
    """As Anthropic has it; a client may send each block of one as a message of its own."""
    blocks = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "text", "text": "b"},
        *({"type": "tool_use", "id": one, "name": "get_weather", "input": {"city": one}} for one in "cd"),
    ]
    results = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one, "content": one} for one in "dc"]}
    ]

    def tokens(*answers):
        messages = [*asking(WEATHER)["messages"], *({"role": "assistant", "content": one} for one in answers), *results]
        return nano.post("/v1/messages/count_tokens", {"messages": messages, "tools": TOOLS, **THINKING})[1][
            "input_tokens"
        ]

    assert tokens(*([block] for block in blocks)) == tokens(blocks)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected a text"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: expected a text"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: expected user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"system": 1}, "system: expected a text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "output_config.format: the schema at #",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_anthropics_shape(nano, fields, reason):
    status, document = nano.post("/v1/messages", asking("Hi") | fields)
    assert status == 400
    assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in document["error"]["message"]
