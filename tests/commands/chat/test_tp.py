"""`dsv4 chat --tp N`: two ranks converse as one, and end together; in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4cli.engine.chat.conversation import ContextFull, Talk
from dsv4cli.engine.chat.leading import LeadingTalk, follow
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, RankLost, UnsoundResult
from tests.engine.chat.test_conversation import dialogue, user
from tests.support.program import ROOT, gone
from tests.support.small_model import model

CHAT = [sys.executable, "-m", "dsv4cli", "chat", "--tp", "2", "--temperature", "0", "--no-history"]
# goes on for minutes, whatever is asked
ENDLESS = ["--model", "random:tiny,layers=1,seed=6", "--dtype", "float32"]
SECONDS = 60


def started(folder, *arguments):
    """A conversation without a terminal, and the rank that it has started."""
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    surroundings = {**clean, "CUDA_VISIBLE_DEVICES": "", "XDG_STATE_HOME": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*CHAT, *arguments], cwd=ROOT, env=surroundings, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def ask(program, question):
    """Asks it, and waits for the first words."""
    program.stdin.write(f"{question}\n")
    program.stdin.flush()
    assert program.stdout.read(1)


def ranks(program):
    """The process ids of the other ranks."""
    return list(map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()))


def test_two_ranks_converse_as_one(tmp_path):
    out, err = started(tmp_path).communicate("What is 17 + 25?\nAnd what is 3 + 4?\n", SECONDS)
    assert out == "17 + 25 = 42.\n3 + 4 = 7.\n"
    starting, first, *rest = err.splitlines()
    assert (starting, first) == ("starting 2 ranks", "2 ranks; small sums go through gloo")
    assert sum("first after" in line for line in rest) == 2


class Recorder(Followers):
    """Followers that are not there."""

    def __init__(self):
        super().__init__([], lambda error: None, "")
        self.orders = []

    def tell(self, order):
        self.orders.append(json.dumps(order))


class Other(Talk):
    """A follower's conversation, and the tokens of its last reply."""

    def reply(self, *messages, **wishes):
        for answer, pieces in super().reply(*messages, **wishes):
            self.tokens_drawn = [step.token for step in answer.steps]
            yield answer, pieces


@pytest.mark.parametrize("think", ["off", "high"])
def test_followers_do_what_the_leader_does(think):
    recorder, other = Recorder(), Other(model(), dialogue(), Limits(), "cpu")
    limits = Limits(9, 300, 7, 0, ("x", "yz"))
    with LeadingTalk(model(), dialogue(think), limits, "cpu", recorder) as talk, other:
        for question in ("Who?", "Who? Ünï 😀"):
            *_, (answer, _) = talk.reply([user(question)], Sampling(0.7, 0.9, 5), think_budget=3)
            follow(other, recorder.orders[-1:])
            assert other.tokens_drawn == [step.token for step in answer.steps]
            assert (other.prompt_tokens, other.reused, other.prefilled) == (
                talk.prompt_tokens,
                talk.reused,
                talk.prefilled,
            )
        assert other.limits == limits
        assert (other.dialogue.thinking, other.dialogue.effort) == (talk.dialogue.thinking, talk.dialogue.effort)
    assert other.reused > 0


def test_what_is_refused_is_no_order():
    recorder, full = Recorder(), pytest.raises(ContextFull)
    with LeadingTalk(model(), dialogue(), Limits(max_context=20), "cpu", recorder) as talk, full:
        talk.reply([user("a long question " * 9)], Sampling())
    assert recorder.orders == []


def test_ranks_that_may_be_out_of_step_end(monkeypatch):
    with LeadingTalk(model(), dialogue(), Limits(5), "cpu", Recorder()) as talk:
        reply = talk.reply([user("hi")], Sampling())
        next(reply)
        monkeypatch.setattr(talk._schedule, "logits", lambda: (_ for _ in ()).throw(NotEnoughMemory("full", "less")))
        with pytest.raises(RankLost, match="full"):
            list(reply)


@pytest.mark.parametrize(
    ("error", "resting"),
    [(RuntimeError("gloo: Connection closed by peer"), False), (UnsoundResult("not finite"), True)],
    ids=["a lost rank", "a result"],
)
def test_a_lost_rank_is_told_of_by_whoever_watches_them(monkeypatch, error, resting):
    """Which it was is known when it is gone: until then the others count as busy."""
    recorder = Recorder()
    with LeadingTalk(model(), dialogue(), Limits(5), "cpu", recorder) as talk:
        reply = talk.reply([user("hi")], Sampling())
        next(reply)
        recorder._busy = True
        monkeypatch.setattr(talk._schedule, "logits", lambda: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            list(reply)
    assert recorder._busy is not resting


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_on_all_ranks(tmp_path):
    program = started(tmp_path, *ENDLESS)
    ask(program, "hi")
    [follower] = ranks(program)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == 130
    assert err.splitlines()[-1].endswith("stopped")
    assert gone(follower)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["within an answer", "between answers"])
def test_a_rank_that_is_killed_ends_the_conversation(tmp_path, moment):
    program = started(tmp_path, *(ENDLESS if moment == "within an answer" else []))
    ask(program, "hi")
    [follower] = ranks(program)
    if moment == "between answers":
        while "first after" not in program.stderr.readline():
            pass
    os.kill(follower, signal.SIGKILL)
    begin = time.monotonic()
    _, err = program.communicate("Who?\n", SECONDS)
    assert time.monotonic() - begin < 5
    assert program.returncode == 1
    assert err.splitlines()[-2:] == [
        "error: rank 1 was killed by SIGKILL",
        "→ dsv4 chat --continue goes on after the last finished turn",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_leader_that_ends_takes_the_others_with_it(tmp_path, number):
    program = started(tmp_path, *ENDLESS)
    ask(program, "hi")
    [follower] = ranks(program)
    program.send_signal(number)
    assert gone(follower)
    program.communicate(timeout=SECONDS)
    assert program.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)],
    ids=lambda value: str(value),
)
def test_signals_while_ranks_start(tmp_path, number, code):
    program = started(tmp_path, *ENDLESS)
    assert program.stderr.readline() == "starting 2 ranks\n"
    begin = time.monotonic()
    while not (pids := ranks(program)):
        assert time.monotonic() - begin < SECONDS
        time.sleep(0.05)
    program.send_signal(number)
    assert gone(pids[0])
    assert "Traceback" not in program.communicate(timeout=SECONDS)[1]
    assert program.returncode == code


@pytest.mark.slow
def test_a_degree_that_does_not_divide_is_refused(tmp_path):
    program = started(tmp_path, "--tp", "3")
    out, err = program.communicate("hi\n", SECONDS)
    assert (program.returncode, out) == (2, "")
    assert err.startswith("starting 3 ranks\nerror: num_attention_heads = 4 is not divisible by 3 ranks\n")
