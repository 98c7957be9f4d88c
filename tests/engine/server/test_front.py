"""A server behind a reverse proxy, and one that pages of other sites use: hosts, origins, root path, addresses."""

import socket
from dataclasses import replace

import pytest
from starlette.datastructures import Headers

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.front import without_root
from dsv4cli.engine.server.guard import Guard
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.unix_socket import bound_unix_socket
from dsv4cli.errors import UsageError
from tests.support.serving import comes

PAGE = "https://app.example.com"


@pytest.mark.parametrize(
    ("listens", "hosts", "host", "allowed"),
    [
        ("127.0.0.1", ("llm.example.com",), "llm.example.com", True),
        ("127.0.0.1", ("llm.example.com",), "LLM.example.com:443", True),
        ("127.0.0.1", ("llm.example.com",), "localhost:8000", True),
        ("127.0.0.1", ("llm.example.com",), "other.example.com", False),
        ("127.0.0.1", ("llm.example.com",), "llm.example.com.evil.example", False),
        ("127.0.0.1", ("llm.example.com",), "", False),
        ("127.0.0.1", ("*.example.com",), "a.b.example.com", True),
        ("127.0.0.1", ("*.example.com",), "example.com", False),
        ("127.0.0.1", ("*.example.com",), "evilexample.com", False),
        ("127.0.0.1", ("*",), "anything", True),
        ("127.0.0.1", ("2001:db8::1",), "[2001:db8::1]:80", True),
        ("0.0.0.0", (), "anything", True),
        ("0.0.0.0", ("gpu7",), "gpu7:8000", True),
        ("0.0.0.0", ("gpu7",), "gpu8", False),
        ("10.0.0.5", ("gpu7",), "10.0.0.5:8000", True),
        (None, (), "anything", True),
        (None, ("gpu7",), "gpu8", False),
    ],
)
def test_hosts_that_requests_may_name(listens, hosts, host, allowed):
    guard = Guard(Accounts(), listens, hosts)
    if allowed:
        guard.check("/v1/models", Headers({"host": host}))
        return
    with pytest.raises(Refusal, match="--allow-host") as error:
        guard.check("/v1/models", Headers({"host": host}))
    assert error.value.status == 403


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((PAGE,), PAGE, True),
        ((PAGE,), "https://app.example.com:8443", False),
        ((PAGE,), "http://app.example.com", False),
        ((PAGE,), "null", False),
        (("*",), "null", True),
        (("*",), "https://any.example", True),
        ((), "https://llm.example.com", True),  # its own page, as the browser sees it
    ],
)
def test_origins_of_pages_that_may_ask(origins, origin, allowed):
    guard = Guard(Accounts(), "127.0.0.1", ("llm.example.com",), origins)
    headers = Headers({"host": "llm.example.com", "origin": origin})
    if allowed:
        guard.check("/v1/models", headers)
        return
    with pytest.raises(Refusal, match="--allow-origin"):
        guard.check("/v1/models", headers)


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/llm/v1/models", "/llm", "/v1/models"),
        ("/v1/models", "/llm", "/v1/models"),
        ("/llmv1/models", "/llm", "/llmv1/models"),
        ("/llm/", "/llm", "/"),
        ("/llm", "/llm", ""),
        ("/llm/llm/x", "/llm", "/llm/x"),
    ],
)
def test_the_path_below_a_root(path, root, below):
    assert without_root(path, root) == below


@pytest.fixture
def front(nano, monkeypatch):
    """The server behind a proxy at /llm, for pages of one origin, with a key."""
    app = nano.server.config.app
    guard = Guard(Accounts([ApiKey("alice", b"key-of-alice")]), "127.0.0.1", ("llm.example.com",), (PAGE,))
    made = replace(app, guard=guard, root_path="/llm")
    for name in ("guard", "root_path", "_front"):
        monkeypatch.setattr(app, name, getattr(made, name))
    made.__dict__ = app.__dict__
    return nano


def test_a_page_of_an_allowed_origin_asks(front):
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    response = front.send("OPTIONS", "/llm/v1/messages", **asks, **{"access-control-request-headers": "x-api-key"})
    assert (response.status, response.getheader("access-control-allow-origin")) == (200, PAGE)
    assert response.getheader("access-control-allow-headers") == "x-api-key"
    assert "POST" in response.getheader("access-control-allow-methods")
    response = front.send("GET", "/llm/v1/models", origin=PAGE, **{"x-api-key": "key-of-alice"})
    assert (response.status, response.getheader("access-control-allow-origin")) == (200, PAGE)
    assert "x-request-id" in response.getheader("access-control-expose-headers")
    assert response.getheader("access-control-allow-credentials") is None


def test_a_page_of_an_allowed_origin_reads_why_it_is_refused(front):
    response = front.send("GET", "/llm/v1/models", origin=PAGE)
    assert (response.status, response.getheader("access-control-allow-origin")) == (401, PAGE)


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_a_page_of_another_origin_is_refused(front, method):
    asks = {"access-control-request-method": "POST"} if method == "OPTIONS" else {}
    response = front.send(method, "/llm/v1/models", origin="https://evil.example", **asks)
    assert response.status == (400 if method == "OPTIONS" else 403)
    assert response.getheader("access-control-allow-origin") is None


def test_a_preflight_of_a_server_without_origins_is_refused(nano):
    response = nano.send("OPTIONS", "/v1/models", origin=PAGE, **{"access-control-request-method": "POST"})
    assert (response.status, response.getheader("access-control-allow-origin")) == (403, None)


@pytest.mark.parametrize("path", ["/llm/health", "/health"])
def test_a_proxy_may_remove_the_root_path_or_not(front, path):
    assert front.get(path, host="llm.example.com")[0] == 200


def test_the_page_is_at_the_root_path_with_a_slash(front):
    """Its links are relative."""
    response = front.send("GET", "/llm")
    assert (response.status, response.getheader("location")) == (307, "/llm/")
    assert front.send("GET", "/llm/").status == 200


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7", "203.0.113.7"),  # what a client forges comes first
        ("203.0.113.7, 127.0.0.2", "203.0.113.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("a b\tc", "-"),
        ("", "127.0.0.1"),
    ],
)
def test_the_log_has_the_address_that_a_proxy_forwards(nano, forwarded, client):
    before = len(nano.lines)
    nano.get("/version", **{"x-forwarded-for": forwarded})
    # the line of an earlier test's request may come late
    assert comes(lambda: any("GET /version" in line for line in nano.lines[before:]))
    [line] = [line for line in nano.lines[before:] if "GET /version" in line]
    assert line.startswith(f"{client} GET /version 200")


def test_a_peer_of_another_machine_forwards_nothing(nano):
    """Only loopback addresses and Unix sockets are believed."""
    trusted = nano.server.config.loaded_app.trusted_hosts
    peers = ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "unix", "10.0.0.1", "0.0.0.0", "::ffff:10.0.0.1")
    assert [peer in trusted for peer in peers] == [True] * 5 + [False] * 3


def test_a_unix_socket_is_there_as_long_as_its_server(tmp_path):
    path = tmp_path / "dsv4.sock"
    with bound_unix_socket(path) as bound:
        assert path.stat().st_mode & 0o777 == 0o666
        with pytest.raises(UsageError, match="another server uses it"), bound_unix_socket(path):
            pass
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert [*tmp_path.iterdir()] == []


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path):
    path = tmp_path / "dsv4.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with bound_unix_socket(path):
        assert path.is_socket()


def test_a_socket_of_another_program_stays(tmp_path):
    path = tmp_path / "dsv4.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(UsageError, match="another server uses it"), bound_unix_socket(path):
            pass
        assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a-file", "not a socket"), ("no/folder", "No such file"), (200 * "a", "path too long")],
)
def test_a_path_that_cannot_be_a_socket(tmp_path, name, reason):
    (tmp_path / "a-file").write_text("kept")
    with pytest.raises(UsageError, match=reason), bound_unix_socket(tmp_path / name):
        pass
    assert (tmp_path / "a-file").read_text() == "kept"
