"""A server that is too slow or too busy is not called wrong. One that hangs on an invalid request is."""

import json
from dataclasses import replace

import pytest

from dsv4cli.engine.verification import discover as discovery
from dsv4cli.engine.verification import limits, sender
from dsv4cli.engine.verification.calls import CHAT, ApiCall, ServerReply
from dsv4cli.engine.verification.check import Check, Problem, fixed, verdict_of_run
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.discover import PROBES, ServerHints, discover
from dsv4cli.engine.verification.journal import ReplyJournal
from dsv4cli.engine.verification.limits import judge_refusal, limit_checks
from dsv4cli.engine.verification.long_context import long_checks
from dsv4cli.engine.verification.numbers import number_check
from dsv4cli.engine.verification.plan import NEEDS, Scope, plan_checks
from dsv4cli.engine.verification.reference import read_reference
from dsv4cli.engine.verification.replies import unreadable
from dsv4cli.engine.verification.sender import Sender
from dsv4cli.engine.verification.temperature import temperature_check
from dsv4cli.engine.verification.verify_run import VerifyRun
from dsv4cli.errors import ServerError

LATE = [ServerReply(0, failure="no answer", seconds=600.0), ServerReply(429), ServerReply(503)]
CLOSED = ServerReply(0, failure="closed")
SERVER = CheckedServer("http://x", "nano")


def results_of(checks, answer):
    """The results of checks if the server gives these responses to their calls."""
    run = VerifyRun(Sender("http://x", "", 1, 1.0))
    run.sender.send = lambda call, keep=True: answer(call)
    run.run(checks, lambda done, total: None)
    return run.results


def run_with(check, reply):
    """The result of a check if the server gives every request the same response."""
    return results_of([check], lambda call: reply)[0]


def said(text):
    return ServerReply(200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}))


@pytest.mark.parametrize(
    ("reply", "verdict"), [*((one, "no answer") for one in LATE), (CLOSED, "wrong"), (ServerReply(500), "wrong")]
)
def test_no_answer_in_time_is_no_error(reply, verdict):
    calls = [SERVER.chat("replies.x/0", "hi")]
    check = Check("replies.x", "", "", [fixed(calls)], lambda replies: unreadable(calls, replies))
    assert run_with(check, reply).verdict == verdict


def test_a_late_response_that_no_judge_mentions_is_reported():
    """As the model's own text, without which the answers are compared with nothing."""
    calls = [SERVER.chat(f"replies.x/{number}", "hi") for number in range(2)]
    result = run_with(Check("replies.x", "", "", [fixed(calls)], lambda replies: ()), LATE[0])
    assert result.verdict == "no answer"
    assert [(problem.call, len(problem.evidence)) for problem in result.problems] == [(calls[0], 2)]


def test_an_error_outweighs_a_missing_answer():
    calls = [SERVER.chat("replies.x/0", "hi")]
    problems = [Problem("an error"), *unreadable(calls, {calls[0].key: LATE[0]})]
    check = Check("replies.x", "", "", [fixed(calls)], lambda replies: problems)
    assert run_with(check, LATE[0]).verdict == "wrong"


@pytest.mark.parametrize(
    "check",
    [
        temperature_check(SERVER, quick=False),
        number_check(CheckedServer("http://x", "nano", echo=True), read_reference("nano"), quick=True),
    ],
    ids=["temperature", "numbers"],
)
def test_nothing_else_is_concluded_from_missing_answers(check):
    assert run_with(check, LATE[0]).verdict == "no answer"


def test_greedy_answers_need_one_at_temperature_0_to_be_an_error():
    check = temperature_check(SERVER, quick=True)
    replies = {call.key: LATE[0] if "cold" in call.key else said("a") for call in check.steps[0].plan({})}
    assert not any(problem.wrong for problem in check.judge(replies) if problem.call.key.partition("/")[2] == "hot-1")


@pytest.mark.parametrize(("long", "verdict"), [(ServerReply(503, seconds=0.1), "no answer"), (None, "wrong")])
def test_short_requests_are_compared_with_a_long_one_that_was_answered(long, verdict):
    [check] = [one for one in long_checks(CheckedServer("http://x", "nano", 4096)) if one.name == "long.fairness"]
    long, short = long or replace(said("a"), seconds=0.1), replace(said("a"), seconds=9.0)
    [result] = results_of([check], lambda call: long if call.key.endswith("/long") else short)
    assert result.verdict == verdict


@pytest.mark.parametrize("late", LATE)
def test_a_request_without_an_answer_does_not_excuse_what_others_show(late):
    [fairness] = [one for one in long_checks(CheckedServer("http://x", "nano", 4096)) if one.name == "long.fairness"]
    times = {"long": 0.1, "1": 9.0}

    def answer(call, missing):
        kind = call.key.rpartition("/")[2]
        return replace(late, seconds=99.0) if kind == missing else replace(said("a"), seconds=times.get(kind, 0.0))

    [result] = results_of([fairness], lambda call: answer(call, "0"))
    slow = [problem for problem in result.problems if problem.what.startswith("short requests wait")]
    assert [(problem.wrong, problem.call.key) for problem in slow] == [(True, "long.fairness/1")]
    assert result.verdict == "wrong"
    # only the late one is slow
    times["1"] = 0.0
    [result] = results_of([fairness], lambda call: answer(call, "0"))
    assert result.verdict == "no answer"

    [result] = results_of([temperature_check(SERVER, quick=False)], lambda call: answer(call, "hot-1"))
    [greedy] = [problem for problem in result.problems if "at temperature 2" in problem.what]
    assert (greedy.wrong, greedy.call.key) == (True, "replies.temperature/hot-2")
    assert greedy.what.startswith("3 answers at temperature 2")


def offering(missing=(), late=LATE[0]):
    """What `discover` finds of a server that offers everything, but is late with some of the requests."""
    numbers = [-0.5] * 12

    def send(call):
        if call.key in missing:
            return late
        documents = {
            "target/models": {"data": [{"id": "nano", "max_model_len": 8192}]},
            "target/echo": {"choices": [{"logprobs": {"token_logprobs": numbers}}], "usage": {"prompt_tokens": 77}},
            "target/completions": {"usage": {"prompt_tokens": 77}},
            "target/tokenize": {"count": 77},
        }
        message = {"message": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}
        chat = {"choices": [message], "usage": {"prompt_tokens": 70 if call.key == "target/off" else 71}}
        return ServerReply(200, json.dumps(documents.get(call.key, chat)))

    return discover("http://x", send, ServerHints(model="nano"))


def test_a_server_that_answers_has_nothing_unknown():
    assert offering().unknown == {}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        (["target/models"], {"limit"}),
        (["target/logprobs"], {"logprobs"}),
        (["target/echo"], {"echo"}),
        (["target/echo", "target/completions"], {"echo", "completions"}),
        (["target/echo", "target/completions", "target/tokenize"], {"echo", "completions", "tokenizer"}),
        (["target/tokenize"], set()),
        (["target/off"], {"release"}),
        (["target/effort"], {"release"}),
        (["target/messages", "target/responses"], {"messages", "responses"}),
    ],
)
def test_what_a_late_server_offers_is_unknown(missing, unknown, late, monkeypatch):
    # no vocabulary has the count of the answer, and only one that of the prompt
    words = type("Words", (), {"encode": lambda self, text: [0] * (77 if text == discovery.PROBE else 999)})()
    monkeypatch.setattr(discovery, "known_tokenizers", lambda model: [("words", words)])
    monkeypatch.setattr(CheckedServer, "estimate", lambda *_: 0)
    monkeypatch.setattr(CheckedServer, "_tokens", lambda *_: 0)
    server = offering(missing, late)
    if late.status and unknown & {"messages", "responses"}:
        unknown = set()  # it has them, and is busy
    assert server.unknown.keys() == unknown
    assert all(server.record()[offer] is None for offer in unknown & server.record().keys())
    for problem in server.unknown.values():
        assert (problem.wrong, problem.late, problem.call.key in missing) == (False, True, True)


@pytest.mark.parametrize(
    ("model", "missing", "what"),
    [
        (None, ["target/models"], "lists no models"),
        ("nano", ["target/logprobs", "target/chat"], "cannot answer a chat"),
    ],
)
def test_a_server_whose_first_answers_are_missing_may_have_more_time(model, missing, what):
    for reply, remedy in [(LATE[0], "run again with a longer --timeout"), (ServerReply(404), "URL")]:
        with pytest.raises(ServerError, match=what) as caught:
            discover(
                "http://x",
                lambda call, reply=reply: reply if call.key in missing else said("a"),
                ServerHints(model=model),
            )
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("offer", PROBES)
def test_a_check_that_depends_on_a_late_answer_does_not_run(offer):
    late = Problem("late", call=SERVER.chat("target/x", "hi"), wrong=False, late=True)
    everything = CheckedServer("http://x", "nano", 8192, logprobs=True, completions=True, echo=True, messages=True)
    known, slow = (
        plan_checks(replace(everything, unknown=unknown), Scope(long=True), list, read_reference("nano"))
        for unknown in ({}, {offer: late})
    )
    beginnings = tuple(name for name, needed in NEEDS.items() if offer in needed)
    results = results_of([check for check in slow if check.name.startswith(beginnings)], lambda call: said("a"))
    assert [result.requests for result in results] == [0] * len(results)
    assert {result.verdict for result in results} == {verdict_of_run(results)} == {"no answer"}
    assert all(result.problems == (late,) for result in results)
    others = [pair for pair in zip(known, slow, strict=True) if not pair[0].name.startswith(beginnings)]
    assert len(others) > 10
    assert all(len(one.steps) == len(other.steps) and one.skip == other.skip for one, other in others)


def test_every_check_that_is_skipped_may_be_skipped_for_a_late_answer():
    """A check cannot be called skipped if a request that finds out what it needs had no answer."""
    bare = plan_checks(SERVER, Scope(long=True), list, read_reference("nano"))
    skipped = [check.name for check in bare if check.skip]
    assert len(skipped) > 10
    assert all(any(name.startswith(beginning) for beginning in NEEDS) for name in skipped)
    assert {need for needed in NEEDS.values() for need in needed} == PROBES.keys()
    assert not [name for name in NEEDS if not any(check.name.startswith(name) for check in bare)]


@pytest.mark.parametrize("name", ["limits.malformed", "limits.too-long"])
def test_a_hang_on_an_invalid_request_is_an_error(name):
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == name]
    result = run_with(check, ServerReply(0, failure="no answer", seconds=31.0))
    assert result.verdict == "wrong"
    assert "within 31 s" in result.problems[0].what


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_with_an_invalid_request_is_not_wrong(status):
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == "limits.malformed"]
    for text in ("", '{"error": {"message": "busy"}}'):
        assert run_with(check, ServerReply(status, text)).verdict == "no answer"


def test_a_slow_server_has_more_time_for_refusals():
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == "limits.malformed"]
    slow = {"replies.x/0": ServerReply(200, seconds=100.0), "replies.x/1": LATE[0]}
    waits = [call.seconds for replies in ({}, slow) for call in check.steps[0].plan(replies)]
    assert waits == [limits.PATIENCE, 200.0]
    call = ApiCall("limits.fields/x", CHAT, {}, seconds=30.0)
    assert next(judge_refusal(call, {call.key: LATE[0]})).wrong


def test_no_more_is_sent_to_a_server_that_stops_answering(monkeypatch):
    one, sent = Sender("http://x", "", 1, 1.0), []
    answers = iter([LATE[0], LATE[0], ServerReply(200), LATE[0], LATE[0], LATE[0]])
    monkeypatch.setattr(one, "_once", lambda call, last: (sent.append(call.key) or next(answers), None))
    calls = [SERVER.chat(f"replies.x/{number}", "hi") for number in range(9)]
    found = one.send_all(calls, 1, lambda: None)
    assert sent == [call.key for call in calls[:6]]
    assert [found[call.key].failure for call in calls[6:]] == ["not sent"] * 3
    assert "not sent" in found[calls[8].key].summary


def test_a_hang_on_an_invalid_request_is_no_reason_to_send_no_more(monkeypatch):
    one = Sender("http://x", "", 1, 1.0)
    monkeypatch.setattr(one, "_once", lambda call, last: (LATE[0], None))
    calls = [ApiCall(f"limits.x/{number}", CHAT, {}, seconds=30.0) for number in range(9)]
    assert {reply.failure for reply in one.send_all(calls, 1, lambda: None).values()} == {"no answer"}


def test_an_invalid_request_that_is_not_sent_is_no_error():
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == "limits.malformed"]
    result = run_with(check, ServerReply(0, failure="not sent"))
    assert (result.verdict, result.problems[0].what) == ("no answer", "an invalid request (cut) is not checked")


@pytest.mark.parametrize("reply", LATE)
def test_a_missing_answer_is_requested_again_when_a_run_continues(reply, tmp_path, monkeypatch):
    journal = ReplyJournal(tmp_path / "run.jsonl", "http://x")
    one = Sender("http://x", "", 1, 1.0, journal)
    monkeypatch.setattr(sender, "BACKOFF", ())
    monkeypatch.setattr(one, "_once", lambda call, last: (reply, None))
    call = SERVER.chat("replies.x/0", "hi")
    assert one.send(call) == reply
    one.keep([call, SERVER.chat("replies.x/1", "hi")], {"replies.x/0": ServerReply(200), "replies.x/1": reply})
    assert len(journal) == 0
    journal.close()
