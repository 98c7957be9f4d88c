"""`dsv4 serve` as operators run it: keys that change while requests run."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.program import ROOT
from tests.support.waiting import comes

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "dsv4cli", "serve", "--port", "0", "--cache-memory", "64MB"]
SECONDS = 300
ALICE, BOB = "the-key-of-alice", "the-key-of-bob"
MESSAGES = [{"role": "user", "content": "go on"}]


class Server:
    """A running server. lines: what it says on stderr."""

    def __init__(self, process, url):
        self.process, self.url, self.lines = process, url, []
        self.reader = threading.Thread(target=lambda: self.lines.extend(process.stderr), daemon=True)
        self.reader.start()

    def says(self, words):
        """Wait until it has said something."""
        return comes(lambda: any(words in line for line in [*self.lines]))

    def ask(self, path, body=None, key=ALICE, **headers):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"x-api-key": key, **headers})
        return urllib.request.urlopen(request, timeout=SECONDS)

    def status(self, key):
        """The status of a request with a key."""
        try:
            return self.ask("/v1/models", key=key).status
        except HTTPError as error:
            return error.code


@contextmanager
def running(*arguments, seconds=SECONDS, **options):
    """A server; it is killed at the end."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*SERVE, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip
    killer = threading.Timer(seconds, process.kill)
    killer.start()
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        server = Server(process, url)
        yield server
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        server.reader.join()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def keys(tmp_path):
    """A file with the key of Alice."""
    file = tmp_path / "keys"
    file.write_text(f"{ALICE} name=alice\n")
    return file


def test_sighup_under_32_streams_loses_none(keys):
    """Keys come and go, and a damaged file changes nothing; whose key is gone gets its answer to the end."""
    body = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 80, "stream": True}
    begun = threading.Barrier(33)

    def stream(number):
        with server.ask("/v1/chat/completions", {**body, "seed": number}) as response:
            first = response.read(5)
            begun.wait(SECONDS)
            return first + response.read()

    with running("--api-key-file", str(keys)) as server, ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream, number) for number in range(32)]
        begun.wait(SECONDS)
        for content, said, statuses in (
            (f"{ALICE}\n{BOB} name=bob\n", "read 2 API keys", (200, 200)),
            ("short\n", "the API keys have not changed: line 1 of", (200, 200)),
            (f"{BOB} name=bob\n", "read 1 API key from", (401, 200)),
        ):
            keys.write_text(content)
            server.process.send_signal(signal.SIGHUP)
            assert server.says(said)
            assert (server.status(ALICE), server.status(BOB)) == statuses
        assert not any(one.done() for one in streams)
        for one in streams:
            content = one.result(SECONDS)
            assert content.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in content
            assert content.count(b'"finish_reason":"length"') == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 143


def test_a_terminal_that_is_closed_ends_a_server_with_keys(keys):
    """Its SIGHUP does not mean that keys are to be read; one before does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads of other tests have ended
        child, master = pty.fork()
    if child == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.chdir(ROOT)
        os.execv(sys.executable, [*SERVE, "--api-key-file", str(keys)])
    killer = threading.Timer(SECONDS, os.kill, [child, signal.SIGKILL])
    killer.start()
    try:
        said = b""
        while b"http://" not in said:
            said += os.read(master, 4096)
        os.kill(child, signal.SIGHUP)
        while b"read 1 API key" not in said:
            said += os.read(master, 4096)
        os.close(master)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    finally:
        killer.cancel()


def test_memory_is_flat_over_10_000_requests(keys):
    """The process' own, with everything that operators set: keys, limits, request ids, JSON lines, origins."""
    keys.write_text(f"{ALICE} name=alice requests=10000000 tokens=1000000000\n{BOB} requests=1\n")
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/tokenize", "/none")
    options = ("--api-key-file", str(keys), "--log-json", "--allow-origin", "https://app.example.com", "--no-store")

    def memory(server):
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s*(\d+) kB", status)[1])

    with running(*options, "--model", "random:tiny,layers=1", "--max-context", "256", seconds=3600) as server:

        def ask(number):
            words = f"{number} and more words, {number}"
            messages = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
            bodies = (messages, messages, {"prompt": words, "max_tokens": 1}, {"input": words, "max_output_tokens": 1})
            place = number % len(paths)
            body = {**bodies[place], "stream": number % 2 == 0} if place < len(bodies) else {"prompt": words}
            headers = {"x-request-id": f"id-{number}", "origin": "https://app.example.com"}
            try:
                with server.ask(paths[place], body, BOB if number % 7 == 0 else ALICE, **headers) as response:
                    if number % 11:
                        response.read()
                statuses.add(response.status)
            except HTTPError as error:
                statuses.add(error.code)
                error.close()

        measured, statuses = [], set()
        with ThreadPoolExecutor(8) as pool:
            for first in range(0, 11_000, 1_000):
                list(pool.map(ask, range(first, first + 1_000)))
                server.ask("/metrics").close()
                measured.append(memory(server))
        sys.stderr.write(f"resident memory in kB after each 1,000 requests: {measured}\n")
        # 1,600 kB were seen. The prefix cache is full before the first measurement. 1 KB a request, for one in a cache,
        # would be 10,000 kB
        assert measured[-1] - measured[0] < 5_000, measured
        assert statuses == {200, 404, 429}
        assert comes(lambda: len(server.lines) > 11_000)
        for line in server.lines:
            assert "time" in json.loads(line)


def test_sighup_reads_keys_while_the_model_loads(keys):
    """As `systemctl reload` right after a start."""
    with subprocess.Popen(
        [*SERVE, "--api-key-file", str(keys), "--tp", "2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        killer = threading.Timer(SECONDS, process.kill)
        killer.start()
        try:
            assert process.stderr.readline() == "starting 2 ranks\n"
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline().startswith("read 1 API key from")
            assert process.stdout.readline().startswith("http://")
        finally:
            killer.cancel()
            process.kill()


def test_under_nohup_sighup_reads_keys(keys):
    with running(
        "--api-key-file", str(keys), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ) as server:
        keys.write_text(f"{BOB}\n")
        server.process.send_signal(signal.SIGHUP)
        assert server.says("read 1 API key")
        assert (server.status(ALICE), server.status(BOB)) == (401, 200)
