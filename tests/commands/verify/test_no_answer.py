"""A server that is too slow or too busy is not called wrong. One that hangs on an invalid request is."""

import json

import pytest

from dsv4cli.engine.verification import limits, sender
from dsv4cli.engine.verification.calls import CHAT, ApiCall, ServerReply
from dsv4cli.engine.verification.check import Check, Problem, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.journal import ReplyJournal
from dsv4cli.engine.verification.limits import judge_refusal, limit_checks
from dsv4cli.engine.verification.long_context import long_checks
from dsv4cli.engine.verification.numbers import number_check
from dsv4cli.engine.verification.reference import read_reference
from dsv4cli.engine.verification.replies import unreadable
from dsv4cli.engine.verification.sender import Sender
from dsv4cli.engine.verification.temperature import temperature_check
from dsv4cli.engine.verification.verify_run import VerifyRun

LATE = [ServerReply(0, failure="no answer", seconds=600.0), ServerReply(429), ServerReply(503)]
CLOSED = ServerReply(0, failure="closed")
SERVER = CheckedServer("http://x", "nano")


def run_with(check, reply):
    """The result of a check if the server gives every request the same response."""
    run = VerifyRun(Sender("http://x", "", 1, 1.0))
    run.sender.send = lambda call, keep=True: reply
    run.run([check], lambda done, total: None)
    return run.results[0]


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
    same = ServerReply(200, json.dumps({"choices": [{"message": {"content": "a"}}]}))
    replies = {call.key: LATE[0] if "cold" in call.key else same for call in check.steps[0].plan({})}
    assert not any(problem.wrong for problem in check.judge(replies) if problem.call.key.partition("/")[2] == "hot-1")


@pytest.mark.parametrize(("long", "verdict"), [(ServerReply(503, seconds=0.1), "no answer"), (None, "wrong")])
def test_short_requests_are_compared_with_a_long_one_that_was_answered(long, verdict):
    [check] = [one for one in long_checks(CheckedServer("http://x", "nano", 4096)) if one.name == "long.fairness"]
    text = json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})
    long, short = long or ServerReply(200, text, seconds=0.1), ServerReply(200, text, seconds=9.0)
    run = VerifyRun(Sender("http://x", "", 1, 1.0))
    run.sender.send = lambda call, keep=True: long if call.key.endswith("/long") else short
    run.run([check], lambda done, total: None)
    assert run.results[0].verdict == verdict


@pytest.mark.parametrize("name", ["limits.malformed", "limits.too-long"])
def test_a_hang_on_an_invalid_request_is_an_error(name):
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == name]
    result = run_with(check, ServerReply(0, failure="no answer", seconds=31.0))
    assert result.verdict == "wrong"
    assert "within 31 s" in result.problems[0].what


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_with_an_invalid_request_is_not_wrong(status):
    [check] = [one for one in limit_checks(SERVER, quick=True) if one.name == "limits.malformed"]
    assert run_with(check, ServerReply(status)).verdict == "no answer"


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
