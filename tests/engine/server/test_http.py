"""Connections: how many there may be, clients that are slow, that go or do not read, and an orderly end."""

import asyncio
import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPResponse

import pytest

from dsv4cli.engine.server import async_engine, connections, incoming
from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.connections import HttpLimits
from dsv4cli.engine.server.http import HttpServer, bound_socket, url_of
from dsv4cli.engine.settings import Limits
from dsv4cli.errors import NotEnoughMemory, UsageError
from tests.support.serving import asking, comes, served
from tests.support.slow import slow

# layers of all kinds but one: what costs next to nothing
SMALL = "random:tiny,layers=3"
LIMITS = HttpLimits(connections=4, header_seconds=0.4, write_seconds=0.4, idle_seconds=1)
# goes on for minutes
ENDLESS = {"ignore_eos": True, "max_tokens": 100_000, "stream": True}
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def small():
    """A server with narrow bounds, and a model whose steps take next to nothing."""
    with served(SMALL, limits=LIMITS, max_queue=0, own_limits=Limits(max_tokens=8)) as one:
        yield one


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def endless(server):
    """A stream that has begun."""
    client = connected(server)
    body = json.dumps(asking("go on", **ENDLESS)).encode()
    client.sendall(REQUEST % len(body) + body)
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def ends(client):
    """Whether the server ends a connection."""
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("begun", [*slow(b"", b"GET /hea"), b"GET /health HTTP/1.1\r\nhost: localhost\r\n"])
def test_headers_must_come_in_time(small, begun):
    with connected(small) as client:
        client.sendall(begun)
        assert ends(client)


def test_headers_of_the_next_request_must_come_in_time(small):
    with connected(small) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea")
        assert client.recv(12) == b"HTTP/1.1 200"
        assert ends(client)


def test_a_body_must_come_in_time(small, monkeypatch):
    monkeypatch.setattr(incoming, "READ_SECONDS", 0.2)
    with connected(small) as client:
        client.sendall(REQUEST % 9 + b"{")
        assert client.recv(12) == b"HTTP/1.1 408"
        assert ends(client)


def test_a_body_of_unsaid_length_has_the_limit_too(small, monkeypatch):
    monkeypatch.setattr(incoming, "MOST_BODY", 8)
    with connected(small) as client:
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n9\r\n123456789\r\n"
        )
        assert client.recv(12) == b"HTTP/1.1 413"
        assert ends(client)


def test_of_many_more_clients_the_last_are_not_accepted(small, monkeypatch):
    monkeypatch.setattr(small.server.config.http, "limits", replace(LIMITS, header_seconds=60))
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(small)) for _ in range(2 * LIMITS.connections)]
        assert comes(lambda: len(small.server.server_state.connections) == len(clients))
        last = stack.enter_context(connected(small))
        assert ends(last)


def asks(client, path="/v1/models", *headers):
    """The status of an answer on a connection."""
    lines = [f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]
    client.sendall("\r\n".join(lines).encode())
    response = HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


@pytest.fixture
def keyed(monkeypatch):
    """A server with a key, whose idle connections are fresh for as long as a test likes."""
    monkeypatch.setattr(connections, "FRESH_SECONDS", 0.0)
    accounts = Accounts([ApiKey("a", b"a-key-of-this-test")])
    with served(SMALL, accounts, limits=replace(LIMITS, header_seconds=60)) as one:
        yield one


def test_idle_connections_give_way_and_those_with_a_key_last(keyed):
    there = keyed.server.server_state.connections
    with ExitStack() as stack:
        known = stack.enter_context(connected(keyed))
        assert asks(known, "/v1/models", "x-api-key: a-key-of-this-test") == 200
        idle = []
        for _ in range(3 * LIMITS.connections):
            idle.append(stack.enter_context(connected(keyed)))
            assert asks(idle[-1]) == 401
        assert comes(lambda: len(there) == LIMITS.connections)
        assert [ends(one) for one in idle[:2]] == [True, True]  # the oldest
        assert asks(idle[-1], "/health") == 200
        assert asks(known, "/v1/models", "x-api-key: a-key-of-this-test") == 200
        with connected(keyed) as late:
            assert asks(late, "/health") == 200
            assert asks(late, "/v1/models", "x-api-key: a-key-of-this-test") == 200


def test_connections_with_a_request_do_not_give_way(keyed, monkeypatch):
    monkeypatch.setattr(connections, "FRESH_SECONDS", 60.0)
    with ExitStack() as stack:
        body = json.dumps(asking("go on", **ENDLESS)).encode()
        request = REQUEST.replace(b"\r\n\r\n", b"\r\nx-api-key: a-key-of-this-test\r\n\r\n") % len(body) + body
        streams = [stack.enter_context(connected(keyed)) for _ in range(LIMITS.connections + 1)]
        for stream in streams:
            stream.sendall(request)
        statuses = sorted(stream.recv(12)[9:] for stream in streams)
        assert statuses == [b"200"] * LIMITS.connections + [b"503"]
        monkeypatch.setattr(connections, "FRESH_SECONDS", 0.0)
        for _ in range(2):
            with connected(keyed) as other:
                assert asks(other, "/health") == 200
    assert comes(keyed.at_rest)


@pytest.mark.slow  # test_idle_connections_give_way_and_those_with_a_key_last has the order
def test_fresh_connections_give_way_to_other_addresses_only(keyed, monkeypatch):
    """Those of one address take no more places than there are; a client of another one finds one."""
    monkeypatch.setattr(connections, "FRESH_SECONDS", 60.0)
    there = keyed.server.server_state.connections
    with ExitStack() as stack:
        first = [stack.enter_context(connected(keyed)) for _ in range(2 * LIMITS.connections)]
        assert comes(lambda: len(there) == len(first))
        assert ends(stack.enter_context(connected(keyed)))
        other = socket.create_connection(("127.0.0.1", keyed.port), timeout=20, source_address=("127.0.0.2", 0))
        assert asks(stack.enter_context(other), "/health") == 200
        assert ends(first[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(small, stream):
    body = json.dumps(asking("go on", max_tokens=3, stream=stream)).encode()
    with connected(small) as client:
        client.sendall(REQUEST % len(body) + body)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert b"HTTP/1.1 200" in answer
    assert (b"[DONE]" if stream else b'"finish_reason"') in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_told_from_one_that_sends_no_more(small, stream):
    """Before its answer has begun, and in the middle of a stream that has nothing to say."""
    body = json.dumps(asking("go on", **ENDLESS | {"stream": stream})).encode()
    with connected(small) as client:
        client.sendall(REQUEST % len(body) + body)
        assert comes(lambda: small.engine.busy)
        if stream:
            client.recv(65536)
    assert comes(small.at_rest)


def test_half_a_request_ends_with_its_client(small):
    with connected(small) as client:
        client.sendall(REQUEST % 9 + b"{")
        assert comes(lambda: len(small.server.server_state.tasks) == 1)
        client.shutdown(socket.SHUT_WR)
        assert ends(client)
    assert comes(lambda: not small.server.server_state.tasks)


def test_a_client_that_goes_ends_its_request(small):
    assert comes(lambda: small.tasks() == 1)  # the server's own
    with endless(small):
        assert comes(lambda: small.engine.busy)
    assert comes(small.at_rest)
    assert comes(lambda: small.tasks() == 1)


def test_a_client_that_vanishes_is_noticed_within_a_minute(small):
    """The system probes its connection, also while nothing is sent."""
    with connected(small):
        assert comes(lambda: small.server.server_state.connections)
        own = next(iter(small.server.server_state.connections)).transport.get_extra_info("socket")
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between, count = (
            own.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        )
        assert idle + between * count <= 60


def test_a_request_that_cannot_be_ended_fails_those_beside_it_and_no_later_ones(small, monkeypatch):
    """A state of it is kept, for which there may be no memory."""
    cancel = small.engine.cancel

    def fail(request):
        monkeypatch.setattr(small.engine, "cancel", cancel)
        small.engine.forget()
        raise NotEnoughMemory("no host memory", "")

    with endless(small), endless(small) as other:
        monkeypatch.setattr(small.engine, "cancel", fail)
        endless(small).close()
        assert ends(other)
    assert comes(small.at_rest)
    assert small.chat("go on")["choices"]


def test_requests_that_cannot_be_ended_after_an_error_end_no_server(small, monkeypatch):
    """Their states are kept, for which there may be no memory either."""
    step, cancel = small.engine.step, small.engine.cancel

    def fail():
        monkeypatch.setattr(small.engine, "step", step)
        raise NotEnoughMemory("no memory to sample", "")

    def fail_again(request):
        monkeypatch.setattr(small.engine, "cancel", cancel)
        small.engine.forget()
        raise NotEnoughMemory("no host memory", "")

    with endless(small) as client, endless(small) as other:
        monkeypatch.setattr(small.engine, "cancel", fail_again)
        monkeypatch.setattr(small.engine, "step", fail)
        assert ends(client)
        assert ends(other)
    assert comes(small.at_rest)
    assert small.chat("go on")["choices"]


@pytest.mark.slow
def test_a_client_that_does_not_read_ends_its_request(small):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", small.port))
        body = json.dumps(asking("go on", **ENDLESS, n=16, logprobs=True, top_logprobs=20)).encode()
        client.sendall(REQUEST % len(body) + body)
        assert comes(lambda: small.engine.busy)
        assert comes(small.at_rest, 30)


@pytest.fixture
def narrow(small, monkeypatch):
    """The server, with as small a buffer for what is sent as the system has."""
    monkeypatch.setattr(connections, "SEND_BUFFER", 1)
    assert comes(lambda: not small.server.server_state.connections)
    return small


@contextmanager
def not_reading(server, request):
    """A client that has sent a request and reads nothing of the answer, and the server's side of its connection."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request)
        there = server.server.server_state.connections
        assert comes(lambda: any(one.flow.write_paused for one in there))
        yield client, next(iter(there))


LONG = b"GET /math.js HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_a_client_that_does_not_read_is_gone_whatever_it_sends(narrow, monkeypatch):
    monkeypatch.setattr(narrow.server.config.http, "limits", replace(LIMITS, write_seconds=60))
    monkeypatch.setattr(async_engine, "MOST_UNREAD", 1000)
    body = json.dumps(asking("go on", **ENDLESS, n=4, logprobs=True, top_logprobs=20)).encode()
    with not_reading(narrow, REQUEST % len(body) + body) as (client, connection):
        assert comes(lambda: narrow.at_rest() and connection.flow.write_paused)  # no more is sent
        client.sendall(b"G")
        assert comes(lambda: connection.conn.trailing_data[0])
        assert not connection._write_timer.cancelled()


def test_headers_that_begin_while_an_answer_is_not_read_must_come_in_time(narrow, monkeypatch):
    monkeypatch.setattr(narrow.server.config.http, "limits", replace(LIMITS, write_seconds=60))
    with not_reading(narrow, LONG) as (client, connection):
        client.sendall(b"GET /hea")
        assert comes(lambda: connection.conn.trailing_data[0])
        assert ends(client)


def test_a_client_that_reads_slowly_is_not_taken_for_one_that_reads_nothing(narrow, monkeypatch):
    """One that has read nothing since the last check is gone."""
    monkeypatch.setattr(narrow.server.config.http, "limits", replace(LIMITS, write_seconds=60))
    with not_reading(narrow, LONG) as (client, connection):
        left = connection.transport.get_write_buffer_size()
        assert client.recv(1 << 14)
        assert comes(lambda: connection.transport.get_write_buffer_size() < left)
        narrow.loop.call_soon_threadsafe(connection._check_reading, left)  # the time is over
        assert narrow.get("/health")[0] == 200
        assert connection in narrow.server.server_state.connections
        left = connection.transport.get_write_buffer_size()
        narrow.loop.call_soon_threadsafe(connection._check_reading, left)
        assert comes(lambda: connection not in narrow.server.server_state.connections)


def test_a_connection_that_still_sends_an_answer_does_not_give_way(keyed, monkeypatch):
    """The request has ended, what it was answered has not reached the client."""
    monkeypatch.setattr(connections, "SEND_BUFFER", 1)
    with ExitStack() as stack:
        client, connection = stack.enter_context(not_reading(keyed, LONG))
        assert comes(lambda: connection.cycle.response_complete)
        others = [stack.enter_context(connected(keyed)) for _ in range(LIMITS.connections)]
        assert comes(lambda: len(keyed.server.server_state.connections) == LIMITS.connections)
        response = HTTPResponse(client)
        response.begin()
        assert len(response.read()) == int(response.getheader("content-length"))
        assert len(others) == LIMITS.connections


def test_more_clients_than_there_may_be_are_told_so(small):
    clients = [endless(small) for _ in range(4)]
    assert small.get("/health")[0] == 200
    response = small.send("GET", "/v1/models")
    assert response.status == 503
    assert int(response.getheader("retry-after")) > 0
    assert json.loads(response.read())["error"]["type"] == "overloaded_error"
    for client in clients:
        client.close()
    assert comes(lambda: small.get("/v1/models")[0] == 200)
    assert comes(small.at_rest)


def test_those_who_came_before_the_limit_are_served(small, monkeypatch):
    monkeypatch.setattr(small.server.config.http, "limits", replace(LIMITS, header_seconds=60))
    there = small.server.server_state.connections
    assert comes(lambda: not there)
    with ExitStack() as stack:
        clients = []
        for number in range(LIMITS.connections + 1):
            clients.append(stack.enter_context(connected(small)))
            assert comes(lambda most=number: len(there) > most)
        found = []
        for client in clients:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            found.append(client.recv(12))
        assert found == [b"HTTP/1.1 200"] * LIMITS.connections + [b"HTTP/1.1 503"]
        clients[0].close()
    assert comes(lambda: not there)


def test_a_full_queue_is_said(small):
    """Eight more than the 64 that run at once."""
    client = endless(small)
    body = asking("go on", n=64, max_tokens=1)
    status, document = small.post("/v1/chat/completions", body)
    assert status == 503
    assert "the queue is full: 1 requests are running or waiting" in document["error"]["message"]
    assert small.post("/v1/messages", {"messages": body["messages"], "max_tokens": 1})[0] == 200
    client.close()
    assert comes(small.at_rest)
    assert small.post("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    "damage", [b"\x00\xff\x16\x03\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"x" * 70_000]
)
def test_what_is_no_http_is_refused(small, damage):
    with connected(small) as client:
        client.sendall(damage)
        assert client.recv(12) in (b"HTTP/1.1 400", b"")


def test_the_end_lets_answers_finish():
    with served(SMALL, grace=60, own_limits=Limits(max_tokens=15)) as server:
        client = endless(server)
        found = []
        body = asking("go on", ignore_eos=True)
        asked = threading.Thread(target=lambda: found.append(server.post("/v1/chat/completions", body)))
        asked.start()
        assert comes(lambda: len(server.asked._calls) == 2)
        server.loop.call_soon_threadsafe(server.server.stop)
        asked.join(60)
        [(status, document)] = found
        assert (status, document["usage"]["completion_tokens"]) == (200, 15)
        with pytest.raises(ConnectionRefusedError):
            connected(server)
        server.loop.call_soon_threadsafe(server.server.stop)  # a second time: the other one is not waited for
        assert ends(client)
        client.close()
    assert not server.asked._calls
    bound_socket("127.0.0.1", server.port).close()  # another may begin at once, though connections are remembered


def test_answers_that_are_broken_off_at_the_end_are_told_so():
    found = []
    with served(SMALL, grace=0) as server:

        def ask(**fields):
            response = server.send("POST", "/v1/chat/completions", asking("go on", **ENDLESS | fields))
            found.append((response.status, response.getheader("content-type"), response.read()))

        clients = [threading.Thread(target=ask, kwargs={"stream": stream}) for stream in (False, True)]
        for one in clients:
            one.start()
        assert comes(lambda: server.held().running == 2)
        with connected(server) as slow:  # its body has not come
            slow.sendall(REQUEST % 9 + b"{")
            assert comes(lambda: len(server.server.server_state.tasks) == 3)
            server.loop.call_soon_threadsafe(server.server.stop)
            assert slow.recv(12) == b"HTTP/1.1 503"
        for one in clients:
            one.join(60)
    (stream, *_), (document, *_) = both = sorted(found)
    assert (stream, document) == (200, 503)
    for _, kind, content in both:
        assert b"the server shut down before the answer was complete" in content, kind
    assert both[0][2].endswith(b"data: [DONE]\n\n")
    assert all("the server shut down before the answer was complete" in line for line in server.lines[-3:])


@pytest.mark.parametrize(("grace", "seconds"), [(0, 0), (0.2, 1), (30, 30)])
def test_answers_have_their_grace_at_the_end(grace, seconds):
    assert HttpServer(None, LIMITS, grace, lambda: None).config.timeout_graceful_shutdown == seconds


def test_who_listens_first_has_the_port():
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {first.getsockname()[1]}: "):
            asyncio.run(HttpServer(None, LIMITS, 0, lambda: None).serve([second]))


def test_an_engine_that_cannot_go_on_is_said(monkeypatch):
    with served(SMALL) as server:
        assert server.get("/health")[0] == 200
        monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
        status, document = server.post("/v1/chat/completions", asking("go on"))
        assert (status, document["error"]["message"]) == (500, "internal server error; see the server's log")
        assert isinstance(server.asked.failure.result(), ZeroDivisionError)
        assert server.get("/health")[0] == 503
        status, document = server.post("/v1/chat/completions", asking("go on"))
        assert (status, "the engine has failed" in document["error"]["message"]) == (503, True)


def test_what_is_sent_waits_for_no_acknowledgement(small):
    """Headers and body, and the tokens of a stream, go out as they are written: no 40 ms between them."""
    with connected(small):
        assert comes(lambda: bool(small.server.server_state.connections))
        [one] = small.server.server_state.connections
        assert one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_is_taken_before_the_model_is_loaded():
    with bound_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}: "):
            bound_socket("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot resolve the address"):
        bound_socket("no.such.host.invalid", 0)
    with pytest.raises(
        UsageError, match=r"192\.0\.2\.1 is not an address of this machine"
    ) as error:  # of no machine: RFC 5737
        bound_socket("192.0.2.1", 0)
    assert "--host 127.0.0.1" in error.value.remedy
    with bound_socket("0.0.0.0", 0) as every:
        assert url_of(every).startswith("http://127.0.0.1:")
