"""POST /v1/chat/completions over the wire: documents, streams, calls of tools, and what is refused."""

import json
import re
from dataclasses import replace
from itertools import count, groupby

import pytest

from dsv4cli.engine.chat import grammar
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.accounts import ANYONE
from dsv4cli.engine.server.answer_format import AnswerFormat, anthropic_shape, openai_shape
from dsv4cli.engine.server.choice import Choice
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.plan import AnswerPlan, limits_of
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.reply_grammar import ToolChoice
from dsv4cli.engine.text.tokens import EOS, USER
from tests.support.program import calls_block
from tests.support.serving import asking, comes
from tests.support.slow import slow

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            },
        },
    }
]
WEATHER = "What is the weather in Paris?"


def joined(events, name):
    """A field of the deltas of the first choice, put together."""
    deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]" and data["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


def test_an_answer_is_a_document(nano):
    document = nano.chat(SUM)
    [choice] = document["choices"]
    assert (document["object"], document["model"]) == ("chat.completion", "nano")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert document["usage"]["prompt_tokens"] == 14
    assert document["usage"]["completion_tokens"] == 12
    assert document["usage"]["total_tokens"] == 26


def test_a_stream_joins_to_the_document(nano):
    body = asking(SUM, reasoning_effort="high", stream_options={"include_usage": True})
    message = nano.chat(SUM, reasoning_effort="high")["choices"][0]["message"]
    events = nano.stream("/v1/chat/completions", body)
    assert events[-1] == ("", "[DONE]")
    assert events[0][1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert message["reasoning_content"]
    assert joined(events, "content") == message["content"] == ANSWER
    assert joined(events, "reasoning_content") == joined(events, "reasoning") == message["reasoning_content"]
    *_, finish, usage = [data for _, data in events[:-1]]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert 0 < usage["usage"]["completion_tokens_details"]["reasoning_tokens"] < usage["usage"]["completion_tokens"]
    assert [len(data["choices"][0]["delta"].keys() & {"content", "reasoning"}) for _, data in events[1:-2]].count(
        2
    ) == 0


def test_calls_of_tools_are_streamed_as_they_are_in_the_document(nano):
    message = nano.chat(WEATHER, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"
    events = nano.stream("/v1/chat/completions", asking(WEATHER, tools=TOOLS))
    choices = [data["choices"][0] for _, data in events[:-1]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    parts = [part for one in choices for part in one["delta"].get("tool_calls", [])]
    assert [part["id"] for part in parts if "id" in part] == [parts[0]["id"]]
    assert parts[0]["function"]["name"] == "get_weather"
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert "DSML" not in json.dumps(events)


@pytest.mark.slow
def test_calls_of_several_answers_have_ids_of_their_own(nano):
    choices = nano.chat(WEATHER, tools=TOOLS, n=2)["choices"]
    events = nano.stream("/v1/chat/completions", asking(WEATHER, tools=TOOLS, n=2))
    deltas = [choice["delta"] for _, data in events[:-1] for choice in data["choices"]]
    streamed = [part["id"] for delta in deltas for part in delta.get("tool_calls", []) if "id" in part]
    for ids in ([choice["message"]["tool_calls"][0]["id"] for choice in choices], streamed):
        assert len({*ids}) == len(ids) == 2


def said(nano, text, choice):
    """What a client gets of an answer with this text: the deltas, and the choice."""
    service = nano.server.config.app.service
    ids = service.dialogue.tokenizer.encode(text + EOS)
    plan = AnswerPlan([0], Sampling(0.0), Limits(), AnswerFormat(None, choice, TOOLS))
    answer = Choice(0, Request([0], plan.sampling, plan.limits), plan, service)
    given = [Token(one, 0.0, [], "stop" if one == ids[-1] else None) for one in ids]
    return answer.push(given, nano.asked.call([], ANYONE))[0], answer


def called(nano, choice, *arguments):
    """What a client gets of calls with these arguments: as deltas, and in the document."""
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": one}} for one in arguments]
    deltas, answer = said(nano, calls_block(calls), choice)
    streamed = ["".join(delta.text for delta in own) for _, own in groupby(deltas, key=lambda delta: delta.index)]
    assert answer.finish == "tool_calls"
    return streamed, [call["function"]["arguments"] for call in answer.message["tool_calls"]]


def test_arguments_in_a_wrapper_of_the_models_own_making_are_taken_out(nano):
    paris = '{"city": "Paris"}'
    assert called(nano, ToolChoice(), f'{{"arguments": {paris}}}') == ([paris], [paris])


def test_a_damaged_call_is_left_out_and_the_log_says_so(nano):
    block = calls_block([{"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}])
    before = len(nano.lines)
    for text, content in (
        (block.replace(' name="city"', ""), ""),
        (block.partition("<｜DSML｜invoke")[0] + "Hm.", "Hm."),
    ):
        deltas, answer = said(nano, text, ToolChoice())
        assert "".join(delta.text for delta in deltas if delta.kind == "content") == answer.message["content"]
        assert (answer.message["content"].strip(), answer.message["tool_calls"]) == (content, [])
        assert answer.finish == "stop"
    assert [line for line in nano.lines[before:] if "markup" in line] == [
        "the markup of an answer was damaged, and was repaired or removed"
    ] * 2


def test_where_one_call_is_wanted_the_first_is_given(nano):
    cities = ['{"city": "Paris"}', '{"city": "Rome"}']
    assert called(nano, ToolChoice(), *cities) == (cities, cities)
    assert called(nano, ToolChoice(parallel=False), *cities) == (cities[:1], cities[:1])


def test_how_many_calls_there_may_be_is_read_in_both_dialects():
    own = {"type": "auto", "disable_parallel_tool_use": True}
    assert [openai_shape(Fields({"parallel_tool_calls": one}), TOOLS).choice.parallel for one in (True, False)] == [
        True,
        False,
    ]
    assert anthropic_shape(Fields({}), TOOLS).choice.parallel
    assert not anthropic_shape(Fields({"tool_choice": own}), TOOLS).choice.parallel


@pytest.mark.slow
def test_a_result_is_answered(nano):
    message = nano.chat(WEATHER, tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"temperature": 21}'}
    body = asking(WEATHER, tools=TOOLS)
    body["messages"] += [message, result]
    status, document = nano.post("/v1/chat/completions", body)
    assert status == 200
    assert "21" in document["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_both_names(nano, field):
    body = asking(SUM, tools=TOOLS, reasoning_effort="high", max_tokens=1)
    lengths = []
    for reasoning in ("", "12 or so"):
        messages = [*body["messages"], {"role": "assistant", "content": None, field: reasoning}, *body["messages"]]
        status, document = nano.post("/v1/chat/completions", body | {"messages": messages})
        assert status == 200
        lengths.append(document["usage"]["prompt_tokens"])
    assert lengths[0] < lengths[1]


def test_a_budget_ends_the_thinking(nano):
    document = nano.chat(SUM, thinking={"type": "enabled", "budget_tokens": 3})
    assert document["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_several_answers_have_their_own_seeds(nano):
    hot = {"temperature": 3.0, "max_tokens": 5}  # at which nano says something else with each seed
    document = nano.chat("Hello!", n=3, seed=5, **hot)
    choices = document["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    alone = [nano.chat("Hello!", seed=5 + number, **hot) for number in range(3)]
    assert [choice["message"] for choice in choices] == [one["choices"][0]["message"] for one in alone]
    assert len({choice["message"]["content"] for choice in choices}) == 3
    drawn = sum(one["usage"]["completion_tokens"] for one in alone)
    assert document["usage"]["completion_tokens"] == drawn


@pytest.mark.parametrize("stream", [*slow(False), True])
def test_a_stop_text_is_not_part_of_the_answer(nano, stream):
    if stream:
        events = nano.stream("/v1/chat/completions", asking(SUM, stop=[" = 4", "x"]))
        found = joined(events, "content"), events[-2][1]["choices"][0]["finish_reason"]
    else:
        choice = nano.chat(SUM, stop=" = 4")["choices"][0]
        found = choice["message"]["content"], choice["finish_reason"]
    assert found == ("17 + 25", "stop")


def test_an_empty_stop_text_is_none(nano):
    assert nano.chat(SUM, stop="")["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("stop", ["17", *slow("= 42.")])
def test_log_probabilities_are_of_the_text_before_a_stop_text(nano, stop):
    """Of a token that the text ends within, too: it is the last."""
    body = asking(SUM, stop=stop, logprobs=True)
    choice = nano.post("/v1/chat/completions", body)[1]["choices"][0]
    text, content = choice["message"]["content"], choice["logprobs"]["content"]
    listed = [one["token"] for one in content]
    assert text == ANSWER.partition(stop)[0]
    assert "".join(listed).startswith(text)
    assert len("".join(listed[:-1])) < len(text) or not listed
    events = nano.stream("/v1/chat/completions", body)
    parts = [data["choices"][0]["logprobs"] for _, data in events[:-1]]
    assert [one for part in parts for one in part["content"]] == content


def test_a_limit_cuts_the_answer(nano):
    choice = nano.chat(SUM, max_tokens=9, max_completion_tokens=3)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("17 +", "length")


@pytest.mark.slow
def test_log_probabilities_are_of_every_token(nano):
    content = nano.chat(SUM, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == ANSWER
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0 for one in content)
    assert all(len(one["top_logprobs"]) == 2 and bytes(one["bytes"]).decode() == one["token"] for one in content)
    events = nano.stream("/v1/chat/completions", asking(SUM, logprobs=True, top_logprobs=2))
    streamed = [
        one for _, data in events[:-1] for one in (data["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_a_bias_keeps_a_token_away(nano):
    [token] = nano.post("/tokenize", {"prompt": " ="})[1]["tokens"]
    assert (
        nano.chat(SUM, logit_bias={str(token): -100}, max_tokens=6)["choices"][0]["message"]["content"] != "17 + 25 ="
    )


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_call_can_be_required(nano, choice):
    [one] = nano.chat(SUM, tools=TOOLS, tool_choice=choice)["choices"]
    assert one["finish_reason"] == "tool_calls"
    assert {call["function"]["name"] for call in one["message"]["tool_calls"]} == {"get_weather"}


@pytest.mark.slow
def test_no_call_comes_where_none_may(nano):
    [one] = nano.chat(WEATHER, tools=TOOLS, tool_choice="none", max_tokens=12)["choices"]
    assert "tool_calls" not in one["message"]
    assert one["finish_reason"] in ("stop", "length")


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["none", "high"])
def test_an_answer_follows_a_schema_after_its_thinking(nano, effort):
    form = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["forty", "two"]}}}
    message = nano.chat(SUM, response_format=form, reasoning_effort=effort)["choices"][0]["message"]
    assert json.loads(message["content"]) in ("forty", "two")
    assert ("reasoning_content" in message) == (effort == "high")


def test_an_answer_matches_a_regex(nano):
    content = nano.chat(SUM, structured_outputs={"regex": "[0-9]{3}!"})["choices"][0]["message"]["content"]
    assert re.fullmatch("[0-9]{3}!", content)


def test_what_looks_like_a_special_token_is_text(nano):
    plain = nano.chat("a", max_tokens=1)["usage"]["prompt_tokens"]
    assert nano.chat("a<｜User｜>", max_tokens=1)["usage"]["prompt_tokens"] > plain + 1


def test_an_answer_that_has_begun_is_gone_on_with(nano):
    body = asking(SUM)
    body["messages"].append({"role": "assistant", "content": "17 + 25 ="})
    status, document = nano.post("/v1/chat/completions", body)
    assert status == 200
    assert document["choices"][0]["message"]["content"] == " 42."


@pytest.mark.slow
def test_a_developer_who_speaks_first_is_the_system(nano):
    def asked(role):
        body = asking("What is the capital of Italy?")
        body["messages"].insert(0, {"role": role, "content": "Always end with 'over'."})
        return nano.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]

    assert asked("developer") == asked("system") == "The capital of Italy is Rome. over"


def text_of_prompt(nano, messages, **fields):
    """What the model reads of a conversation."""
    status, document = nano.post("/tokenize", {"messages": messages, **fields})
    assert status == 200, document
    return nano.post("/detokenize", {"tokens": document["tokens"]})[1]["prompt"]


def tokenized(nano, *messages):
    status, document = nano.post("/tokenize", {"messages": messages})
    assert status == 200, document
    return document["tokens"]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_who_instructs_later_speaks_in_the_users_turn(nano, role, effort):
    """No answer begins behind a system's words in the format, and a developer's would go with the reasoning."""
    later = {"role": role, "content": "b"}
    think, thought = ("</think>", "</think>") if effort == "none" else ("<think>", "<think></think>")
    answered = [*asking("a")["messages"], {"role": "assistant", "content": "c"}]
    begun = "<｜begin▁of▁sentence｜><｜User｜>"
    for messages, prompt in (
        ([later], f"b<｜Assistant｜>{think}"),
        ([*answered[:1], later], f"a\n\nb<｜Assistant｜>{think}"),
        ([*answered[:1], later, answered[1]], f"a\n\nb<｜Assistant｜>{thought}c"),
        (
            [*answered, later, *asking("d")["messages"]],
            f"a<｜Assistant｜></think>c{EOS}{USER}b\n\nd<｜Assistant｜>{think}",
        ),
    ):
        assert text_of_prompt(nano, messages, reasoning_effort=effort) == begun + prompt


def test_run_and_serve_ask_alike(nano):
    said, more = {"role": "assistant", "content": "c"}, {"role": "system", "content": "b"}
    [asked] = asking("a")["messages"]
    dialogue = nano.server.config.app.service.dialogue
    for messages in (
        [asked],
        [asked, more],
        [more, asked, more],
        [more, more, asked],
        [asked, said],
        [asked, said, more],
        [more],
    ):
        assert tokenized(nano, *messages) == dialogue.prompt(messages).ids


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("empty", [{"content": ""}, {"content": None}, {"content": [], "tool_calls": []}], ids=str)
def test_an_answer_without_a_word_has_not_begun(nano, empty, effort):
    asked, last = asking("a")["messages"], {"role": "assistant", **empty}
    expected = text_of_prompt(nano, asked, reasoning_effort=effort)
    assert text_of_prompt(nano, [*asked, last], reasoning_effort=effort) == expected
    assert nano.chat("a", messages=[last], max_tokens=1)["choices"]


def test_all_that_the_system_says_first_is_one_text_before_the_tools(nano):
    system = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    prompt = text_of_prompt(nano, [*system, *asking("c")["messages"]], tools=TOOLS)
    assert prompt.startswith("<｜begin▁of▁sentence｜>a\n\nb\n\n## Tools\n")


def test_fields_of_the_prompt_format_are_not_a_clients(nano):
    messages = [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}, *asking("c")["messages"]]
    own = [
        messages[0] | {"tools": TOOLS, "response_format": {"type": "object"}},
        messages[1] | {"wo_eos": True},
        messages[2],
    ]
    assert tokenized(nano, *own) == tokenized(nano, *messages)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=len)
def test_a_schema_is_part_of_the_prompt(nano, system):
    """As the model was trained on it; that an answer is any object is not."""
    messages = [*system, *asking("Hi")["messages"]]

    def prompt(form):
        tokens = nano.post("/tokenize", {"messages": messages, "response_format": form})[1]["tokens"]
        return nano.post("/detokenize", {"tokens": tokens})[1]["prompt"]

    schema = {"type": "string", "enum": ["a"]}
    own = prompt({"type": "json_schema", "json_schema": {"schema": schema}})
    assert json.dumps(schema) in own.partition("<｜User｜>")[0]
    assert not system or "Be brief." in own
    assert prompt({"type": "json_object"}) == prompt(None)


def test_an_answer_may_ignore_its_end(nano):
    document = nano.chat(SUM, ignore_eos=True, max_tokens=16)
    assert document["usage"]["completion_tokens"] == 16
    assert document["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-9}, *slow({"temperature": 50, "top_p": 0}, {"temperature": 0.0})]
)
def test_what_leaves_no_choice_is_greedy(nano, fields):
    """Temperatures that fp32 cannot divide by, and a nucleus of nothing."""
    assert nano.chat(SUM, **fields)["choices"][0]["message"]["content"] == ANSWER


def test_stops_of_the_server_hold_beside_those_of_a_request(nano):
    service = nano.server.config.app.service
    usual = replace(service.defaults, limits=Limits(stops=("a",)))
    assert limits_of(Fields({}), replace(service, defaults=usual), None, ("b",), 0).stops == ("a", "b")


def test_a_request_without_a_seed_has_the_servers_or_one_of_its_own(nano):
    service = nano.server.config.app.service
    assert len({service.seed(None) for _ in range(4)}) > 1
    assert replace(service, defaults=replace(service.defaults, seed=7)).seed(None) == 7


@pytest.mark.parametrize("seed", [-1, 1.0, 2**32, 2**70])
def test_any_whole_number_is_a_seed(nano, seed):
    assert nano.chat("Hi", seed=seed, temperature=1, max_tokens=1)["choices"]


def test_what_was_read_before_is_not_read_again(nano):
    body = asking("What is the capital of Italy? " * 20, max_tokens=2)
    usages = []
    for _ in range(2):
        status, document = nano.post("/v1/chat/completions", body)
        assert status == 200
        usages.append(document["usage"])
        body["messages"] += [document["choices"][0]["message"], {"role": "user", "content": "And of France?"}]
    first, second = usages
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] > 100


def test_what_stands_before_a_question_is_held_and_so_is_the_question(nano):
    system = {"role": "system", "content": "Be brief. " * 20}

    def cached(content):
        # all of them are longer than a state can be taken back by
        body = asking(f"{content} is the sky not as blue at night as it is at noon?", max_tokens=12, ignore_eos=True)
        body["messages"].insert(0, system)
        return nano.post("/v1/chat/completions", body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    question = tokenized(nano, system, {"role": "user", "content": ""}).index(
        nano.server.config.app.service.dialogue.tokenizer.token_id(USER)
    )
    assert cached("Why") < 10
    # a drafter reads the last one that is held again
    assert cached("How") == question - 1
    assert cached("Why") > question + 8


def test_an_unknown_field_is_ignored_and_logged_once(nano):
    for _ in range(2):
        nano.chat("Hi", max_tokens=1, top_a=0.1, user="me")
    assert nano.lines.count("ignoring the unknown field top_a") == 1
    assert not any("user" in line for line in nano.lines)


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "verbosity"), ("/v1/chat/completions", "top_a"), ("/v1/completions", "prompt_logprobs")],
)
def test_what_would_have_changed_the_answer_is_not_ignored_in_silence(nano, path, field):
    assert nano.post(path, asking("Hi", max_tokens=1) | {"prompt": "Hi", field: 1})[0] == 200
    assert f"ignoring the unknown field {field}" in nano.lines


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"messages": None}, "messages", "expected a list of messages"),
        ({"messages": []}, "messages", "expected a list of messages"),
        ({"messages": "hi"}, "messages", "expected a list"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "expected a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x.y/z"}}]}]},
            "messages[0].content[0].type",
            "the only content that DeepSeek-V4 accepts",
        ),
        ({"temperature": "hot"}, "temperature", "expected a number from 0"),
        ({"temperature": -1}, "temperature", "expected a number from 0"),
        ({"temperature": True}, "temperature", "expected a number"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"top_k": -2}, "top_k", "of -1 or more"),
        ({"top_k": 1.5}, "top_k", "whole number"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": "a"}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
        ({"max_tokens": 0}, "max_tokens", "of 1 or more"),
        ({"max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"n": 0}, "n", "from 1 to 64"),
        ({"logit_bias": []}, "logit_bias", "an object"),
        ({"logit_bias": {"2304": 1}}, "logit_bias.2304", "0 to 2,303"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "from -100 to 100"),
        ({"seed": "x"}, "seed", "whole number"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "an object"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
        ({"tool_choice": "perhaps"}, "tool_choice", "one of none"),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "no tool 'f'",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format",
            "the schema at #",
        ),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "invalid grammar"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "json, regex, grammar"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "got nothing"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "got nothing",
        ),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "one of none"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type", "one of enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "of 0 or more"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_with_the_reason(nano, fields, param, reason):
    status, document = nano.post("/v1/chat/completions", asking("Hi") | fields)
    assert status == 400
    error = document["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert error["message"].startswith(f"{param}: ")
    assert reason in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_takes_too_long_is_refused_within_the_answer(nano, monkeypatch, path, stream):
    now = count()
    monkeypatch.setattr(grammar, "thread_time", lambda: next(now))
    body = {"structured_outputs": {"regex": "[0-9]{40}"}, "max_tokens": 60, "temperature": 0}
    body |= {"prompt": SUM} if path == "/v1/completions" else asking(SUM)
    if stream:
        [error] = [found["error"] for _, found in nano.stream(path, body) if "error" in found]
    else:
        status, document = nano.post(path, body)
        assert status == 400
        error = document["error"]
    assert error["param"] == "structured_outputs.regex"
    assert "the grammar failed within the answer: it is too ambiguous" in error["message"]
    assert comes(nano.at_rest)


def test_one_grammar_is_made_for_several_answers(nano, monkeypatch):
    made, compiled = [], grammar.Grammars._compiled
    monkeypatch.setattr(grammar.Grammars, "_compiled", lambda *given: made.append(1) or compiled(*given))
    fields = {
        "structured_outputs": {"regex": "[0-9]{2}(a|b){9}"},
        "n": 3,
        "temperature": 1,
        "max_tokens": 20,
        "seed": 0,
    }
    contents = [choice["message"]["content"] for choice in nano.chat(SUM, **fields)["choices"]]
    assert len(made) == 1
    assert all(re.fullmatch("[0-9]{2}(a|b){9}", content) for content in contents)
    assert len({*contents}) > 1


def test_a_form_needs_what_reads_it(nano, monkeypatch):
    monkeypatch.setattr(grammar, "find_spec", lambda _: None)
    status, document = nano.post("/v1/chat/completions", asking("Hi", response_format={"type": "json_object"}))
    assert (status, document["error"]["param"]) == (400, "response_format")
    assert document["error"]["message"].endswith(
        "which is not installed; in a clone of dsv4, install it: pip install '.[grammar]'"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "a number too long"),
        (b'{"messages": "\\ud800"}', "the body is not Unicode: a \\u escape is half of"),
    ],
    ids=["nothing", "open", "list", "bytes", "nested", "number", "surrogate"],
)
def test_what_is_no_body_is_refused(nano, body, reason):
    status, document = nano.post("/v1/chat/completions", body)
    assert status == 400
    assert reason in document["error"]["message"]


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(nano):
    status, document = nano.post("/v1/chat/completions", asking("a b " * 5000))
    assert status == 400
    assert document["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in document["error"]["message"]


def test_nothing_is_held_when_all_have_ended(nano):
    assert nano.at_rest()
    assert nano.bugs == []
