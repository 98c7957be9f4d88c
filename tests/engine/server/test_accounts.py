"""Accounts of API keys: rate limits, prompts that only their own key finds in the prefix cache, keys that change."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from dsv4cli.engine.server.accounts import ANYONE, Account, Accounts, RateLimit
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.refusals import Refusal
from tests.support.serving import asking, comes, served
from tests.support.slow import slow

SMALL = "random:tiny,layers=3"
ALICE, BOB = ApiKey("alice", b"key-of-alice"), ApiKey("bob", b"key-of-bob")
LONG = "the same words for everyone " * 5


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_limit_refills_evenly_and_holds_a_minute():
    clock = Clock()
    limit = RateLimit(30, clock)
    limit.spend(30)
    assert limit.wait() == 2
    clock.now += 2
    assert limit.wait() == 0
    limit.spend(31)  # an answer may take more than there is
    assert limit.wait() == 62
    clock.now += 10_000
    limit.spend(29)
    assert limit.wait() == 0
    limit.spend(1)
    assert limit.wait() == 2


def test_a_limit_that_changes_remembers_what_was_spent():
    clock = Clock()
    limit = RateLimit(60, clock)
    limit.spend(50)
    limit.change(120)
    limit.spend(69)
    assert limit.wait() == 0
    limit.change(60)
    assert limit.wait() == 60
    limit.change(None)
    limit.spend(10**9)
    assert limit.wait() == 0
    limit.change(60)
    assert limit.wait() == 0


@pytest.mark.parametrize("what", ["requests", "tokens"])
def test_a_limit_that_is_used_up_is_a_429(what):
    account = Account(ApiKey("a", b"", **{what: 2}))
    account.admit()
    account.charge(1)
    account.admit()
    account.charge(1)
    with pytest.raises(Refusal, match=f"used its {what} per minute: try again in (29|30) s") as error:
        account.admit()
    response = error.value.response(anthropic=False)
    assert (response.status_code, response.headers["retry-after"]) == (429, str(error.value.retry_after))


def test_anyone_has_no_limits():
    for _ in range(1000):
        ANYONE.admit()
        ANYONE.charge(10**6)


def test_keys_are_replaced():
    accounts = Accounts([ALICE, BOB])
    alice = accounts.find(ALICE.secret)
    accounts.replace([ApiKey("alice-2", ALICE.secret, requests=1), ApiKey("carol", b"key-of-carol")])
    assert accounts.find(ALICE.secret) is alice
    assert alice.name == "alice-2"
    assert accounts.find(BOB.secret) is None
    assert accounts.find(b"key-of-carol").name == "carol"
    alice.admit()
    with pytest.raises(Refusal):
        alice.admit()


def test_the_scope_of_a_key_is_its_own_whatever_its_name():
    accounts = Accounts([ALICE, BOB])
    scopes = [accounts.find(key.secret).scope for key in (ALICE, BOB)]
    assert len({*scopes, ""}) == 3
    accounts.replace([ApiKey("alice", BOB.secret)])
    assert accounts.find(BOB.secret).scope == scopes[1]
    assert Accounts([ALICE], share_cache=True).find(ALICE.secret).scope == ""


@pytest.fixture(scope="module")
def keyed():
    """A server with two keys and no limits."""
    with served(SMALL, Accounts([ALICE, BOB])) as one:
        yield one


def cached(server, key, path="/v1/chat/completions", **fields):
    """How many tokens of a prompt are found in the cache."""
    body = {**asking(LONG, max_tokens=1), **fields}
    status, document = server.post(path, body, **{"x-api-key": key.secret.decode()})
    assert status == 200, document
    usage = document["usage"]
    return usage.get("cache_read_input_tokens", usage.get("prompt_tokens_details", {}).get("cached_tokens"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", *slow("/v1/messages", "/v1/completions")])
def test_two_keys_never_share_a_hit(keyed, path):
    prompt = {"prompt": path + LONG} if path == "/v1/completions" else {"system": path}
    assert cached(keyed, ALICE, path, **prompt) == 0
    assert cached(keyed, BOB, path, **prompt) == 0
    assert cached(keyed, ALICE, path, **prompt) > 50
    assert cached(keyed, BOB, path, **prompt) > 50


@contextmanager
def accepting(server, monkeypatch, accounts):
    """The server accepts other keys for a while."""
    app = server.server.config.app
    with monkeypatch.context() as patched:
        patched.setattr(app, "guard", replace(app.guard, accounts=accounts))
        yield accounts


def test_all_keys_share_hits_where_that_was_asked_for(keyed, monkeypatch):
    with accepting(keyed, monkeypatch, Accounts([ALICE, BOB], share_cache=True)):
        assert cached(keyed, ALICE) == 0
        assert cached(keyed, BOB) > 50


def test_tokens_of_prompts_and_answers_are_charged(keyed, monkeypatch):
    headers = {"x-api-key": ALICE.secret.decode()}
    with accepting(keyed, monkeypatch, Accounts([ApiKey("alice", ALICE.secret, tokens=1000)])) as accounts:
        spent = accounts.find(ALICE.secret)._tokens
        monkeypatch.setattr(spent, "_clock", Clock())
        spent._at = 0.0
        status, document = keyed.post(
            "/v1/chat/completions", asking("Hi", max_tokens=9, n=3, ignore_eos=True), **headers
        )
        assert status == 200
        usage = document["usage"]
        assert usage["completion_tokens"] == 27
        assert comes(keyed.at_rest)
        assert spent._level == 1000 - usage["prompt_tokens"] - 27
        spent.spend(2000)
        response = keyed.send("POST", "/v1/messages", asking("Hi", max_tokens=1), **headers)
        assert response.status == 429
        assert 60 <= int(response.getheader("retry-after")) <= 90
        assert b'"rate_limit_error"' in response.read()
        assert keyed.get("/v1/models", **headers)[0] == 200  # costs nothing
