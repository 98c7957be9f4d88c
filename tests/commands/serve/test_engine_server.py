"""`dsv4 serve --engine`: what the engine is started with, how the command ends, and what it refuses."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from threading import Thread

import pytest

from dsv4cli.commands.serve import engine_process, engine_server
from dsv4cli.engine.inspection.consumers import served
from dsv4cli.errors import UsageError
from tests.commands.serve.test_engine_process import FOREVER, answering
from tests.support.forked import Forked
from tests.support.other_engines import NVFP4, model_of, stand_in
from tests.support.program import ROOT, gone
from tests.support.waiting import comes

PAGE = (ROOT / "docs" / "reference" / "engine-flags.md").read_text("utf-8")
# each command with --print on the page, with what it prints
DOCUMENTED = re.findall(r"^(?:\$ )?(dsv4 serve .*--print)\n((?:(?!\$ |dsv4 |```).*\n)+)", PAGE, re.MULTILINE)
EXPORTS = {f"nvidia/DeepSeek-V4-{size.capitalize()}-NVFP4": size for size in ("flash", "pro")}


@pytest.fixture
def exports(monkeypatch):
    """NVIDIA's exports, as their headers on the Hub describe them."""
    find = served.served_model

    def found(name, engine):
        return (model_of(EXPORTS[name], NVFP4, name), None) if name in EXPORTS else find(name, engine)

    monkeypatch.setattr(served, "served_model", found)


def serve(dsv4, *words, engine="vllm", gpus="1xH100", model="nano"):
    return dsv4("serve", "--model", model, "--engine", engine, "--gpus", gpus, *words)


def test_the_page_has_every_deployment():
    named = [(shlex.split(line)[3], shlex.split(line)[5], shlex.split(line)[7]) for line, _ in DOCUMENTED]
    assert len({*named}) == len(named) == 16
    assert {gpus for _, _, gpus in named} == {"8xH100", "2x8xH200"}


# by default one release and its export; what is printed for others tests/test_documents.py compares with the page
OTHERS = re.compile("pro|flash-0731", re.IGNORECASE)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        pytest.param(*one, id=one[0][11:-8], marks=pytest.mark.slow if OTHERS.search(one[0]) else ())
        for one in DOCUMENTED
    ],
)
def test_the_engine_sees_exactly_the_documented_flags(line, printed, dsv4, exports, tmp_path):
    python = stand_in(tmp_path, "exit 3")
    commands = [one for one in printed.splitlines() if not one.startswith("#")]
    for node, command in enumerate(commands):
        place = ["--node-rank", str(node), "--head", "HEAD"] if len(commands) > 1 else []
        done = dsv4(*shlex.split(line)[1:-1], *place, "--engine-python", python)
        assert done.code == 6, done.err
        assert "ended with exit code 3" in done.err
        variables = [word for word in shlex.split(command) if re.match(r"[A-Z_0-9]+=", word)]
        _, _, *flags = [word for word in shlex.split(command) if word not in variables]
        seen = (tmp_path / "arguments").read_text("utf-8").splitlines()
        start = ["-m", "vllm.entrypoints.cli.main", "serve"] if "vllm" in line else ["-m", "sglang.launch_server"]
        assert seen == start + flags
        assert (tmp_path / "variables").read_text("utf-8").splitlines() == variables


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["flash", "pro", "flash-0731", *EXPORTS])
def test_no_release_fits_one_gpu(engine, model, dsv4, exports):
    done = serve(dsv4, "--print", engine=engine, gpus="1xH200", model=model)
    assert (done.code, done.out) == (5, "")
    assert "does not fit on 1xH200" in done.err


def test_pro_on_sixteen_ranks_names_the_layout_that_works(dsv4):
    done = serve(dsv4, "--nodes", "2", "--tp", "16", "--print", gpus="8xH200", model="pro")
    assert (done.code, done.out) == (2, "")
    assert "3072 / 16 = 192" in done.err
    assert "→ use --tp 8 on each of the 2 machines" in done.err
    assert serve(dsv4, "--nodes", "2", "--tp", "8", "--print", gpus="8xH200", model="pro").code == 0


def test_a_program_on_the_path_is_found(dsv4, tmp_path, monkeypatch):
    path = stand_in(tmp_path, "exit 0")
    (tmp_path / "sglang").symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = serve(dsv4, engine="sglang")
    assert (done.code, "ended with exit code 0" in done.err) == (6, True)
    assert (tmp_path / "arguments").read_text("utf-8").splitlines()[:2] == ["serve", "--model-path"]


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """The words for an engine that is ready at once, and runs until it was verified."""
    stop = tmp_path / "stop"
    monkeypatch.setattr(engine_process, "POLL_SECONDS", 0.001)
    with answering(200) as url:
        python = stand_in(tmp_path, f"while [ ! -e '{stop}' ]; do sleep 0.01; done; exit 4")
        yield stop, ["--port", url.rpartition(":")[2], "--engine-python", python], url


@pytest.mark.parametrize(
    ("verdict", "warning"), [("right", ""), ("wrong", "fails checks"), (None, "could not be verified: no chat API")]
)
def test_a_ready_server_is_verified(verdict, warning, ready, dsv4, monkeypatch):
    stop, words, url = ready
    asked = []

    def verified(out, options):
        asked.append(options)
        out.table([["check", "verdict"], ["encoding", "right"]])
        stop.touch()
        if verdict is None:
            raise UsageError("no chat API")
        return verdict

    monkeypatch.setattr(engine_server, "carry_out", verified)
    done = serve(dsv4, *words)
    # the server has ended by itself
    assert (done.code, done.out) == (6, f"{url}\n")
    assert "vllm is ready" in done.err
    assert "encoding  right" in done.err
    assert "ended with exit code 4" in done.err
    assert (warning or "ready") in done.err
    assert ("warning" in done.err) is bool(warning)
    assert [(one.url, one.model, one.quick) for one in asked] == [(url, "nano", True)]


def test_no_verify(ready, dsv4, monkeypatch):
    stop, words, _ = ready
    monkeypatch.setattr(engine_server, "carry_out", lambda *_: pytest.fail("it was verified"))
    stop.touch()
    assert serve(dsv4, *words, "--no-verify").code == 6


@pytest.mark.slow
def test_a_server_that_is_never_ready(dsv4, tmp_path):
    python = stand_in(tmp_path, f"echo $$; {FOREVER}")
    with answering(503) as url:
        done = serve(dsv4, "--port", url.rpartition(":")[2], "--engine-python", python, "--ready-timeout", "1")
    assert done.code == 6
    assert "vllm is not ready after 1 s" in done.err
    [pid] = re.findall(r"^(\d+)$", done.err, re.MULTILINE)
    assert gone(int(pid))


def test_a_server_for_everyone_is_warned_of(dsv4, tmp_path):
    python = stand_in(tmp_path, "exit 3")
    warning = "anyone who can reach 0.0.0.0 can use this server"
    assert warning in serve(dsv4, "--engine-python", python, "--host", "0.0.0.0").err
    assert "anyone" not in serve(dsv4, "--engine-python", python).err
    keys = tmp_path / "keys"
    keys.write_text("secret-of-mine", "utf-8")
    assert "anyone" not in serve(dsv4, "--engine-python", python, "--host", "::", "--api-key-file", str(keys)).err


def test_keys_are_passed_in_a_file(dsv4, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-of-mine\nanother-secret\n", "utf-8")
    python = stand_in(tmp_path, 'for last; do :; done; cat "$last"; exit 3')
    done = serve(dsv4, "--api-key-file", str(keys), "--engine-python", python)
    assert '{"api-key": ["secret-of-mine", "another-secret"]}' in done.err
    seen = (tmp_path / "arguments").read_text("utf-8")
    assert "secret" not in seen
    assert "--config" in seen
    refused = serve(dsv4, "--api-key-file", str(keys), "--engine-python", python, engine="sglang")
    assert (refused.code, "has 2 keys, and sglang accepts one" in refused.err) == (2, True)
    for line, complaint in (("12345678 requests=5", "limits a key"), ("12345678 name=a", "more than a key")):
        keys.write_text(line, "utf-8")
        refused = serve(dsv4, "--api-key-file", str(keys), "--engine-python", python)
        assert (refused.code, complaint in refused.err) == (2, True), refused.err
    printed = serve(dsv4, "--api-key-file", str(keys), "--print")
    assert printed.out.rstrip().endswith(f'--api-key "$(head -n 1 {keys})"')


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "--nodes", "2"], "--nodes needs --engine"),
        (["serve", "--print"], "--print needs --engine"),
        (["serve", "--engine", "vllm", "--step-ms", "3"], "--step-ms has no effect on the server of vllm"),
        (["serve", "--engine", "sglang", "--temperature", "0"], "--temperature has no effect"),
        (["serve", "--engine", "vllm", "--uds", "x"], "--uds has no effect"),
        (["serve", "--engine", "vllm", "--gpus", "2x8xH200", "--nodes", "3"], "contradicts"),
        (["serve", "--engine", "vllm", "--gpus", "8xH200", "--port", "0"], "--port cannot be 0"),
        (["serve", "--engine", "vllm", "--gpus", "8xH200", "--node-rank", "1"], "--node-rank cannot be 1"),
        (["serve", "--engine", "vllm", "--gpus", "2x8xH200"], "need --node-rank and --head"),
        (["serve", "--engine", "vllm", "--gpus", "2x8xH200", "--head", "a b"], "--head cannot be 'a b'"),
        (["serve", "--engine", "vllm", "--gpus", "2x8xH200", "--head", "a:70000"], "--head cannot be"),
        (["serve", "--engine", "vllm", "--gpus", "8xH200", "--engine-python", "./none"], "no program none"),
        (["serve", "--engine", "vllm", "--gpus", "8xH200", "--draft", "many"], "--draft cannot be"),
        (["serve", "random:tiny", "--engine", "vllm", "--gpus", "8xH200"], "not a whole checkpoint"),
    ],
)
def test_refusals(words, complaint, dsv4):
    done = dsv4(*words)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err


def test_variables_of_the_environment_count_too(dsv4, monkeypatch):
    monkeypatch.setenv("DSV4_SERVE_MAX_QUEUE", "5")
    assert "--max-queue has no effect" in serve(dsv4, "--print").err


def test_the_address_of_the_head_may_have_a_port(dsv4):
    out = serve(dsv4, "--head", "[::1]:5000", "--print", gpus="2x8xH200", engine="sglang").out
    assert out.count("--dist-init-addr '[::1]:5000'") == 2


def test_sigterm_ends_the_engine(dsv4, tmp_path):
    python = stand_in(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec {FOREVER}")
    pid = tmp_path / "pid"

    def terminate():
        assert comes(lambda: pid.exists() and pid.read_text("utf-8").strip() != "")
        os.kill(os.getpid(), signal.SIGTERM)

    sender = Thread(target=terminate)
    sender.start()
    done = serve(dsv4, "--engine-python", python, "--port", "9")
    sender.join()
    assert (done.code, done.out) == (143, "")
    assert "running answers have 30 s to finish" in done.err
    assert gone(int(pid.read_text("utf-8")))


def test_a_signal_during_the_start_ends_the_engine(dsv4, tmp_path, monkeypatch):
    python, pids = stand_in(tmp_path, f"exec {FOREVER}"), []
    start = engine_process.EngineProcess.__init__

    def starts(self, *given):
        start(self, *given)
        pids.append(self.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(engine_process.EngineProcess, "__init__", starts)
    done = serve(dsv4, "--engine-python", python, "--port", "9")
    assert done.code == 143
    assert "running answers have 30 s to finish" in done.err
    assert all(map(gone, pids))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_end_the_engine_and_all_that_it_started(number, code, tmp_path):
    python = stand_in(tmp_path, f"{FOREVER} & echo $! > '{tmp_path}/pids'; echo $$ >> '{tmp_path}/pids'; wait")
    words = ["serve", "--engine", "vllm", "--gpus", "1xH100", "--engine-python", python, "--port", "9"]
    run = Forked("-m", "dsv4cli", *words)
    pids = tmp_path / "pids"
    assert comes(lambda: pids.exists() and len(pids.read_text("utf-8").split()) == 2)
    run.send(number)
    ended, out, err = run.ended()
    assert (ended, out) == (code, "")
    assert "running answers have 30 s to finish" in err
    assert all(gone(int(pid)) for pid in pids.read_text("utf-8").split())


@pytest.mark.slow
def test_an_engine_does_not_outlive_a_killed_command(tmp_path):
    python = stand_in(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec {FOREVER}")
    run = Forked("-m", "dsv4cli", "serve", "--engine", "vllm", "--gpus", "1xH100", "--engine-python", python)
    pid = tmp_path / "pid"
    assert comes(lambda: pid.exists() and pid.read_text("utf-8").strip() != "")
    run.send(signal.SIGKILL)
    assert run.ended()[0] == -signal.SIGKILL
    assert gone(int(pid.read_text("utf-8")))


@pytest.mark.slow
def test_the_whole_way_with_dsv4_in_place_of_the_engine(tmp_path):
    """It is started, awaited, verified and ended, and answers in between."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    python = stand_in(tmp_path, f"exec '{sys.executable}' -m dsv4cli serve nano --port {port}")
    words = ["serve", "nano", "--engine", "sglang", "--gpus", "1xH100", "--port", port, "--engine-python", python]
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "dsv4cli", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True
        )
    right = re.compile(r"nano on http://\S+ is right: \d+ checks passed")
    assert comes(lambda: right.search(log.read_text("utf-8")), 1200), log.read_text("utf-8")
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=120)
    assert (run.returncode, out) == (143, f"http://127.0.0.1:{port}\n")
    assert "warning" not in log.read_text("utf-8")
    with socket.socket() as gone_server, pytest.raises(ConnectionRefusedError):
        gone_server.connect(("127.0.0.1", int(port)))
