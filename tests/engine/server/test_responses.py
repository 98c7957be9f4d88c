"""POST /v1/responses over the wire: items, events and their order, tools, what is obeyed and what is refused."""

import asyncio
import json
import threading

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.text.tokens import DSML, THINK_END
from tests.support.program import calls_block
from tests.support.response_events import checked_response, without_ids
from tests.support.scripted_engine import scripted
from tests.support.serving import comes, events_of, served

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
WEATHER = "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": PARAMETERS,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
SEALED = {"include": ["reasoning.encrypted_content"]}


def block(*calls):
    return calls_block([{"function": {"name": name, "arguments": json.dumps(given)}} for name, given in calls])


def asking(given, **fields):
    return {"model": "m", "input": given, "temperature": 0, **fields}


def answered(server, given, **fields):
    status, document = server.post("/v1/responses", asking(given, **fields))
    assert status == 200, document
    return document


def streamed(server, given, **fields):
    return server.stream("/v1/responses", asking(given, **fields))


def refused(server, given, **fields):
    status, document = server.post("/v1/responses", asking(given, **fields))
    assert status == 400, document
    return document["error"]


@pytest.fixture(scope="module")
def says():
    """A server whose model says what was last set: says(text) returns the server."""
    said = [""]
    with scripted(lambda prompt: said[0]) as server:

        def say(text):
            said[0] = text
            return server

        yield say


def test_an_answer_is_a_response(nano):
    document = answered(nano, SUM, metadata={"a": "b"}, user="u")
    [item] = document["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert document["id"].startswith("resp_")
    assert (document["object"], document["status"], document["model"]) == ("response", "completed", "nano")
    assert (document["metadata"], document["user"], document["temperature"]) == ({"a": "b"}, "u", 0)
    assert document["usage"] == {
        "input_tokens": 14,
        "input_tokens_details": {
            "cached_tokens": document["usage"]["input_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 26,
    }


def test_a_stream_has_every_event_in_order(says):
    server = says(f"Hm.{THINK_END}So.{block(('get_weather', {'city': 'Paris'}), ('apply_patch', {'input': 'a'}))}")
    events = streamed(server, WEATHER, tools=[TOOL, PATCH], reasoning={"effort": "high"})
    names = list(dict.fromkeys(name.removeprefix("response.") for name, _ in events))
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "completed",
    ]  # fmt: skip
    response = checked_response(events)
    assert [item["type"] for item in response["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call"
    ]  # fmt: skip
    whole = answered(server, WEATHER, tools=[TOOL, PATCH], reasoning={"effort": "high"})
    assert without_ids(whole) == without_ids(response)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 4  # "Hm." and </think>
    assert comes(lambda: server.at_rest())


def test_a_summary_is_the_reasoning_itself(says):
    server = says(f"Hm.{THINK_END}So.")
    events = streamed(server, SUM, reasoning={"effort": "high", "summary": "auto"})
    [reasoning, _] = checked_response(events)["output"]
    assert (reasoning["summary"], "content" in reasoning) == ([{"type": "summary_text", "text": "Hm."}], False)
    names = [name.removeprefix("response.reasoning_summary_") for name, _ in events if "_summary_" in name]
    assert [*dict.fromkeys(names)] == ["part.added", "text.delta", "text.done", "part.done"]


@pytest.mark.parametrize("fields", [{}, SEALED, {"reasoning": {"effort": "high", "summary": "auto"}}])
def test_reasoning_comes_back(says, fields):
    server, tools = says(f"Hm.{THINK_END}{block(('get_weather', {'city': 'Paris'}))}"), [TOOL]
    options = {"tools": tools, "reasoning": {"effort": "high"}, "store": False, **fields}
    reasoning, call = answered(server, WEATHER, **options)["output"]
    if fields == SEALED:
        assert "Hm." not in reasoning["encrypted_content"]
        reasoning["content"] = []  # as Codex returns it
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    second = answered(server, [{"role": "user", "content": WEATHER}, reasoning, call, result], **options)
    prompt = server.engine.prompts[-1]
    expected = "<think>Hm.</think>" + block(("get_weather", {"city": "Paris"}))
    assert f"{WEATHER}<｜Assistant｜>{expected}<｜end▁of▁sentence｜><｜User｜><tool_result>21</tool_result>" in prompt
    # all of the first turn is found but for the last token
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= second["usage"]["input_tokens"] - len("<｜User｜><tool_result>21</tool_result>") - 3


@pytest.mark.slow
def test_a_second_turn_with_tools_hits_the_prefix_cache(nano):
    first = answered(nano, WEATHER, tools=[TOOL], store=False)
    call = first["output"][-1]
    items = [{"role": "user", "content": WEATHER}, *first["output"]]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 21}'}
    second = answered(nano, [*items, result], tools=[TOOL], store=False)
    assert "21" in second["output"][0]["content"][0]["text"]
    usage = first["usage"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 0.95 * usage["input_tokens"]


def test_a_response_continues_another(says):
    server = says("One.")
    first = answered(server, "Say one.", instructions="Be brief.")
    says("Two.")
    second = answered(server, "Say two.", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    # instructions are not carried over
    expected = (
        "<｜begin▁of▁sentence｜><｜User｜>Say one.<｜Assistant｜></think>One.<｜end▁of▁sentence｜><｜User｜>Say two."
    )
    assert server.engine.prompts[-1].startswith(expected)
    third = [{"type": "item_reference", "id": second["output"][0]["id"]}, {"role": "user", "content": "Again."}]
    answered(server, third, instructions="Be long.", previous_response_id=None)
    assert server.engine.prompts[-1].startswith("<｜begin▁of▁sentence｜>Be long.Two.")
    answered(server, third, instructions="Be short.", previous_response_id=first["id"])
    assert server.engine.prompts[-1].startswith("<｜begin▁of▁sentence｜>Be short.<｜User｜>Say one.")
    assert "Two.<｜end▁of▁sentence｜><｜User｜>Again." in server.engine.prompts[-1]


def test_a_stored_conversation_is_encoded_in_a_thread(says, monkeypatch):
    """It can be long, however short the body is that refers to it."""
    server, run, threaded = says("Yes."), asyncio.to_thread, []

    async def noting(work):
        threaded.append(work)
        return await run(work)

    first = answered(server, "a")
    monkeypatch.setattr(asyncio, "to_thread", noting)
    answered(server, "b")
    assert not threaded
    answered(server, "b", previous_response_id=first["id"])
    assert len(threaded) == 1


def test_stored_responses_are_read_listed_and_deleted(says):
    server = says("Yes.")
    document = answered(server, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                 {"role": "user", "content": [{"type": "input_text", "text": "c"}]}])  # fmt: skip
    path = f"/v1/responses/{document['id']}"
    assert server.get(path) == (200, document)
    pages = server.get(f"{path}/input_items?order=asc&limit=2")[1]
    assert [item["content"][0]["text"] for item in pages["data"]] == ["a", "b"]
    assert pages["has_more"]
    rest = server.get(f"{path}/input_items?order=asc&after={pages['last_id']}")[1]
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["c"], False)
    newest = server.get(f"{path}/input_items")[1]
    assert [item["content"][0]["text"] for item in newest["data"]] == ["c", "b", "a"]
    assert server.get(f"{path}/input_items?limit=0")[0] == 400
    assert server.get(f"{path}/input_items?after=x")[0] == 400
    assert server.get(f"{path}?stream=true")[0] == 400
    assert server.post(f"{path}/cancel", {})[0] == 400
    deleted = json.loads(server.send("DELETE", path).read())
    assert deleted == {"id": document["id"], "object": "response", "deleted": True}
    assert server.get(path)[0] == 404
    error = refused(server, "d", previous_response_id=document["id"])
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_nothing_is_stored_where_the_client_or_the_server_wants_it_so(says):
    server = says("Yes.")
    assert server.get(f"/v1/responses/{answered(server, 'a', store=False)['id']}")[0] == 404
    with scripted(lambda _: "Yes.", store=False) as bare:
        document = answered(bare, "a", store=True)
        assert bare.get(f"/v1/responses/{document['id']}")[0] == 400
        for fields in ({"previous_response_id": document["id"]}, {"background": True}):
            refused(bare, "b", **fields)
        error = refused(bare, [{"type": "item_reference", "id": document["output"][0]["id"]}])
        assert "--no-store" in error["message"]


def test_an_answer_in_the_background_is_read_later(says):
    server = says("Yes.")
    document = answered(server, "a", background=True)
    assert (document["status"], document["output"]) == ("in_progress", [])
    path = f"/v1/responses/{document['id']}"
    assert comes(lambda: server.get(path)[1]["status"] == "completed")
    done = server.get(path)[1]
    assert done["output"][0]["content"][0]["text"] == "Yes."
    assert server.post(f"{path}/cancel", {}) == (200, done)  # too late
    assert "background" in refused(server, "a", background=True, stream=True)["message"]


def test_an_answer_in_the_background_is_cancelled(nano):
    document = answered(nano, "Tell me a story.", background=True, ignore_eos=True, max_output_tokens=4000)
    path = f"/v1/responses/{document['id']}"
    assert nano.post("/v1/responses", asking("a", previous_response_id=document["id"]))[0] == 400
    status, cancelled = nano.post(f"{path}/cancel", {})
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert comes(nano.at_rest)
    assert nano.get(path)[1]["status"] == "cancelled"
    assert nano.bugs == []


def test_an_answer_that_is_cut_is_incomplete(says):
    server = says("one two three")
    for document in (
        answered(server, "a", max_output_tokens=2),
        checked_response(streamed(server, "a", max_output_tokens=2)),
    ):
        assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        [item] = document["output"]
        assert (item["status"], item["content"][0]["text"][:3]) == ("incomplete", "one")


def test_an_answer_that_is_cut_in_its_reasoning_has_no_message(says):
    server = says(f"one two three{THINK_END}four")
    [item] = checked_response(streamed(server, "a", max_output_tokens=2, reasoning={"effort": "high"}))["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


def test_a_call_that_is_cut_does_not_end(says):
    """Clients run every call whose item is done."""
    text = f"So.{block(('apply_patch', {'input': 'rm -r'}))}".partition("rm")[0]
    server = says(text)
    events = streamed(server, "a", tools=[PATCH])
    response = checked_response(events, cut_call=True)
    assert [item["type"] for item in response["output"]] == ["message"]
    assert without_ids(answered(server, "a", tools=[PATCH])) == without_ids(response)


def test_text_after_calls_becomes_a_message_after_them(says):
    damaged = block(("get_weather", {"city": "Paris"})).replace(f"</{DSML}tool_calls>", "") + "And so."
    server = says(damaged)
    response = checked_response(streamed(server, "a", tools=[TOOL]))
    assert without_ids(answered(server, "a", tools=[TOOL])) == without_ids(response)


def test_an_empty_answer_is_an_empty_message(says):
    [item] = checked_response(streamed(says(""), "a"))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_tool_in_a_namespace_is_called_by_both_names(says):
    space = {"type": "namespace", "name": "crm", "description": "The customers.", "tools": [
        {"type": "function", "name": "find"}, {"type": "custom", "name": "query"}]}  # fmt: skip
    server = says(block(("crm__find", {"city": "a"}), ("crm__query", {"input": "b"})))
    first = checked_response(streamed(server, "a", tools=[space]))
    found, query = first["output"]
    assert (found["namespace"], found["name"], found["arguments"]) == ("crm", "find", '{"city": "a"}')
    assert (query["namespace"], query["name"], query["input"]) == ("crm", "query", "b")
    assert server.engine.prompts[-1].count("The customers.") == 1
    results = [{"type": kind, "call_id": call["call_id"], "output": "c"} for kind, call in (
        ("function_call_output", found), ("custom_tool_call_output", query))]  # fmt: skip
    answered(server, results, previous_response_id=first["id"], tools=[space])
    assert block(("crm__find", {"city": "a"}), ("crm__query", {"input": "b"})) in server.engine.prompts[-1]


def test_a_stop_text_ends_the_output(says):
    server = says("One. Two. Three.")
    for document in (answered(server, "a", stop="Two"), checked_response(streamed(server, "a", stop=["x", "Two"]))):
        assert (document["output"][0]["content"][0]["text"], document["status"]) == ("One. ", "completed")


def test_builtin_tools_are_left_out_with_one_line(says):
    server = says("Yes.")
    del server.lines[:]
    for _ in range(2):
        document = answered(server, "a", tools=[{"type": "web_search"}, {"type": "local_shell"}, TOOL])
        assert [tool["type"] for tool in document["tools"]] == ["function"]
    assert [line for line in server.lines if "built-in" in line] == [
        "leaving out the built-in tool web_search: this server has none",
        "leaving out the built-in tool local_shell: this server has none",
    ]
    assert "web_search" not in server.engine.prompts[-1]


def test_only_allowed_tools_are_offered(says):
    server = says("Yes.")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    document = answered(server, "a", tools=[TOOL, PATCH], tool_choice=choice)
    assert document["tool_choice"] == choice
    assert ("apply_patch" in server.engine.prompts[-1], "get_weather" in server.engine.prompts[-1]) == (True, False)


@pytest.mark.slow
def test_a_tool_is_called_where_it_must_be(nano):
    tools = [TOOL, {**TOOL, "name": "other"}]
    choices = (
        {"type": "function", "name": "other"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
    )
    for choice in choices:
        document = answered(nano, SUM, tools=tools, tool_choice=choice, max_output_tokens=60)
        assert {item["name"] for item in document["output"] if item["type"] == "function_call"} <= {"other"}
        assert not [item for item in document["output"] if item["type"] == "message"]
    assert [item["type"] for item in answered(nano, WEATHER, tools=tools, tool_choice="none")["output"]] == ["message"]


@pytest.mark.slow
def test_the_text_follows_a_schema(nano):
    form = {"type": "json_schema", "name": "a", "strict": True, "schema": {"enum": ["yes", "no"]}}
    document = answered(nano, SUM, text={"format": form, "verbosity": "medium"})
    assert json.loads(document["output"][0]["content"][0]["text"]) in ("yes", "no")
    assert document["text"] == {"format": form, "verbosity": "medium"}


def test_a_prompt_that_is_too_long_loses_its_oldest_turns_where_that_is_wanted():
    with scripted(lambda _: "Yes.", context=300) as server:
        items = [{"role": "user", "content": f"{n} " + "long " * 10} for n in range(20)]
        turns = [one for item in items for one in (item, {"role": "assistant", "content": "Yes."})]
        asked = [{"role": "developer", "content": "Be brief."}, *turns, {"role": "user", "content": "Last."}]
        assert refused(server, asked)["code"] == "context_length_exceeded"
        answered(server, asked, truncation="auto")
        prompt = server.engine.prompts[-1]
        assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.<｜User｜>")
        assert ("19 long" in prompt, "<｜User｜>0 long" in prompt, "Last." in prompt) == (True, False, True)
        assert refused(server, "long " * 500, truncation="auto")["code"] == "context_length_exceeded"


def test_input_tokens_are_counted(nano):
    assert nano.post("/v1/responses/input_tokens", {"input": SUM}) == (
        200,
        {"object": "response.input_tokens", "input_tokens": 14},
    )


def test_items_of_other_servers_are_left_out_with_a_line(says):
    server = says("Yes.")
    del server.lines[:]
    seal = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    answered(server, [{"role": "user", "content": "a"}, seal, {"type": "web_search_call", "id": "ws_1"},
                      {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                      {"role": "user", "content": "b"}])  # fmt: skip
    assert server.engine.prompts[-1].endswith("No.<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜></think>")
    assert {
        "leaving out encrypted_content that this server process has not written",
        "leaving out input items of type web_search_call",
    } <= {*server.lines}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "input: expected a text or a list of items, got nothing"),
        ({"input": []}, "input: expected at least one message"),
        ({"input": 5}, "input: expected a text or a list of items"),
        ({"input": ["a"]}, "input[0]: expected an object"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role: expected one of user, "),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type: expected in"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role: expected one of user, "),
        ({"input": [{"type": "banana"}]}, "input[0].type: expected message, function_call or another type"),
        ({"input": [{"id": "msg_0"}]}, "input[0].id: no item 'msg_0' is stored"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id: expected a string"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output: expected a text or a list"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0].summary[0]: expected an object"),
        ({"previous_response_id": "resp_0"}, "previous_response_id: cannot continue 'resp_0': it is not stored"),
        ({"conversation": "conv_1"}, "conversation: this server has no conversations"),
        ({"prompt": {"id": "p"}}, "prompt: this server has no conversations, prompt templates"),
        ({"background": True, "stream": True}, "background: needs a stored response that is not streamed"),
        ({"truncation": "off"}, "truncation: expected one of auto, disabled"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary: expected one of auto, concise, detailed"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort: expected one of none, minimal"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: expected one of text, json_object, json_schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: expected an object, got nothing"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity: expected one of low, medium, high"),
        ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not supported"),
        ({"include": [1]}, "include: expected a list of strings"),
        ({"stop": [1]}, "stop: expected a string or a list of up to 16 strings"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected a whole number of 1 or more"),
        ({"temperature": -1}, "temperature: expected a number"),
        ({"metadata": {"a": 1}}, "metadata.a: expected a string"),
        ({"tools": [{"name": "f"}]}, "tools[0].type: expected a string"),
        ({"tools": [{"type": "function"}]}, "tools[0].name: expected a string"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: expected a name that no other tool has"),
        ({"tools": [{**TOOL, "parameters": 1}]}, "tools[0].parameters: expected an object"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "definition": "a"}}]},
            "tools[0].format.syntax: expected one of lark, regex, got nothing",
        ),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type: exp"),
        ({"tool_choice": "required"}, "tool_choice: a call is required, but the request has no tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: expected function, custom or allowed_tools"),
        ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice: the request has no custom tool 'x'"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools[0].name: the request has no function tool 'x'",
        ),
    ],
)
def test_what_is_wrong_is_named(says, fields, message):
    error = refused(says("Yes."), **{"given": "a", **({"given": fields["input"]} if "input" in fields else {}),
                                     **{name: value for name, value in fields.items() if name != "input"}})  # fmt: skip
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"


def test_a_client_that_leaves_ends_its_answer(nano):
    response = nano.send("POST", "/v1/responses", asking("a", stream=True, ignore_eos=True, max_output_tokens=4000))
    assert response.read(20)
    response.close()
    assert comes(nano.at_rest)


def test_a_stream_that_the_server_breaks_off_fails():
    """An answer in the background is lost with the store."""
    found = []
    with served("random:tiny,layers=3", grace=0) as server:

        def ask():
            endless = asking("a", stream=True, ignore_eos=True, max_output_tokens=8000)
            found.append(server.send("POST", "/v1/responses", endless).read().decode())

        client = threading.Thread(target=ask)
        client.start()
        answered(server, "b", background=True, ignore_eos=True, max_output_tokens=8000)
        assert comes(lambda: server.held().running == 2)
        server.loop.call_soon_threadsafe(server.server.stop)
        client.join(60)
    events = events_of(found[0])
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    name, event = events[-1]
    error = {"code": "server_error", "message": "the server shut down before the answer was complete"}
    assert (name, event["response"]["status"], event["response"]["error"]) == ("response.failed", "failed", error)


def test_another_key_does_not_see_a_response():
    first, second = {"authorization": "Bearer first-key"}, {"authorization": "Bearer second-key"}
    accounts = Accounts([ApiKey("first", b"first-key"), ApiKey("second", b"second-key")])
    with scripted(lambda _: "Yes.", accounts=accounts) as server:
        document = server.post("/v1/responses", asking("a"), **first)[1]
        path = f"/v1/responses/{document['id']}"
        assert [server.get(path, **key)[0] for key in (first, second)] == [200, 404]
        assert server.send("DELETE", path, **second).status == 404
        assert server.get(f"{path}/input_items", **second)[0] == 404
        following = asking("b", previous_response_id=document["id"])
        assert [server.post("/v1/responses", following, **key)[0] for key in (first, second)] == [200, 400]
        reference = asking([{"type": "item_reference", "id": document["output"][0]["id"]}])
        assert [server.post("/v1/responses", reference, **key)[0] for key in (first, second)] == [200, 400]
