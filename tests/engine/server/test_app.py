"""What surrounds the routes: models, health, metrics, errors in the client's shape, who may ask, the log."""

import json
import re
import sys
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.server import async_engine, metrics
from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.build import SWITCH_SECONDS
from dsv4cli.engine.server.engine_thread import Update
from dsv4cli.engine.server.guard import Guard, is_loopback
from dsv4cli.engine.server.incoming import MOST_BODY
from dsv4cli.engine.server.page import math_library
from dsv4cli.engine.server.refusals import Refusal, refusal_of
from dsv4cli.engine.server.service import MOST_NAMES
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, UnsoundResult, UsageError
from tests.support.serving import asking, comes
from tests.support.slow import slow, slow_rows

KEYS = (ApiKey("first", b"first-key"), ApiKey("second", b"second-key"))


def test_models_are_listed(nano):
    status, document = nano.get("/v1/models")
    assert status == 200
    [one] = document["data"]
    assert (document["object"], one["id"], one["object"], one["max_model_len"]) == ("list", "nano", "model", 8192)
    assert (one["type"], one["display_name"]) == ("model", "nano")
    assert datetime.fromisoformat(one["created_at"]).timestamp() == one["created"]
    assert nano.get("/v1/models/nano") == (200, one)
    status, document = nano.get("/v1/models/other")
    assert (status, document["error"]["code"]) == (404, "model_not_found")


def test_the_page_may_load_nothing_from_elsewhere(nano):
    response = nano.send("GET", "/")
    assert (response.status, response.getheader("content-type")) == (200, "text/html; charset=utf-8")
    policy = response.getheader("content-security-policy") or ""
    assert policy.startswith("default-src 'none'")
    assert {"connect-src 'self'", "frame-ancestors 'none'"} <= {*policy.split("; ")}
    assert b"<title>" in response.read()


def test_the_page_has_its_library_for_formulas(nano):
    response = nano.send("GET", "/math.js?sha256-x")
    assert (response.status, response.getheader("content-type")) == (200, "text/javascript; charset=utf-8")
    assert "immutable" in (response.getheader("cache-control") or "")
    assert response.read() == math_library()


@pytest.mark.usefixtures("nano")
def test_the_event_loop_gives_way_to_the_engine():
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)


def test_health_and_version(nano):
    assert nano.get("/health") == (200, {"status": "ok"})
    assert nano.get("/version")[1]["version"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "no such path; the API is at /v1/chat/completions, "),
        ("GET", "/v1/chat/completions", 405, "this path allows only POST"),
        ("POST", "/health", 405, "this path allows only GET or HEAD"),
        ("PUT", "/version", 405, "this path allows only GET or HEAD"),
    ],
)
def test_what_is_not_there_is_an_error_in_the_usual_shape(nano, method, path, status, message):
    response = nano.send(method, path, b"{}")
    assert response.status == status
    assert json.loads(response.read())["error"]["message"].startswith(message)
    if status == 405:
        assert message == f"this path allows only {(response.getheader('allow') or '').replace(', ', ' or ')}"
    # whoever reads the log finds the reason too
    assert comes(lambda: any(f"{method} {path} {status}, {message}" in line for line in nano.lines))


def numbers(nano):
    lines = [line.rsplit(" ", 1) for line in nano.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_count_what_has_happened(nano):
    before = numbers(nano)
    usage = nano.chat("What is 2 + 3?")["usage"]
    after = numbers(nano)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('dsv4_requests_total{outcome="finished"}') == 1
    assert grown("dsv4_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("dsv4_generated_tokens_total") == usage["completion_tokens"]
    assert grown("dsv4_time_to_first_token_seconds_count") == 1
    assert grown("dsv4_time_between_tokens_seconds_count") >= 1
    assert after["dsv4_requests_running"] == after["dsv4_requests_waiting"] == 0
    assert after["dsv4_drafts_total"] >= after["dsv4_drafts_accepted_total"] > 0


def test_metrics_have_times_of_the_queue_and_of_whole_requests(nano):
    before = numbers(nano)
    nano.chat("What is 2 + 3?", n=2)
    assert comes(nano.at_rest)
    after = numbers(nano)
    for name, count in (("dsv4_queue_seconds", 2), ('dsv4_request_seconds{outcome="finished"}', 2)):
        of_all, _, label = name.partition("{")
        label = label and f"{{{label}"
        assert after[f"{of_all}_count{label}"] - before.get(f"{of_all}_count{label}", 0) == count
        grown = after[f"{of_all}_sum{label}"] - before.get(f"{of_all}_sum{label}", 0)
        assert 0 <= grown < 600
    own = nano.server.config.app.service.metrics
    assert [len(held) for held in (own._arrived, own._last, own._stepped, own._drawing)] == [0] * 4


def test_a_request_that_no_step_has_seen_was_not_queued_to_the_end():
    """Of a request that is cancelled in the queue there is a whole time, and no time of the queue."""
    own, request = metrics.Metrics(), Request([1], Sampling(), Limits())
    own.begin(request)
    own.end(request, "cancelled")
    text = own.text(Usage(), None).decode()
    assert "dsv4_queue_seconds_count 0.0" in text
    assert 'dsv4_request_seconds_count{outcome="cancelled"} 1.0' in text
    own.begin(request)
    arrived = own._arrived[request]
    own.note(Update(request, arrived + 9.0, [], began=arrived + 7.0))
    own.note(Update(request, arrived + 99.0, [], began=arrived + 97.0))  # only the first step counts
    assert "dsv4_queue_seconds_sum 7.0" in own.text(Usage(), None).decode()


def test_metrics_describe_the_server_and_its_capacity(nano):
    found = numbers(nano)
    [info] = [name for name in found if name.startswith("dsv4_info{")]
    assert {'model="nano"', 'release="v4"', f'version="{nano.get("/version")[1]["version"]}"'} <= {
        *info[10:-1].split(",")
    }
    room = nano.engine.max_request_tokens
    assert [found[f"dsv4_capacity_{name}"] for name in metrics.CAPACITY] == [64, 256, 8192, room]
    assert 0 < found["dsv4_cache_used_tokens"] <= room + 128


def counted(nano, path, body):
    """How a call's usage and the metrics of tokens have grown."""
    before = numbers(nano)
    status, document = nano.post(path, body)
    assert status == 200
    assert comes(lambda: nano.at_rest())
    after, usage = numbers(nano), document["usage"]
    names = ("dsv4_prompt_tokens_total", "dsv4_cached_tokens_total", "dsv4_generated_tokens_total")
    given = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    return given, tuple(after[name] - before.get(name, 0) for name in names)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", asking("What is 17 + 25?", n=2)),
        ("/v1/chat/completions", asking("What is 17 + 25?", stop=["5"])),  # drafts draw beyond the stop text
        *slow_rows(
            ("/v1/completions", {"prompt": ["2 + 3", "2 + 4"], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 4})
        ),
        *slow_rows(
            ("/v1/completions", {"prompt": "2 + 3", "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0})
        ),
        *slow_rows(("/v1/completions", {"prompt": "What is 17 + 25?", "stop": "5", "max_tokens": 40})),
    ],
)
def test_metrics_count_the_tokens_of_the_usage(nano, path, body):
    usage, metrics = counted(nano, path, body)
    assert metrics == usage


def test_metrics_count_cached_tokens_once_for_all_answers(nano):
    body = asking("Which of these is larger: 17 + 25 or 18 + 23?", n=3, max_tokens=4)
    counted(nano, "/v1/chat/completions", body)
    usage, metrics = counted(nano, "/v1/chat/completions", body)
    assert metrics == usage
    assert 0 < metrics[1] < metrics[0]


@pytest.mark.parametrize(
    ("method", "path", "headers", "label"),
    [
        ("POST", "/v1/chat/completions", {}, 'path="/v1/chat/completions",status="400"'),
        ("GET", "/v1/chat/completions", {}, 'path="/v1/chat/completions",status="405"'),
        ("GET", "/v1/models/none", {}, 'path="/v1/models/{name:path}",status="404"'),
        ("GET", "/none", {}, 'path="other",status="404"'),
        ("GET", "/version", {"origin": "http://elsewhere"}, 'path="/version",status="403"'),
        ("GET", "/health", {}, 'path="/health",status="200"'),
    ],
)
def test_metrics_count_http_requests(nano, method, path, headers, label):
    before = numbers(nano)
    nano.send(method, path, {}, **headers).read()
    after, name = numbers(nano), f"dsv4_http_requests_total{{{label}}}"
    assert after[name] - before.get(name, 0) == 1
    refused = name.replace("http_requests", "refusals")
    assert after.get(refused, 0) - before.get(refused, 0) == ("200" not in label)


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "2 + 3"})])
def test_an_answer_that_ends_with_a_stop_text_is_finished(nano, path, prompt):
    before = numbers(nano)
    body = asking("What is 17 + 25?") | {"ignore_eos": True, "stop": ["5", " "], "max_tokens": 40} | prompt
    assert nano.post(path, body)[1]["choices"][0]["finish_reason"] == "stop"
    assert comes(lambda: nano.at_rest())
    after = numbers(nano)
    outcomes = [f'dsv4_requests_total{{outcome="{outcome}"}}' for outcome in ("finished", "cancelled")]
    assert [after.get(name, 0) - before.get(name, 0) for name in outcomes] == [1, 0]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("no room", "shorten it"), 400, "no room"),
        (
            NotEnoughMemory("9 of 10 GB", "buy more"),
            503,
            "the server has no memory left for this request; try again later",
        ),
        (UnsoundResult("logits are not finite", ""), 500, "logits are not finite"),
        (ValueError("/home/me"), 500, "internal server error; see the server's log"),
    ],
    ids=repr,
)
def test_what_a_client_is_told_of_an_error(error, status, message):
    refusal = refusal_of(error)
    assert (refusal.status, refusal.message) == (status, message)


def test_a_fault_of_ours_is_a_500_that_does_not_tell_it(nano, monkeypatch):
    monkeypatch.setattr(metrics, "generate_latest", lambda _: 1 / 0)
    status, document = nano.get("/metrics")
    assert (status, document["error"]["type"]) == (500, "server_error")
    assert "Zero" not in document["error"]["message"]
    assert "ZeroDivisionError" in nano.bugs.pop()


def test_a_prompt_fits_the_cache_as_well_as_the_context(nano):
    service, small = nano.server.config.app.service, SimpleNamespace(max_request_tokens=100)
    assert replace(service, engine=small).context == 100
    assert replace(service, engine=SimpleNamespace(max_request_tokens=None)).context == 8192
    with pytest.raises(Refusal, match=r"maximum context length is 100 tokens\. However, .* resulted in 100 tokens"):
        replace(service, engine=small).tokens_left([1] * 100)


def test_the_log_has_prompts_where_that_was_asked_for_and_so_many_names_of_fields(nano):
    lines = []
    service = replace(nano.server.config.app.service, log=lines.append, log_prompts=True, _said=set())
    service.say_prompt("secret")
    assert lines == ["prompt: secret"]
    service.say_ignored(f"a{number}" for number in range(2 * MOST_NAMES))
    assert len(lines) == 1 + MOST_NAMES


def test_the_log_has_a_line_a_request_and_no_prompt(nano):
    def asked():
        return [line for line in nano.lines if "/v1/chat" in line]

    lines = len(asked())
    nano.chat("What is 2 + 3?", max_tokens=2)
    assert comes(lambda: len(asked()) > lines)  # it comes behind the answer
    nano.post("/v1/chat/completions", asking("secret") | {"temperature": "secret"})
    assert comes(lambda: len(asked()) > lines + 1)
    fine, wrong = asked()[-2:]
    counts = r"\d+ \+ \d+ tokens(, \d+ cached)?(, \d+ of \d+ drafts accepted)?, first token after [\d.]+ s"
    ends = r"[\d.]+ s, id [0-9a-f]{32}"
    assert re.fullmatch(rf"127\.0\.0\.1 POST /v1/chat/completions 200, {counts}, {ends}", fine)
    assert re.fullmatch(rf"127\.0\.0\.1 POST /v1/chat/completions 400, temperature, {ends}", wrong)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_stream_that_fails_says_so_and_the_log_why(nano, monkeypatch, path):
    def fail():
        raise UnsoundResult("logits are not finite", "")

    failed, before = 'dsv4_requests_total{outcome="failed"}', numbers(nano)
    refused = f'dsv4_refusals_total{{path="{path}",status="500"}}'
    with monkeypatch.context() as patched:
        patched.setattr(nano.engine, "step", fail)
        events = nano.stream(path, asking("Hi", prompt="Hi", max_tokens=4))
    assert any("logits are not finite" in json.dumps(data) for _, data in events)
    assert comes(lambda: re.search(rf"{path} 200, .*, logits are not finite, [\d.]+ s, id", nano.lines[-1]))
    assert comes(nano.at_rest)
    assert numbers(nano)[failed] == before.get(failed, 0) + 1
    assert numbers(nano)[refused] == before.get(refused, 0) + 1


@pytest.mark.parametrize(
    ("path", "fields", "sign"),
    [
        ("/v1/chat/completions", {}, b": waiting\n\n"),
        *slow_rows(("/v1/completions", {"prompt": "Hi"}, b": waiting\n\n")),
        ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 0}, b": waiting\n\n"),
        ("/v1/messages", {}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_who_waits_is_told_so(nano, monkeypatch, path, fields, sign):
    monkeypatch.setattr(async_engine, "IDLE_SECONDS", 0.001)
    sent = nano.send("POST", path, asking("Hi", max_tokens=2, stream=True) | fields).read()
    assert sent.count(sign) > 1


@pytest.mark.parametrize(
    ("path", "fields", "sign"),
    [
        ("/v1/completions", {"prompt": ["a b c d " * 20] * 2, "echo": True, "logprobs": 0}, b": waiting\n\n"),
        ("/v1/messages", {}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_who_is_sent_nothing_of_what_comes_is_told_that_it_waits(nano, monkeypatch, path, fields, sign):
    """Thinking that is not shown, and scores that are shown at the end."""
    updates = async_engine.EngineCall.updates

    async def some(call):
        while not (found := await updates(call)):
            pass
        return found

    app = nano.server.config.app
    monkeypatch.setattr(app, "service", replace(app.service, defaults=replace(app.service.defaults, think="high")))
    monkeypatch.setattr(async_engine.EngineCall, "updates", some)
    monkeypatch.setattr(async_engine, "IDLE_SECONDS", 0.001)
    sent = nano.send("POST", path, asking("What is 17 + 25?", max_tokens=8, stream=True) | fields).read()
    assert sent.count(sign) > 2


@pytest.mark.parametrize("path", [*slow("/v1/chat/completions", "/v1/completions"), "/v1/messages"])
def test_who_waits_for_a_long_prompt_is_told_so(nano, monkeypatch, path):
    """Each step that reads a part of it is an update without tokens."""
    updates, steps = async_engine.EngineCall.updates, []

    async def some(call):
        if len(steps) < 3:
            steps.append([Update(next(iter(call.open)), 0.0, [])])
            return steps[-1]
        while not (found := await updates(call)):
            pass
        return found

    monkeypatch.setattr(async_engine.EngineCall, "updates", some)
    monkeypatch.setattr(async_engine, "IDLE_SECONDS", 0.0)
    sent = nano.send("POST", path, asking("Hi", prompt="Hi", max_tokens=1, stream=True)).read()
    assert sent.count(b": waiting\n\n") + sent.count(b"event: ping\n") >= 3


def test_a_body_has_a_limit(nano):
    connection = nano.connect()
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", str(MOST_BODY + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, response.getheader("connection")) == (413, "close")
    assert nano.post("/v1/chat/completions", b"{}", **{"content-encoding": "gzip"})[0] == 415


@pytest.mark.parametrize("encoding", ["", "identity", "Identity", " IDENTITY "])
def test_a_body_that_is_not_compressed(nano, encoding):
    status, document = nano.post("/tokenize", b'{"prompt": "a"}', **{"content-encoding": encoding})
    assert (status, document["count"]) == (200, 1)


def test_a_body_may_begin_with_a_byte_order_mark(nano):
    assert nano.post("/tokenize", b'\xef\xbb\xbf{"prompt": "a"}')[1] == nano.post("/tokenize", {"prompt": "a"})[1]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer first-key"}, None),
        ({"authorization": "bearer second-key"}, None),
        ({"x-api-key": "second-key"}, None),
        ({"authorization": "Bearer first-key2"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"x-api-key": "first-ke\u00e9"}, 401),
    ],
    ids=str,
)
def test_a_key_is_asked_for(headers, status):
    refused(Guard(Accounts(KEYS), "0.0.0.0"), headers, status)


def refused(guard, headers, status, path="/v1/models"):
    if status is None:
        guard.check(path, Headers({"host": "a", **headers}))
        return
    with pytest.raises(Refusal) as error:
        guard.check(path, Headers({"host": "a", **headers}))
    assert error.value.status == status


@pytest.mark.parametrize("path", ["/", "/math.js", "/health"])
def test_a_monitor_and_the_page_need_no_key(path):
    refused(Guard(Accounts(KEYS), "0.0.0.0"), {}, None, path)


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, None),
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, None),
        ("::1", {"host": "[::1]:8000"}, None),
        ("127.0.0.1", {"host": "evil.example"}, 403),
        ("127.0.0.1", {"host": ""}, 403),
        ("127.0.0.1", {"host": "["}, 403),
        ("0.0.0.0", {"host": "["}, None),
        ("0.0.0.0", {"host": "gpu7", "origin": "http://["}, 403),
        ("0.0.0.0", {"host": "gpu7:8000"}, None),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "http://localhost:8000"}, None),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "https://evil.example"}, 403),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "null"}, 403),
        ("0.0.0.0", {"host": "gpu7:8000", "origin": "http://gpu7:9000"}, 403),
        ("0.0.0.0", {"host": "gpu7:8000", "origin": "http://not-gpu7:8000"}, 403),
    ],
    ids=str,
)
def test_pages_of_other_sites_cannot_ask(host, headers, status):
    refused(Guard(Accounts(), host), headers, status)


def test_what_only_this_machine_reaches():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gpu7", "")] == [False] * 5
