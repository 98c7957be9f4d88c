"""Fields and history items of other servers: obeyed, turned into text, or refused, never ignored."""

import json

import pytest

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.foreign_blocks import document_text, foreign_note
from dsv4cli.engine.server.openai_history import openai_messages
from tests.support.serving import asking
from tests.support.slow import slow, slow_rows

SUM = "What is 17 + 25?"
WEATHER = "What is the weather in Paris?"
FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
BODIES = {
    CHAT: asking(SUM),
    COMPLETIONS: {"prompt": "17 + 25 =", "temperature": 0, "max_tokens": 12},
    MESSAGES: asking(SUM, max_tokens=30),
    RESPONSES: {"input": SUM, "temperature": 0},
}


def text_of(nano, path: str, **fields) -> str:
    status, document = nano.post(path, BODIES[path] | fields)
    assert status == 200, document
    if path == RESPONSES:
        return document["output"][0]["content"][0]["text"]
    if path == COMPLETIONS:
        return document["choices"][0]["text"]
    return document["choices"][0]["message"]["content"] if path == CHAT else document["content"][0]["text"]


SCHEMA = {"enum": ["yes", "no"]}
FORMS = [
    ({"guided_regex": "[0-9]{3}!"}, lambda text: text[:3].isdigit() and text[3:] == "!"),
    *slow_rows(
        ({"guided_json": SCHEMA}, lambda text: json.loads(text) in ("yes", "no")),
        ({"guided_json": json.dumps(SCHEMA)}, lambda text: json.loads(text) in ("yes", "no")),
        ({"guided_grammar": 'start: "a" | "bc/d"'}, lambda text: text in ("a", "bc/d")),
        ({"structured_outputs": {"choice": ["to be", "not"]}}, lambda text: text in ("to be", "not")),
    ),
    ({"guided_choice": ["a.b (c/d)", "x^2 $|\\{}"]}, lambda text: text in ("a.b (c/d)", "x^2 $|\\{}")),
]


@pytest.mark.parametrize("path", [CHAT, *slow(COMPLETIONS, RESPONSES)])
@pytest.mark.parametrize(("fields", "holds"), FORMS)
def test_guided_fields_are_obeyed(nano, path, fields, holds):
    assert holds(text_of(nano, path, **fields, guided_decoding_backend="auto"))


def test_the_older_output_format_is_obeyed(nano):
    form = {"type": "json_schema", "schema": SCHEMA}
    assert json.loads(text_of(nano, MESSAGES, output_format=form)) in ("yes", "no")
    assert json.loads(text_of(nano, MESSAGES, output_format=form, output_config={"format": form})) in ("yes", "no")


def test_functions_are_tools_in_the_older_form(nano):
    choice = nano.chat(WEATHER, functions=[FUNCTION])["choices"][0]
    call = choice["message"]["function_call"]
    assert (choice["finish_reason"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"])["city"] == "Paris"
    assert "tool_calls" not in choice["message"]


@pytest.mark.slow  # test_chat_completions.py streams a call
def test_functions_are_streamed_in_the_older_form(nano):
    call = nano.chat(WEATHER, functions=[FUNCTION])["choices"][0]["message"]["function_call"]
    events = nano.stream(CHAT, asking(WEATHER, functions=[FUNCTION]))
    deltas = [data["choices"][0] for _, data in events[:-1]]
    parts = [one["delta"]["function_call"] for one in deltas if "function_call" in one["delta"]]
    assert parts[0]["name"] == "get_weather"
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert deltas[-1]["finish_reason"] == "function_call"


@pytest.mark.slow  # test_functions_are_tools_in_the_older_form has a call
def test_a_function_call_may_be_required_or_forbidden(nano):
    required = nano.chat(SUM, functions=[FUNCTION], function_call={"name": "get_weather"})["choices"][0]
    assert required["message"]["function_call"]["name"] == "get_weather"
    forbidden = nano.chat(WEATHER, functions=[FUNCTION], function_call="none", max_tokens=20)["choices"][0]
    assert "function_call" not in forbidden["message"]


def test_a_result_of_a_function_is_that_of_a_tool(nano):
    call = {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}
    older = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": '{"temperature": 21}'},
    ]
    newer = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 21}'},
    ]
    question = {"role": "user", "content": WEATHER}
    bodies = [
        {"messages": [question, *older], "functions": [FUNCTION]},
        {"messages": [question, *newer], "tools": TOOLS},
    ]
    first, second = (nano.post(CHAT, body | {"temperature": 0, "max_tokens": 8})[1] for body in bodies)
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


REFUSED = [
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "alloy"}}, "audio", "text only"),
    ({"web_search_options": {}}, "web_search_options", "searches nothing"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "no MCP servers"),
    ({"best_of": 3}, "best_of", "with n"),
    ({"use_beam_search": True}, "use_beam_search", "sampled"),
    ({"min_tokens": 5}, "min_tokens", "ignore_eos"),
    ({"stop_token_ids": [1]}, "stop_token_ids", "use stop"),
]
NEUTRAL = {
    "modalities": ["text"], "audio": None, "web_search_options": None, "mcp_servers": [], "best_of": 1,
    "use_beam_search": False, "min_tokens": 0, "stop_token_ids": [], "bad_words": [], "max_tokens": 1,
}  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "reason"), REFUSED)
def test_what_cannot_be_obeyed_is_refused(nano, fields, name, reason):
    for path, body in BODIES.items():
        status, document = nano.post(path, body | fields)
        assert status == 400, (path, document)
        assert document["error"]["message"].startswith(f"{name}: ")
        assert reason in document["error"]["message"]


def test_values_that_change_nothing_are_accepted(nano):
    for path, body in BODIES.items():
        assert nano.post(path, body | NEUTRAL)[0] == 200
    assert nano.post(CHAT, BODIES[CHAT] | {"n": 2, "best_of": 2, "max_tokens": 1})[0] == 200
    assert nano.post(CHAT, BODIES[CHAT] | {"ignore_eos": True, "min_tokens": 2, "max_tokens": 2})[0] == 200


INVALID = [
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": [1]}, "guided_json", "an object"),
    ({"guided_choice": []}, "guided_choice", "list of strings"),
    ({"guided_regex": "["}, "guided_regex", "invalid grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "cannot be combined with guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "cannot be combined"),
    ({"functions": [FUNCTION], "tools": TOOLS}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "tool_choice", "no tools"),
    ({"functions": [FUNCTION], "function_call": "maybe"}, "function_call", "none, auto"),
]


def test_the_form_of_a_response_is_requested_once(nano):
    fields = {"guided_regex": "a", "text": {"format": {"type": "json_object"}}}
    status, document = nano.post(RESPONSES, BODIES[RESPONSES] | fields)
    assert (status, document["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize(("fields", "name", "reason"), INVALID)
def test_invalid_forms_are_refused(nano, fields, name, reason):
    status, document = nano.post(CHAT, BODIES[CHAT] | fields)
    assert (status, document["error"]["param"]) == (400, name)
    assert reason in document["error"]["message"]


def test_refusals_and_calls_of_a_history_become_text_and_tool_calls():
    call = {"name": "f", "arguments": "{}"}
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "function", "name": "f", "content": None},
    ]
    assert openai_messages(given) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I cannot."},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "No."}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "function_3", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "function_3", "content": "1"},
        {"role": "tool", "tool_call_id": "function_3", "content": ""},
    ]
    assert openai_messages("no list") == "no list"
    assert openai_messages([{"role": "assistant", "tool_calls": ["odd"]}, {"role": "function"}])[1]["role"] == "tool"


DOCUMENTS = [
    ({"type": "document", "source": {"type": "text", "data": "A."}, "title": "T"}, "T\nA."),
    ({"type": "document", "source": {"type": "content", "content": "A."}, "context": "C"}, "C\nA."),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": t} for t in "ab"]}},
        "a\n\nb",
    ),
    ({"type": "search_result", "source": "http://a", "title": "T", "content": [{"type": "text", "text": "A."}]},
     "T\nhttp://a\nA."),
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JV"}}, None),
    ({"type": "document", "source": {"type": "url", "url": "http://a"}}, None),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}, None),
    ({"type": "image", "source": {"type": "text", "data": "A."}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("block", "text"), DOCUMENTS)
def test_documents_with_text_become_text(block, text):
    assert document_text(Fields(block)) == text


NOTES = [
    ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "x"}},
     '[server_tool_use web_search: {"query": "x"}]'),
    ({"type": "web_search_tool_result", "tool_use_id": "1", "content": [
        {"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_content": "zz", "page_age": None},
        {"type": "web_search_result", "title": "U", "url": "http://b"}]},
     "[web_search_tool_result: title: T, url: http://a; title: U, url: http://b]"),
    ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "found"}]}, "[mcp_tool_result: found]"),
    ({"type": "code_execution_tool_result", "content": {"type": "code_result", "stdout": "1", "code": 0}},
     "[code_execution_tool_result: stdout: 1]"),
    ({"type": "bash_tool_result", "content": "odd"}, "[bash_tool_result: odd]"),
    ({"type": "tool_use", "name": "f"}, None),
    ({"type": "image"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("block", "note"), NOTES)
def test_tools_of_other_servers_become_notes(block, note):
    assert foreign_note(Fields(block)) == note


def test_a_history_of_another_server_is_answered(nano):
    history = [
        {"role": "user", "content": [DOCUMENTS[0][0], DOCUMENTS[3][0], {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [NOTES[0][0], NOTES[1][0], {"type": "text", "text": "Yes."}]},
        {"role": "user", "content": SUM},
    ]
    status, document = nano.post(MESSAGES, {"messages": history, "max_tokens": 4})
    assert status == 200, document
    result = {"type": "tool_result", "tool_use_id": "1", "content": [DOCUMENTS[3][0], {"type": "image"}]}
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    assert nano.post(MESSAGES, {"messages": [*turn, {"role": "user", "content": [result]}], "max_tokens": 4})[0] == 200
    status, document = nano.post(MESSAGES, {"messages": [{"role": "user", "content": [DOCUMENTS[4][0]]}]})
    assert status == 400
    assert "expected text or tool_result" in document["error"]["message"]
