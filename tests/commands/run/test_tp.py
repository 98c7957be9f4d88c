"""`dsv4 run --tp N` and `torchrun … -m dsv4cli run` in processes of their own: answers, refusals, and how they end."""

import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from dsv4cli.cli import main
from dsv4cli.commands.job import open_job
from dsv4cli.commands.run import ranks as run_ranks
from dsv4cli.engine.parallel import processes
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.system import ending
from dsv4cli.options import ModelOptions
from dsv4cli.output import Colours, Output
from tests.support.program import ROOT, gone
from tests.support.terminals import Terminal

QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42.\n"
RUN = [sys.executable, "-m", "dsv4cli", "run"]
# goes on for minutes, with two ranks in step, whatever is asked
SMALL = ["--model", "random:tiny,layers=1,seed=6", "--dtype", "float32"]
ENDLESS = ["hi", *SMALL, "--temperature", "0", "--max-tokens", "8000"]
SECONDS = 60
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "dsv4cli",
    "run",
]


def environment():
    clean = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "TERM"}}
    return {**clean, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}


def run(*command, stdin=""):
    return subprocess.run(
        command, cwd=ROOT, env=environment(), input=stdin, capture_output=True, text=True, timeout=SECONDS
    )


def started(*arguments, **streams):
    """A program that two ranks carry out, of which the first words have come."""
    program = subprocess.Popen([*RUN, *arguments, "--tp", "2"], cwd=ROOT, env=environment(), **streams)
    assert program.stdout is not None
    assert program.stdout.read(1)
    return program


def ranks(program):
    """The process ids of its ranks, in their order."""
    others = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
    return [program.pid, *sorted(others)]


class Started:
    """What stands in a forked program for a process that it starts: a fork of it, which has torch already."""

    def __init__(self, words, **_):
        assert words[:3] == [sys.executable, "-m", "dsv4cli"]
        self._process = multiprocessing.get_context("fork").Process(target=be, args=(words[3:],))
        self._process.start()

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def be(words):
    sys.argv = ["dsv4", *words]
    main()


def test_two_ranks_of_one_program_answer_as_one():
    terminal = Terminal(
        "run", QUESTION, "--tp", "2", prepare=lambda patch: patch.setattr(subprocess, "Popen", Started), TERM="dumb"
    )
    assert terminal.leave() == 0
    starting, first, *rest = terminal.plain.splitlines()
    assert (starting, first) == ("starting 2 ranks", "2 ranks; all-reduce uses gloo")
    assert ANSWER.strip() in rest
    assert sum("first token after" in line for line in rest) == 1


@pytest.mark.slow
def test_two_ranks_answer_as_one():
    done = run(*RUN, "-", "--tp", "2", stdin=QUESTION)
    assert (done.returncode, done.stdout) == (0, ANSWER)
    starting, first, *rest = done.stderr.splitlines()
    assert (starting, first) == ("starting 2 ranks", "2 ranks; all-reduce uses gloo")
    assert sum("first token after" in line for line in rest) == 1


@pytest.mark.slow
def test_ranks_of_torchrun_answer_as_one():
    done = run(*TORCHRUN, QUESTION, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["content"] + "\n" == ANSWER


@pytest.mark.slow
def test_ranks_draw_from_one_seed(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n{"prompt": "ho"}\n{"prompt": "Who?"}\n')
    words = ["--prompts", str(prompts), "--max-tokens", "9", "--stop", "a", "--model", "random:tiny,layers=1"]
    done = run(*RUN, *words, "--dtype", "float32", "--tp", "2")
    assert done.returncode == 0
    alone = run(*RUN, *words, "--dtype", "float32", "--seed", done.stderr.split()[-1])
    assert done.stdout == alone.stdout


def test_a_rank_of_torchrun_loads_what_its_own_machine_calls_the_model(monkeypatch):
    """A folder of the hub's cache may have another path there."""
    followed = []
    world = World(rank=1, size=2)
    monkeypatch.setattr(processes, "joined", lambda device: nullcontext((world, device)))
    monkeypatch.setattr(run_ranks, "follow_leader", lambda *given: followed.append(given))
    monkeypatch.setattr(ending, "end_with_parent", lambda leader: None)
    job = open_job(Output(Colours(False, False)), ModelOptions(device="cpu"))
    run_ranks.in_ranks(job, None, True, pytest.fail)
    [(own, told)] = followed
    assert own.source is job.source
    assert (own.process.world, told, own.process.followers) == (world, world, None)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[*RUN, "--tp", "2"], TORCHRUN], ids=["tp", "torchrun"])
def test_nothing_left_to_answer_ends_all_ranks(tmp_path, words):
    """The leader loads no model then, and loading is what ranks do together."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    files = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "3"]
    assert run(*RUN, *files).returncode == 0
    done = run(*words, *files)
    assert (done.returncode, done.stdout) == (0, "")
    assert "already has all 1 answer" in done.stderr


@pytest.mark.slow
def test_an_error_is_said_once():
    done = run(*RUN, "--tp", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["error: there is no prompt", '→ add one: dsv4 run "What is 17 + 25?"']


@pytest.mark.slow
def test_another_number_than_torchrun_has_started_is_refused():
    done = run(*TORCHRUN, QUESTION, "--tp", "4")
    assert done.returncode == 1  # torchrun's
    assert done.stderr.count("error: --tp 4 does not match torchrun, which started 2 ranks") == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all():
    program = started(*ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, follower = ranks(program)
    os.kill(follower, signal.SIGKILL)
    _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == 1
    assert err.decode().splitlines()[-2:] == [
        "error: rank 1 was killed by SIGKILL",
        "→ check whether the machine ran out of memory",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)],
    ids=lambda value: str(value),
)
def test_a_signal_to_the_first_rank_ends_all(number, code):
    program = started(*ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, follower = ranks(program)
    program.send_signal(number)
    _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == code
    assert b"Traceback" not in err
    assert gone(follower)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_all():
    with started(*ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.wait(SECONDS) == 0
        assert len(program.stderr.read().splitlines()) == 4  # the ranks, what was loaded, and that it is random


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"the weights are random", b"meaningless\x1b[0m\r\n"], ids=["loading", "speaking"])
def test_ctrl_c_ends_all(words):
    master, theirs = pty.openpty()
    script = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from dsv4cli.cli import main; main()"
    program = subprocess.Popen(
        [sys.executable, "-c", script, "run", *ENDLESS, "--tp", "2"],
        cwd=ROOT, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while words not in shown:
        shown += os.read(master, 1000)
    pids = ranks(program)
    os.write(master, b"\x03")
    assert program.wait(SECONDS) == 130
    try:
        while part := os.read(master, 1000):
            shown += part
    except OSError:  # EIO: the other end is closed
        pass
    assert b"Traceback" not in shown
    assert shown.endswith(b"^C\r\n")
    assert all(gone(pid) for pid in pids[1:])
