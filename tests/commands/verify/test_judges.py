"""How verify judges: differences of answers, schemas, numbers, prompts that differ, and invalid requests."""

import json
from dataclasses import replace

import pytest

from dsv4cli.engine.text import tokens
from dsv4cli.engine.verification import discover
from dsv4cli.engine.verification.calls import ApiCall, ServerReply
from dsv4cli.engine.verification.chat_answer import AnswerToken, ChatAnswer, UnreadableReply, read_chat
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.compare import ROUNDING, difference
from dsv4cli.engine.verification.conversations import conversations
from dsv4cli.engine.verification.encoding import count_prompt, explain, remedy
from dsv4cli.engine.verification.journal import ReplyJournal
from dsv4cli.engine.verification.limits import judge_refusal
from dsv4cli.engine.verification.numbers import compare_numbers, verdict_of
from dsv4cli.engine.verification.plan import Scope, cost_of, plan_checks
from dsv4cli.engine.verification.reference import ScoredText, ServerReference, read_reference
from dsv4cli.engine.verification.reply_streams import stream_checks
from dsv4cli.engine.verification.schema_errors import schema_errors
from dsv4cli.engine.verification.sender import Sender
from dsv4cli.engine.verification.temperature import temperature_check
from dsv4cli.engine.verification.tool_scenarios import ORDER, UNION, scenarios
from dsv4cli.engine.verification.tools import tool_checks
from dsv4cli.engine.verification.vocabularies import open_tokenizer
from tests.support.slow import slow_rows


def answer(*tokens, top=()):
    """An answer of (text, log-probability) pairs."""
    listed = [AnswerToken(text, logprob, dict(top)) for text, logprob in tokens]
    return ChatAnswer("".join(text for text, _ in tokens), tokens=listed, finish="stop")


def test_equal_answers_have_no_difference():
    assert difference(answer(("a", -0.1)), answer(("a", -0.1))) is None


def test_tokens_that_are_equally_likely_may_change_places():
    one = answer(("x", 0.0), ("a", -0.69), top=[("a", -0.69), ("b", -0.7)])
    other = answer(("x", 0.0), ("b", -0.69), top=[("a", -0.7), ("b", -0.69)])
    found = difference(one, other)
    assert (found.at, found.size() < ROUNDING) == (1, True)
    sure = answer(("x", 0.0), ("a", -0.01), top=[("a", -0.01), ("b", -5.0)])
    assert difference(sure, answer(("x", 0.0), ("b", -0.01), top=[("b", -0.01), ("a", -5.0)])).size() > 4
    assert "token 1 after 'x' is 'a'" in found.text[0]


def test_a_drift_before_the_first_different_token_counts():
    assert difference(answer(("a", -0.1)), answer(("a", -0.9))).size() == pytest.approx(0.8)
    assert difference(answer(("a", -9.0)), answer(("a", -12.0))) is None  # too unlikely to compare


def test_without_log_probabilities_a_difference_has_no_size():
    assert difference(ChatAnswer("a"), ChatAnswer("b")).size() == float("inf")


@pytest.mark.parametrize(
    ("value", "schema", "error"),
    [
        ({"key": "name", "value": None}, UNION, ""),
        ({"key": "name", "value": [1]}, UNION, "arguments.value matches no alternative"),
        ({"key": "size", "value": 1}, UNION, "arguments.key is not one of volume, name, alarm"),
        ({"value": True}, UNION, "arguments lacks key"),
        ({"items": [], "address": {"street": "a", "city": "b"}}, ORDER, "arguments.items has 0 elements"),
        (
            {"items": [{"name": "a", "count": 1.5}], "address": {"street": "a", "city": "b"}},
            ORDER,
            "arguments.items[0].count is not of type integer",
        ),
        (
            {"items": [{"name": "a", "count": 2.0}], "address": {"street": "a", "city": "b", "zip": 1}},
            ORDER,
            "arguments.address has zip, which does not exist",
        ),
        ([], ORDER, "arguments is not of type object"),
    ],
)
def test_arguments_are_compared_with_their_schema(value, schema, error):
    assert list(schema_errors(value, schema["function"]["parameters"])) == ([error] if error else [])


def test_there_are_a_hundred_scenarios_and_sixty_conversations():
    assert len(scenarios()) == 100
    assert sum(map(len, conversations().values())) == 60


@pytest.mark.parametrize(("quick", "most"), [(True, 60), *slow_rows((False, 400))])
def test_a_run_makes_no_more_requests_than_promised(quick, most):
    """With all APIs, a reference, and the eight requests that find out what the server offers."""
    every = CheckedServer(
        "http://x", "nano", 8192, tokenizer=open_tokenizer("nano"), logprobs=True, completions=True, echo=True,
        tokenize=True, messages=True, responses=True,
    )  # fmt: skip
    checks = plan_checks(every, Scope(quick=quick), list, read_reference("nano"))
    assert most * 0.8 < cost_of(checks).requests + 8 <= most


@pytest.fixture(scope="module")
def server():
    return CheckedServer("http://x", "nano", tokenizer=open_tokenizer("nano"))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("plain", lambda count: count - 1, "lacks the token"),
        ("plain", lambda count: count + 5, "each has +5 tokens"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_named(server, kind, change, said):
    counted = [(one, change(count_prompt(server, one))) for one in conversations()[kind]]
    assert said in explain(server, counted)


def test_missing_tools_are_named(server):
    [one, *_] = conversations()["tools"]
    bare = count_prompt(server, type(one)(one.messages))
    assert explain(server, [(one, bare)]) == "the tools are missing"
    assert remedy("the tools are missing").endswith("if the server passes the tools to it")
    assert remedy("").endswith("writes the official prompt")


@pytest.mark.parametrize(
    ("content", "leaks"),
    [(f"<{tokens.DSML}invoke", True), ('\n<invoke name="get_time">', True), ("call get_time", False)],
)
def test_markup_leaks_with_its_special_token_or_without(server, content, leaks):
    answers, *others = tool_checks(server, quick=True, baseline=None)
    replies = {call.key: ServerReply(500) if call.streams else said(content) for call in answers.steps[0].plan({})}
    [check] = [one for one in others if one.name == "tools.leaks"]
    assert bool([*check.judge(replies)]) == bool(answers.figures(replies)["leaked"]) == leaks


def said(content):
    return ServerReply(200, json.dumps({"choices": [{"message": {"content": content}}]}))


@pytest.mark.parametrize(
    ("hot", "wrong"),
    [(("a", "a"), [True]), (("b", "b"), [False]), (("a", "b"), [])],
    ids=["ignored", "few-tokens", "sampled"],
)
def test_a_temperature_is_ignored_if_all_answers_are_greedy(server, hot, wrong):
    check = temperature_check(server, quick=True)
    texts = iter((*hot, "a"))
    replies = {call.key: said(next(texts)) for call in check.steps[0].plan({})}
    assert [problem.wrong for problem in check.judge(replies)] == wrong


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [('{"city": "Paris"}', []), ('{"city": "Rome"}', [False]), ('{"city": "Par', [True])],
    ids=["same", "other", "cut"],
)
def test_calls_without_log_probabilities_are_compared_by_function(server, arguments, wrong):
    check = stream_checks(server, quick=True)[0]
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    message = {"tool_calls": [call]}
    whole = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    function = {"function": call["function"] | {"arguments": arguments}}
    delta = {"choices": [{"delta": {"tool_calls": [function]}, "finish_reason": "tool_calls"}]}
    streamed = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
    replies = {
        call.key: ServerReply(200, streamed if call.streams else json.dumps(whole)) for call in check.steps[0].plan({})
    }
    found = [problem for problem in check.judge(replies) if problem.call.key == "replies.stream/1-stream"]
    assert [problem.wrong for problem in found] == wrong


def test_an_ignored_effort_and_prompts_of_another_release_are_named(server):
    [one, *_] = conversations()["efforts"]
    ignored = explain(server, [(one, count_prompt(server, replace(one, level="high")))])
    assert ignored == "the effort in the prompt is off or high, whatever the request says"
    assert remedy(ignored).endswith("if the server passes reasoning_effort to it")
    other = count_prompt(replace(server, release="0731"), one)
    assert explain(server, [(one, other)]) == "the prompts are those of release 0731"


def scored(*values):
    return ScoredText([str(number) for number in range(len(values))], values)


def reference(*values):
    return ServerReference("m", {"math/0": scored(*values)}, {}, {}, noise=0.01)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-1.0] * 96, "right"),
        ([-1.019, -0.981] * 48, "right"),
        ([-1.06, -0.94] * 48, "another quantization, or a damaged tensor"),
        ([-1.0] * 32 + [-1.5, -0.5] * 32, "wrong, from position 32 on"),
        ([-1.5, -1.4] * 48, "wrong, from the beginning on"),
    ],
)
def test_the_verdict_on_numbers(values, verdict):
    other = reference(*([-1.0] * 96))
    assert verdict_of(compare_numbers({"texts/math/0": scored(*values)}, other), other.noise) == verdict


def test_texts_of_another_vocabulary_are_not_compared():
    found = {"texts/math/0": ScoredText(["x"], [-1.0])}
    assert compare_numbers(found, reference(-1.0, -1.0)) is None


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (ServerReply(400, "{}"), ""),
        (ServerReply(500, "{}"), "has status 500"),
        (ServerReply(200, "{}"), "is accepted"),
        (ServerReply(400, " "), "has no body"),
        (ServerReply(0, failure="no answer"), "no response"),
        (ServerReply(0, failure="closed"), "the connection is closed"),
    ],
)
def test_a_refusal_has_a_status_and_a_body(reply, said):
    call = ApiCall("limits.fields/x", "/v1/chat/completions", {})
    problems = list(judge_refusal(call, {call.key: reply}))
    assert [said in one.what for one in problems] == ([True] if said else [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a JSON object"),
        ('{"choices": []}', "not the format"),
        ('{"choices": [{"message": {"content": 5}}]}', "content is not a string"),
    ],
)
def test_an_answer_of_another_format_says_why(text, why):
    with pytest.raises(UnreadableReply, match=why):
        read_chat(ServerReply(200, text), streamed=False)


def test_a_stream_is_put_together():
    events = [
        '{"choices": [{"delta": {"content": "4"}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, '
        '"finish_reason": "tool_calls"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 3}}',
        "[DONE]",
    ]
    found = read_chat(ServerReply(200, "".join(f"data: {one}\n\n" for one in events)), streamed=True)
    assert (found.content, found.finish, found.done, found.usage_last) == ("4", "tool_calls", True, True)
    assert [(call.name, call.arguments) for call in found.calls] == [("f", "{}")]


@pytest.mark.parametrize("model", [{"max_model_len": 8192}, {"meta": {"n_ctx": 8192}}], ids=["vllm", "llama.cpp"])
def test_the_announced_context_length_is_found(model):
    reply = ServerReply(200, json.dumps({"data": [{"id": "nano", **model}]}))
    assert discover._model("http://x", reply, None) == ("nano", 8192)


def test_a_request_that_closing_ends_is_not_taken_for_an_answer(tmp_path, monkeypatch):
    journal = ReplyJournal(tmp_path / "run.jsonl", "http://x")
    one = Sender("http://x", "", 1, 1.0, journal)

    def once(call, *, last):
        one.close()
        return ServerReply(0, failure="closed"), None

    monkeypatch.setattr(one, "_once", once)
    one.send(ApiCall("limits.too-long/prompt", "/v1/chat/completions", {}))
    assert len(journal) == 0
    journal.close()
