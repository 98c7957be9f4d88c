"""The log: one line per request with what operators look for, as text and as JSON; clients can forge none."""

import json
import re
from datetime import UTC, datetime

import pytest

from dsv4cli.engine.server.accounts import Account, Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.request_log import LogLine, log_text, request_id_of, request_line
from tests.support.serving import asking, comes, served

FORGED = "a\r\n2026-11-29T00:00:00.000Z 10.0.0.1 POST /v1/chat/completions 200, 5 + 3 tokens, 0.10 s, key bob"


def noon():
    return datetime(2026, 11, 29, 12, 0, 0, 1500, UTC)


def line_of(**given):
    """The line of a request that was answered without a model call."""
    state = {"account": Account(), "request_id": "one", **given.pop("state", {})}
    scope = {"client": ("10.0.0.1", 1), "method": "GET", "path": "/v1/models", "state": state}
    return request_line(scope | given, 200, 0.25)


def test_a_line_begins_with_the_time():
    assert log_text("ready", as_json=False, now=noon) == "2026-11-29T12:00:00.001Z ready"
    assert json.loads(log_text("ready\n", as_json=True, now=noon)) == {
        "time": "2026-11-29T12:00:00.001Z",
        "message": "ready\n",
    }


def test_a_json_line_is_one_line_of_harmless_ascii():
    line = log_text(LogLine("", {"error": "\x00\n\r\x1b\x7f\x85\u2028\u202e\ud800\U000e0001"}), as_json=True)
    assert line.isascii()
    assert line.isprintable()


def test_a_request_has_client_path_status_and_id():
    assert line_of() == "10.0.0.1 GET /v1/models 200, 0.25 s, id one"
    assert line_of(state={"account": Account(ApiKey("alice", b""))}) == (
        "10.0.0.1 GET /v1/models 200, 0.25 s, key alice, id one"
    )
    assert line_of(client=None).startswith("- GET")
    assert line_of(client=("unix", 0)).startswith("unix GET")


@pytest.mark.parametrize(
    "given",
    [
        {"client": (FORGED, 1)},
        {"method": FORGED},
        {"path": f"/{FORGED}"},
        {"path": "/" + 10_000 * "a"},
        {"path": "/\ud800\u202e"},
        {"state": {"refusal": Refusal(400, "no", FORGED)}},
        {"state": {"refusal": Refusal(400, "no", "a 200, 5 + 3 tokens")}},
        {"state": {"refusal": Refusal(400, "no", 10_000 * "a")}},
        {"state": {"refusal": Refusal(400, FORGED)}},
    ],
    ids=lambda given: str(given)[:30],
)
def test_nothing_that_a_client_sends_forges_a_line(given):
    line = line_of(**given)
    assert line.isprintable()
    assert len(line) < 700
    # in front of the duration and the id, which are the server's, there is one status with one path
    assert re.fullmatch(r'(10\.0\.0\.1|-) \S{1,16} /\S* 200(, ("[^"]*"|[^"]*))?, 0\.25 s, id one', line)
    assert "\n" not in log_text(line, as_json=True)


@pytest.mark.parametrize("given", ["a", "req_01:b/c=+@-._", "0" * 128])
def test_a_request_id_is_kept(given):
    assert request_id_of(given) == given


@pytest.mark.parametrize("given", [None, "", "a b", "a\n", "\u00e4", "a,b", "0" * 129, FORGED])
def test_an_id_is_made_where_the_given_one_is_none(given):
    made = request_id_of(given)
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert made != request_id_of(given)


@pytest.fixture(scope="module")
def server():
    with served("random:tiny,layers=3", Accounts([ApiKey("alice", b"key-of-alice")])) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("/v1/models", "key-of-alice", 200), ("/v1/models", "", 401), ("/none", "key-of-alice", 404), ("/", "", 200)],
)
def test_every_response_has_the_request_id(server, path, key, status):
    response = server.send("GET", path, **{"x-api-key": key, "x-request-id": f"mine-{status}"})
    response.read()
    assert response.status == status
    assert response.getheader("x-request-id") == response.getheader("request-id") == f"mine-{status}"
    assert comes(lambda: any(line.endswith(f"id mine-{status}") for line in server.lines))
    assert re.fullmatch("[0-9a-f]{32}", server.send("GET", path).getheader("x-request-id"))


def test_a_model_call_is_logged_with_its_tokens_and_times(server):
    body = asking("the same words " * 20, max_tokens=5, ignore_eos=True)
    headers = {"x-api-key": "key-of-alice", "x-request-id": "of-a-call"}
    for stream in (False, True):
        server.send("POST", "/v1/chat/completions", {**body, "stream": stream}, **headers).read()
    assert comes(lambda: sum(line.endswith("key alice, id of-a-call") for line in server.lines) == 2)
    first, second = (line.fields for line in server.lines if line.endswith("id of-a-call"))
    assert first.keys() == second.keys()
    assert (first["completion_tokens"], first["cached_tokens"], first["finished"]) == (5, 0, True)
    assert second["cached_tokens"] > 50
    assert first["drafted_tokens"] >= first["accepted_tokens"]
    assert 0 < first["first_token_seconds"] < first["seconds"]
    assert (first["client"], first["status"], first["key"]) == ("127.0.0.1", 200, "alice")
    assert json.loads(log_text(server.lines[-1], as_json=True)).items() >= second.items()


def test_drafts_are_logged(nano):
    nano.chat("What is 17 + 25?")
    assert comes(lambda: nano.lines and "drafts accepted" in nano.lines[-1])
    fields = nano.lines[-1].fields
    assert 0 < fields["accepted_tokens"] <= fields["drafted_tokens"]
    assert fields["accepted_tokens"] < fields["completion_tokens"]
