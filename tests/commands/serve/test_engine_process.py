"""The process of an engine's server: its log, its readiness, and that nothing of it is left."""

import json
import os
import signal
import stat
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dsv4cli.commands.serve import engine_process
from dsv4cli.commands.serve.engine_process import EngineProcess, key_options, wait_until_ready
from dsv4cli.errors import ServerError
from tests.support.program import gone
from tests.support.waiting import comes

# longer than any test
FOREVER = "sleep 1000"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(engine_process, "POLL_SECONDS", 0.001)


@contextmanager
def started(script, **variables):
    """A shell script as an engine, and the lines of its log."""
    lines = []
    process = EngineProcess(["sh", "-c", script], variables, lines.append)
    try:
        yield process, lines
    finally:
        process.end(signal.SIGKILL, 0)


@contextmanager
def answering(*statuses):
    """A server that answers /health with these statuses, the last of them again and again."""
    left = list(statuses)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_fails_shows_the_end_of_its_log():
    with started('seq 30; echo "$ENGINE_SAYS" >&2; exit 3', ENGINE_SAYS="no GPU") as (process, lines):
        with pytest.raises(ServerError, match="vllm ended with exit code 3") as failed:
            wait_until_ready(process, "http://127.0.0.1:9", 60, "vllm", pytest.fail)
        assert comes(lambda: len(lines) == 31)
        assert failed.value.details == (*map(str, range(12, 31)), "no GPU")
    assert failed.value.exit_code == 6


def test_a_server_that_is_killed_says_so():
    with started("kill -9 $$") as (process, _), pytest.raises(ServerError, match="sglang was killed by SIGKILL"):
        wait_until_ready(process, "http://127.0.0.1:9", 60, "sglang", pytest.fail)


def test_a_server_is_ready_when_it_says_so():
    reports = []
    with answering(503, 503, 200) as url, started(FOREVER) as (process, _):
        assert 0 <= wait_until_ready(process, url, 60, "vllm", reports.append) < 60
    assert reports == []


def test_a_long_start_is_reported(monkeypatch):
    monkeypatch.setattr(engine_process, "REPORT_SECONDS", 0.0)
    reports = []
    with answering(503, 503, 200) as url, started(FOREVER) as (process, _):
        wait_until_ready(process, url, 60, "vllm", reports.append)
    assert len(reports) == 2


def test_a_server_that_never_gets_ready_is_not_awaited_forever():
    with answering(503) as url, started(f"echo loading; {FOREVER}") as (process, lines):
        assert comes(lambda: lines == ["loading"])
        with pytest.raises(ServerError, match="vllm is not ready after 0 s") as failed:
            wait_until_ready(process, url, 0, "vllm", pytest.fail)
    assert failed.value.details == ("loading",)


def test_the_end_reaches_all_processes():
    with started(f"trap 'echo bye; exit' TERM; {FOREVER} & echo $!; wait") as (process, lines):
        assert comes(lambda: len(lines) == 1)
        process.end(signal.SIGTERM, 60)
        assert lines[1:] == ["bye"]
        assert gone(int(lines[0]))
        assert gone(process.pid)


def test_a_server_that_does_not_end_is_killed():
    with started("trap '' TERM INT; echo here; while :; do sleep 1000; done") as (process, lines):
        assert comes(lambda: lines == ["here"])
        process.end(signal.SIGINT, 0)
        assert gone(process.pid)


def test_a_second_interrupt_kills_at_once(monkeypatch):
    with started(f"trap '' TERM; echo here; {FOREVER}") as (process, lines):
        assert comes(lambda: lines == ["here"])
        wait = process.wait

        def interrupted(seconds):
            monkeypatch.setattr(process, "wait", wait)
            raise KeyboardInterrupt

        monkeypatch.setattr(process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.end(signal.SIGTERM, 1000)
        assert gone(process.pid)


def test_it_has_a_session_of_its_own():
    with started(FOREVER) as (process, _):
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid


def test_a_long_line_is_cut():
    with started("head -c 40000 /dev/zero | tr '\\0' x; echo; echo end") as (_, lines):
        assert comes(lambda: lines[-1:] == ["end"])
        assert [len(line) for line in lines] == [16384, 16384, 40000 - 2 * 16384, 3]


def test_keys_are_in_a_file_that_only_the_user_reads():
    with key_options(["one", "two"], True) as options:
        assert options[0] == "--config"
        file = Path(options[1])
        assert json.loads(file.read_text("utf-8")) == {"api-key": ["one", "two"]}
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not file.exists()
    with key_options(["one"], False) as options:
        assert json.loads(Path(options[1]).read_text("utf-8")) == {"api-key": "one"}
    with key_options([], True) as options:
        assert options == []
