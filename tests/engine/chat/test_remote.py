"""A conversation with a server: what its events make, how it is stopped, and when it is asked to count."""

import socket
import threading

import pytest

from dsv4cli.engine.chat import api_client
from dsv4cli.engine.chat.api_client import ApiClient
from dsv4cli.engine.chat.remote import RemoteAnswer, RemoteConversation, RemoteSampling
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import ServerError
from tests.support.chat_server import MODEL, ChatServer, Says
from tests.support.waiting import comes


@pytest.fixture
def server():
    with ChatServer().running() as one:
        yield one


def conversation(server, **limits):
    return RemoteConversation(ApiClient(server.url), MODEL, "off", Limits(**limits))


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models/", "/v1/messages"])
def test_a_url_may_have_the_path_of_a_request(end):
    assert ApiClient(f"http://localhost:8000/llm{end}").url == "http://localhost:8000/llm"


def test_https_to_a_server_without_tls_says_so(server):
    with pytest.raises(ServerError, match="cannot reach a server") as caught:
        ApiClient(server.url.replace("http://", "https://")).get("/v1/models")
    assert caught.value.remedy == "the server does not use TLS: write http:// instead of https://"


def user(text):
    return {"role": "user", "content": text}


def test_it_may_be_broken_off_until_something_has_come(server):
    server.script = [Says(["a", "b"])]
    one = conversation(server)
    seen = [(one.breakable, answer.sampled) for answer, _ in one.reply([user("x")], Sampling())]
    assert seen[0] == (True, 0)
    assert (False, 1) in seen
    assert all(breakable == (drawn == 0) for breakable, drawn in seen)
    assert (one.prompt_tokens, one.reused, one.prefilled) == (20, 0, 20)


def test_after_a_stop_nothing_more_is_shown_even_of_what_has_come(server):
    server.script = [Says([f"{number} " for number in range(50)])]
    one, shown, answers = conversation(server), [], []
    for answer, pieces in one.reply([user("x")], Sampling()):
        shown += [text for _, text in pieces]
        answers.append(answer)
        if len(shown) == 1:
            assert server.answered.wait(60)  # the rest has been sent
            one.stop()
    assert shown == ["0 "]
    assert answers[-1].message()[0]["content"] == "0 "


def test_a_stop_from_another_thread_ends_a_wait(server):
    server.script = [Says(["a", "b"], pause=60)]
    one = conversation(server)
    # an answer that is awaited to its end has a reason to finish
    threading.Thread(target=lambda: (comes(lambda: server.bodies), one.stop())).start()
    *_, (answer, _) = one.reply([user("x")], Sampling())
    assert answer.finish is None


def test_a_new_question_ends_the_last_answer(server):
    server.script = [Says(["a "] * 500, pause=0.01), Says(["b"])]
    one = conversation(server)
    first = one.reply([user("x")], Sampling())
    while not next(first)[1]:
        pass
    *_, (answer, _) = one.reply([user("y")], Sampling())
    assert answer.message()[0]["content"] == "b"
    assert server.ended.wait(60)


def test_what_is_sent_is_what_was_chosen(server):
    for sampling, sent in (
        (RemoteSampling(), {}),
        (RemoteSampling().chosen(None, 0.5, None).chosen(0.25, None, 1), {"temperature": 0.25, "top_p": 0.5}),
        (RemoteSampling().chosen(None, None, 1, {"top_k": 7, "min_p": None}), {"top_k": 7}),
        (Sampling(0.75, 1.0), {"temperature": 0.75, "top_p": 1.0}),
    ):
        list(conversation(server).reply([user("x")], sampling))
        body = server.bodies.pop()
        assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in body} == sent


def test_a_server_is_asked_to_count_only_where_there_may_be_too_many(server):
    server.models[0]["max_model_len"] = 65536
    one = conversation(server, max_tokens=8192)
    turns = [user("a" * 30000), {"role": "assistant", "content": "b"}, user("c" * 28000)]
    assert one.messages_to_drop(turns[:1]) == server.counted == 0
    assert one.messages_to_drop(turns) == 2
    assert server.counted > 0
    server.counts = False
    assert one.messages_to_drop(turns) == 0
    assert 0 < one.left(turns) <= 65536 - 58001
    assert one.most_tokens("€") == 3


def test_cached_tokens_are_not_read(server):
    server.script = [
        Says(["a"], usage={"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}})
    ]
    one = conversation(server)
    list(one.reply([user("x")], Sampling()))
    assert (one.prompt_tokens, one.reused, one.prefilled) == (9, 7, 2)


@pytest.mark.parametrize("models", [[], [{}], ["x"], None])
def test_a_server_that_names_no_model(server, models):
    server.models = models
    with pytest.raises(ServerError, match="does not respond as OpenAI's API does"):
        conversation(server)


@pytest.mark.parametrize("counted", [{}, {"count": "many", "tokens": 7}, {"count": None, "tokens": {}}])
def test_a_server_that_counts_in_another_format(server, monkeypatch, counted):
    monkeypatch.setattr(ApiClient, "post", lambda *_: counted)
    one = conversation(server)
    for ask in (lambda: one.tokens([user("x")]), lambda: one.text_ids("x")):
        with pytest.raises(ServerError, match="does not respond as OpenAI's API does"):
            ask()


def test_who_listens_and_says_nothing_is_no_server(monkeypatch):
    monkeypatch.setattr(api_client, "LONGEST_WAIT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ApiClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ServerError, match=r"http:.* did not respond in time: timed out"):
            client.get("/v1/models")


def test_halves_of_a_character_become_one():
    answer = RemoteAnswer()
    for part in ("a\ud83d", "\ude00b", "\ud83d c"):
        answer.push({"choices": [{"delta": {"content": part}}]})
    assert answer.message()[0]["content"] == "a\U0001f600b\ufffd c"


ODD = (
    {}, {"choices": None}, {"choices": []}, {"choices": [{}]}, {"choices": [{"delta": None}]}, {"usage": None},
    {"choices": [{"delta": {"tool_calls": [{}]}, "finish_reason": "content_filter"}]}, {"usage": {"x": 1}},
)  # fmt: skip


def test_halves_of_a_character_become_one_in_a_call_too():
    answer = RemoteAnswer()
    for function in (
        {"name": "f", "arguments": '{"a": "\ud83d'},
        {"arguments": '\ude00"'},
        {"arguments": ', "\ud83d": 1}'},
    ):
        answer.push({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "1\ud83d", "function": function}]}}]})
    answer.push({"choices": [{"finish_reason": "tool_calls"}]})
    [call] = answer.message()[0]["tool_calls"]
    function = {"name": "f", "arguments": '{"a": "😀", "\ufffd": 1}'}
    assert call == {"type": "function", "id": "1\ufffd", "function": function}


def test_events_that_say_nothing():
    answer = RemoteAnswer()
    for event in ODD:
        assert answer.push(event) == []
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    "event",
    [{"choices": 7}, {"choices": [{"delta": {"content": 7}}]}, {"usage": {"prompt_tokens": "x"}}, {"usage": [7]}],
)
def test_events_of_another_format(event):
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError)):
        RemoteAnswer().push(event)
