"""The examples for reverse proxies in docs/deploy, with the programs of Debian's packages nginx-light and caddy."""

import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest

from tests.support.program import ROOT
from tests.support.serving import asking, comes, served

pytestmark = pytest.mark.slow

HOST = "llm.example.com"
DEPLOY = ROOT / "docs" / "deploy"
# the address that clients come from; the proxy's own is 127.0.0.1
CLIENT = "127.0.0.5"
NGINX = """
daemon off; user root; pid FOLDER/pid; error_log stderr warn; worker_processes 2;
events {}
http { access_log off; client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy; fastcgi_temp_path FOLDER/f;
       uwsgi_temp_path FOLDER/u; scgi_temp_path FOLDER/s; include FOLDER/dsv4.conf; }
"""
CADDY = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n\tstorage file_system FOLDER/data\n}\n"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def nginx(folder, port, target):
    """A command line with the example, a certificate, and other ports."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={HOST}", "-days", "2"]
    subprocess.run([*made, "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True)
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    for old, new in (
        ("127.0.0.1:8000", target),
        ("listen 443", f"listen {port}"),
        (f"/etc/letsencrypt/live/{HOST}/fullchain.pem", f"{folder}/cert"),
        (f"/etc/letsencrypt/live/{HOST}/privkey.pem", f"{folder}/key"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "dsv4.conf").write_text(text)
    (folder / "nginx.conf").write_text(NGINX.replace("FOLDER", str(folder)))
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder, port, target):
    text = (DEPLOY / "Caddyfile").read_text("utf-8")
    for old, new in ((f"\n{HOST} {{", f"\nhttps://{HOST}:{port} {{\n\ttls internal"), ("127.0.0.1:8000", target)):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "Caddyfile").write_text(CADDY.replace("FOLDER", str(folder)) + text)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def client_of(port):
    """A TLS connection to the proxy, which has not been used."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = HTTPConnection(HOST, port, timeout=60)
    plain = socket.create_connection(("127.0.0.1", port), 60, (CLIENT, 0))
    connection.sock = context.wrap_socket(plain, server_hostname=HOST)
    return connection


def reachable(port):
    try:
        client_of(port).close()
    except OSError:
        return False
    return True


@contextmanager
def proxy(make, folder, target):
    """A proxy that is running, and its port."""
    port = free_port()
    command = make(folder, port, target)
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    environment = {"HOME": str(folder), "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        assert comes(lambda: reachable(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield port
    finally:
        process.terminate()
        try:
            process.wait(5)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server():
    """A server that may be addressed by the name of the proxy."""
    with served("random:tiny,layers=3") as one:
        app = one.server.config.app
        app.guard = replace(app.guard, hosts=(HOST,))
        yield one


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def front(request, server, tmp_path):
    """The server, a proxy's port, and functions of a client of the proxy."""
    with proxy(request.param, tmp_path, f"127.0.0.1:{server.port}") as port:
        responses = []

        def send(method, path, body=None, **headers):
            connection, own = client_of(port), {"host": f"{HOST}:{port}", "connection": "close"}
            connection.request(method, path, json.dumps(body) if body else None, own | headers)
            responses.append(connection.getresponse())
            return responses[-1]

        yield SimpleNamespace(server=server, send=send, port=port)
        for response in responses:
            response.close()


def test_requests_pass_with_their_host_address_and_id(front):
    response = front.send("GET", "/v1/models", **{"x-request-id": "through-a-proxy"})
    assert response.status == 200
    assert json.load(response)["data"][0]["id"] == "random:tiny,layers=3"
    assert response.getheader("x-request-id") == "through-a-proxy"
    assert comes(lambda: any("through-a-proxy" in line for line in front.server.lines))
    line = next(line for line in front.server.lines if "through-a-proxy" in line)
    assert line.startswith(f"{CLIENT} GET /v1/models 200")


def test_an_address_cannot_be_forged(front):
    before = len(front.server.lines)
    front.send("GET", "/version", **{"x-forwarded-for": "6.6.6.6"}).read()
    # the line of an earlier test's request may come late
    assert comes(lambda: any("GET /version" in line for line in front.server.lines[before:]))
    [line] = [line for line in front.server.lines[before:] if "GET /version" in line]
    assert line.startswith(f"{CLIENT} GET /version")


def test_the_page_may_ask_and_pages_of_others_may_not(front):
    body = asking("Hi", max_tokens=1)
    own = front.send("POST", "/v1/chat/completions", body, origin=f"https://{HOST}:{front.port}")
    assert own.status == 200
    assert front.send("POST", "/v1/chat/completions", body, origin="https://evil.example").status == 403
    assert front.send("GET", "/").read().startswith(b"<!doctype html>")


def test_events_arrive_one_by_one(front, monkeypatch):
    """The model waits for the client to have read the first ones."""
    step, may_go, steps = front.server.engine.step, threading.Event(), []

    def slowly():
        if len(steps) == 3:
            may_go.wait(60)
        steps.append(None)
        return step()

    monkeypatch.setattr(front.server.engine, "step", slowly)
    body = asking("go on", max_tokens=20, ignore_eos=True, stream=True)
    response = front.send("POST", "/v1/chat/completions", body)
    assert response.status == 200
    first = response.readline()
    assert first.startswith(b"data: {")
    while b'"content":"' not in first or b'"role"' in first:
        first = response.readline()
    assert len(steps) <= 3
    may_go.set()
    assert response.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_cancels_its_request(front):
    response = front.send("POST", "/v1/messages", {**asking("go on", max_tokens=8000, ignore_eos=True), "stream": True})
    assert response.readline() == b"event: message_start\n"
    assert not front.server.at_rest()
    response.close()
    assert comes(front.server.at_rest)
    assert comes(lambda: "not finished" in front.server.lines[-1])


def test_a_long_prompt_passes(front):
    response = front.send("POST", "/tokenize", {"prompt": "a " * 100_000})
    assert response.status == 200
    assert json.load(response)["count"] > 50_000


def test_many_clients_at_once(front):
    """Connections to the server are used again, and none that it has closed."""
    statuses = []

    def ask():
        statuses.extend(front.send("GET", "/v1/models").status for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40
