"""`dsv4 serve` as a process of its own: how it begins, what it says, how it ends; and what it refuses."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.forked import Forked
from tests.support.program import ROOT, Program, gone
from tests.support.waiting import comes, says

SERVE = [sys.executable, "-m", "dsv4cli", "serve", "--port", "0", "--cache-memory", "64MB"]
ENDLESS = {"messages": [{"role": "user", "content": "go on"}], "ignore_eos": True, "max_tokens": 5000, "stream": True}
KEY = "a-key-of-this-test"
# a guard, not an expectation: other tests may have the machine's cores
SECONDS = 600


@contextmanager
def running(*arguments):
    """A server and its address; it is killed if it has not ended."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*SERVE, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killer = threading.Timer(SECONDS, process.kill)
    killer.start()
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        yield process, url
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def ask(url, body=None, **headers):
    """The response to a request, open."""
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS)


def ended(process):
    """How it has ended, and what it has said."""
    out, err = process.communicate(timeout=SECONDS)
    assert out == ""
    return process.returncode, err.splitlines()


def test_it_serves_until_ctrl_c_and_lets_answers_finish(tmp_path):
    (tmp_path / "keys").write_text(KEY)
    own = "--api-key-file", str(tmp_path / "keys"), "--alias", "deepseek-chat", "--alias", "b"
    process = Forked(*SERVE[1:], *own, CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
    try:
        url = process.out.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with pytest.raises(HTTPError, match="401"):
            ask(f"{url}/v1/models")
        models = json.load(ask(f"{url}/v1/models", authorization=f"Bearer {KEY}"))
        assert [one["id"] for one in models["data"]] == ["deepseek-chat", "b"]
        body = {**ENDLESS, "max_tokens": 25, "stream_options": {"include_usage": True}}
        stream = ask(f"{url}/v1/chat/completions", body, authorization=f"Bearer {KEY}")
        assert stream.read(5) == b"data:"
        process.send(signal.SIGINT)
        rest = stream.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"completion_tokens":25' in rest
    except BaseException:
        process.send(signal.SIGKILL)
        raise
    code, out, err = process.ended()
    lines = err.splitlines()
    assert (code, out) == (130, "")
    ready = r"ready in [\d.]+ s \([\d.]+ m?s after loading the weights\); press Ctrl-C to stop"
    assert any(re.fullmatch(ready, line) for line in lines), lines
    assert "running answers have 30 s to finish; press Ctrl-C again to stop at once" in lines
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    counts = r"\d+ \+ 25 tokens(, \d+ of \d+ drafts accepted)?, first token after [\d.]+ s"
    end = rf"127\.0\.0\.1 POST /v1/chat/completions 200, {counts}, [\d.]+ s, key key-1, id [0-9a-f]{{32}}"
    assert re.fullmatch(f"{time} {end}", lines[-1])
    assert not any(KEY in line or "go on" in line for line in lines)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    with running("--grace", "3600") as (process, url):
        stream = ask(f"{url}/v1/chat/completions", ENDLESS)
        assert stream.read(5) == b"data:"
        process.send_signal(signal.SIGTERM)
        assert says("running answers have", process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 143
        stream.close()


@pytest.mark.slow
def test_a_terminal_that_is_closed_lets_answers_finish():
    """The terminal's SIGHUP, and one of the shell; nothing can be written there any more."""
    master, terminal = os.openpty()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        SERVE, cwd=ROOT, env=environment, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    killer = threading.Timer(SECONDS, process.kill)
    killer.start()
    try:
        url = process.stdout.readline().strip()
        stream = ask(f"{url}/v1/chat/completions", {**ENDLESS, "max_tokens": 25})
        assert stream.read(5) == b"data:"
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(SECONDS) == 129
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_nohup_holds():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["nohup", *SERVE]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as one:
        killer = threading.Timer(SECONDS, one.kill)
        killer.start()
        try:
            url = one.stdout.readline().decode().strip()
            one.send_signal(signal.SIGHUP)
            assert ask(f"{url}/health").status == 200
            one.send_signal(signal.SIGTERM)
            assert one.wait(SECONDS) == 143
        finally:
            killer.cancel()
            one.kill()


@pytest.mark.slow
def test_a_prompt_of_32_mib_takes_little_memory():
    """The peak of the process grows by less than 200 MB, wherever the prompt is."""
    text = "a " * (16 << 20)
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text[:-200]}]},
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": text[:-200]}]},
        "/v1/completions": {"prompt": text[:15_000_000]},
        "/tokenize": {"prompt": text[:-200]},
    }
    with running() as (process, url):

        def peak():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024

        json.load(ask(f"{url}/v1/chat/completions", {**ENDLESS, "max_tokens": 2, "stream": False}))
        before = peak()
        for path, body in bodies.items():
            with pytest.raises(HTTPError, match="400"):
                ask(f"{url}{path}", body)
        assert peak() - before < 200e6


@pytest.mark.slow
def test_after_its_grace_it_ends_what_runs():
    with running("--grace", "0") as (process, url):
        stream = ask(f"{url}/v1/chat/completions", ENDLESS)
        assert stream.read(5) == b"data:"
        process.send_signal(signal.SIGTERM)
        code, lines = ended(process)
        stream.close()
    assert code == 143
    assert "not finished" in lines[-1]


@pytest.mark.slow
def test_two_ranks_serve_as_one_and_end_together():
    with running("--tp", "2") as (process, url):
        others = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        for _ in range(2):
            document = json.load(ask(f"{url}/v1/chat/completions", body))
            assert document["choices"][0]["message"]["content"] == "17 + 25 = 42."
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130
    assert others
    assert all(map(gone, others))


def follower_of(process):
    """The process of the second rank."""
    [other] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(other)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_answers_and_the_server():
    def whole(url):
        try:
            return ask(f"{url}/v1/chat/completions", {**ENDLESS, "stream": False}).status
        except HTTPError as error:
            return error.code, error.read()

    with running("--tp", "2") as (process, url), ThreadPoolExecutor(4) as pool:
        endless = {"prompt": "go on", **ENDLESS}
        streams = [ask(f"{url}/v1/{path}", endless) for path in ("chat/completions", "completions")]
        others = [pool.submit(whole, url) for _ in range(4)]
        assert all(stream.read(5) == b"data:" for stream in streams)
        assert comes(lambda: b"dsv4_requests_running 6.0" in ask(f"{url}/metrics").read())
        os.kill(follower_of(process), signal.SIGKILL)
        for stream in streams:
            assert b'"error"' in stream.read()  # to its end: the connection is not cut off
        for code, document in (other.result(SECONDS) for other in others):
            assert code == 500
            assert json.loads(document)["error"]["type"] == "server_error"
        code, lines = ended(process)
    assert code == 1
    assert lines.count("error: rank 1 was killed by SIGKILL") == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_an_idle_server():
    with running("--tp", "2") as (process, _):
        os.kill(follower_of(process), signal.SIGKILL)
        code, lines = ended(process)
    assert code == 1
    assert lines.count("error: rank 1 was killed by SIGKILL") == 1


@pytest.mark.slow
def test_sigterm_to_all_processes_lets_answers_finish():
    """As a service manager sends it."""
    with running("--tp", "2") as (process, url):
        stream = ask(f"{url}/v1/chat/completions", {**ENDLESS, "max_tokens": 50})
        assert stream.read(5) == b"data:"
        for pid in (follower_of(process), process.pid):
            os.kill(pid, signal.SIGTERM)
        content = stream.read()
        assert ended(process)[0] == 143
    assert b'"finish_reason":"length"' in content
    assert content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (["--host", "no.such.invalid"], "cannot resolve the address no.such.invalid", "--host 127.0.0.1"),
        (["--host", ""], "--host cannot be empty", "127.0.0.1"),
        (["--host", "a..b"], "cannot resolve the address a..b", "--host 127.0.0.1"),
        (["--alias", "a", "--alias", " "], "--alias cannot be empty", "use a name"),
        (["--allow-host", "https://llm.example.com"], "--allow-host cannot be 'https://llm", "the name alone"),
        (["--allow-host", "llm.example.com:443"], "--allow-host cannot be 'llm.example.com:443'", "the name alone"),
        (["--allow-origin", "https://app.example.com/"], "--allow-origin cannot be", "without a path"),
        (["--allow-origin", "app.example.com"], "--allow-origin cannot be 'app.example.com'", "https://"),
        (["--root-path", "llm/"], "--root-path cannot be 'llm/'", "write it as /llm"),
        (["--uds", "a.sock"], "--uds cannot be used with --port", "remove --uds or --port"),
        (["--api-key-file", "no-such-file"], "no-such-file cannot be read", "one key per line"),
        (["--cache-memory", "much"], "'much' is not a size", "GB"),
        (["--think", "low"], 'release v4 has no thinking level "low"', "off, high, max"),
        (["--device", "gpu"], "--device cannot be 'gpu'", "cuda"),
        (["--model", "nothing"], "neither a folder nor a known model", "nano"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_it_loads(monkeypatch, capsys, arguments, message, remedy):
    done = Program(monkeypatch, capsys)("serve", "--port", "0", *arguments)
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()[-2:]
    assert message in first
    assert remedy in second


def test_what_is_missing_is_said_with_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    done = Program(monkeypatch, capsys)("serve")
    assert (done.code, done.err) == (
        2,
        "error: dsv4 serve needs the package starlette\n→ in a clone of dsv4, install it: pip install '.[serve]'\n",
    )


def test_options_come_from_the_environment(monkeypatch, capsys):
    program = Program(monkeypatch, capsys)
    monkeypatch.setenv("DSV4_SERVE_ALLOW_HOST", "one *.two /three")  # a list is separated by spaces
    assert "--allow-host cannot be '/three'" in program("serve", "--port", "0").err
    monkeypatch.setenv("DSV4_SERVE_ALLOW_HOST", "")
    monkeypatch.setenv("DSV4_SERVE_MODEL", "nothing")
    assert "error: 'nothing' is neither" in program("serve", "--port", "0").err
    assert "error: 'other' is neither" in program("serve", "--port", "0", "--model", "other").err
    monkeypatch.setenv("DSV4_SERVE_LOG_JSON", "maybe")
    assert "DSV4_SERVE_LOG_JSON" in program("serve").err
    monkeypatch.setenv("DSV4_SERVE_LOG_JSON", "true")
    monkeypatch.setenv("DSV4_SERVE_PORT", "70000")
    done = program("serve")
    assert (done.code, "DSV4_SERVE_PORT" in done.err) == (2, True)


def test_a_variable_that_sets_nothing_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("DSV4_SERVE_API_KEYS", "keys.txt")
    done = Program(monkeypatch, capsys)("serve")
    assert done.code == 2
    assert done.err.startswith("error: the environment variable DSV4_SERVE_API_KEYS matches no option of dsv4 serve\n")


def test_the_environment_of_serve_is_its_own(monkeypatch, capsys):
    monkeypatch.setenv("DSV4_SERVE_SEED", "x")
    assert Program(monkeypatch, capsys)("run", "hi", "--show-prompt").code == 0


def test_help_says_the_rule_of_the_variables_once(monkeypatch, capsys):
    page = Program(monkeypatch, capsys)("serve", "--help").out
    assert page.count("DSV4_SERVE_") == 1
    assert "env var" not in page
