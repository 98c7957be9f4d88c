"""`dsv4 run --url --prompts` while it and the server are killed: no answer is lost, and none comes twice."""

import json
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.program import ROOT, SMALL

pytestmark = pytest.mark.slow

LINES, KILLS = 500, 4
# seconds for a server to start, and for everything, on a busy machine
START, WHOLE = 240, 1500


def dsv4(*arguments, **more):
    return subprocess.Popen([sys.executable, "-m", "dsv4cli", *arguments], cwd=ROOT, **more)


def started(port):
    server = dsv4("serve", "--model", SMALL, "--port", str(port), "--device", "cpu", stderr=subprocess.DEVNULL)
    end = time.monotonic() + START
    while time.monotonic() < end:
        assert server.poll() is None
        with suppress(URLError, ConnectionError, TimeoutError):
            urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
            return server
        time.sleep(0.2)
    raise AssertionError("the server does not start")


def count(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_no_answer_is_lost_or_double(tmp_path):
    prompts, out, log = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "log"
    lines = [{"prompt": f"number {number}", "custom_id": f"line {number}"} for number in range(LINES)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ask = ["run", "--url", f"http://127.0.0.1:{port}", "--prompts", str(prompts), "--temperature", "0"]
    ask += ["--max-tokens", "6", "--concurrency", "16"]
    server, chance, end = started(port), random.Random(4), time.monotonic() + WHOLE
    file = log.open("ab")
    client = dsv4(*ask, "--out", str(out), stderr=file)
    try:
        for kill in range(2 * KILLS):
            goal = count(out) + chance.randrange(5, 40)
            while count(out) < goal and time.monotonic() < end:
                assert client.poll() is None, log.read_text()[-2000:]
                time.sleep(0.01)
            if kill % 2:
                client.kill()
                client.wait()
                client = dsv4(*ask, "--out", str(out), stderr=file)
            else:
                server.kill()
                server.wait()
                server = started(port)
        assert client.wait(end - time.monotonic()) == 0, log.read_text()[-2000:]
        whole = subprocess.run(
            [sys.executable, "-m", "dsv4cli", *ask], cwd=ROOT, capture_output=True, text=True, check=True
        )
    finally:
        file.close()
        for process in (client, server):
            process.kill()
            process.wait()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["index"], one["custom_id"]) for one in found] == [(n, f"line {n}") for n in range(LINES)]
    expected = [json.loads(line) for line in whole.stdout.splitlines()]
    assert [one["content"] for one in found] == [one["content"] for one in expected]
    assert "trying again" in log.read_text()
