"""`dsv4 chat --tp N`: two ranks converse as one, and end together; in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4cli.engine.chat.conversation import ContextFull, Conversation
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import Follower
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, RankLost, UnsoundResult
from tests.engine.chat.test_conversation import dialogue, user
from tests.support.program import ROOT, gone
from tests.support.small_model import model, prompts
from tests.support.waiting import comes, says

CHAT = [sys.executable, "-m", "dsv4cli", "chat", "--tp", "2", "--temperature", "0", "--no-history"]
# goes on for minutes, whatever is asked
ENDLESS = ["--model", "random:tiny,layers=1,seed=6", "--dtype", "float32"]
# a guard, not an expectation: other tests may have the machine's cores
SECONDS = 600


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


# commands/run/test_tp.py starts two by default, and below one process plays both
@pytest.mark.slow
def test_two_ranks_converse_as_one(tmp_path):
    out, err = started(tmp_path).communicate("What is 17 + 25?\nAnd what is 3 + 4?\n", SECONDS)
    assert out == "17 + 25 = 42.\n3 + 4 = 7.\n"
    starting, first, *rest = err.splitlines()
    assert (starting, first) == ("starting 2 ranks", "2 ranks; all-reduce uses gloo")
    assert sum(" per step · first token after" in line for line in rest) == 2  # with drafts, in both ranks


class Recorder(Followers):
    """Followers that are not there."""

    def __init__(self):
        super().__init__(World())
        self.orders, self.busy = [], False

    def send_orders(self, orders):
        self.orders += json.loads(json.dumps(orders))
        self.busy = True

    def rest(self):
        self.busy = False

    def taken(self, engine):
        """All orders so far, with those that the engine would tell with its next step."""
        waiting = json.loads(json.dumps(engine._orders.waiting))
        orders, self.orders, engine._orders.waiting = [*self.orders, *waiting], [], []
        return orders


def state(runner):
    """What a runner holds: of each layer the rings and pools, and which slots and blocks are taken."""
    tensors = [ring.data for layer in runner.cache.layers for ring in layer.rings()]
    tensors += [pool.data for layer in runner.cache.layers for pool in layer.pools()]
    return [tensor.tolist() for tensor in tensors], runner.cache.free_slots, runner.cache.used_blocks


@pytest.mark.parametrize("think", [pytest.param("off", marks=pytest.mark.slow), "high"])
def test_followers_do_what_the_leader_does(think):
    recorder, other = Recorder(), Follower(model(), "cpu")
    limits = Limits(9, 300, 7, 0, ("x", "yz"))
    with Conversation(model(), dialogue(think), limits, "cpu", recorder) as conversation:
        for question in ("Who?", "Who? Ünï 😀"):
            *_, (answer, _) = conversation.reply([user(question)], Sampling(0.7, 0.9, 5), think_budget=3)
            assert answer.tokens
            assert not recorder.busy
            orders = recorder.taken(conversation.engine)
            other.carry_out(orders)
            assert state(other.runner) == state(conversation.engine.runner)
        assert conversation.reused > 0
        assert not any("Who" in json.dumps(order) for order in orders)


@pytest.mark.slow  # tests/engine/runtime/test_ahead.py has followers of many requests
def test_followers_of_many_requests_end_and_join_as_the_leader_says():
    recorder, other = Recorder(), Follower(model(), "cpu")
    requests = [
        Request(ids, Sampling(seed=1), Limits(4 + number, prefill_chunk=50)) for number, ids in enumerate(prompts())
    ]
    engine = Engine.of(model(), requests[:3], "cpu", recorder)
    for step in range(20):
        engine.step()
        if step == 1:
            engine.cancel(requests[0])
        if step == 3:
            engine.add(requests[3])
        other.carry_out(recorder.taken(engine))
        assert state(other.runner)[0] == state(engine.runner)[0]
        if not engine.busy:
            break
    assert recorder.busy is False
    assert step > 5


def test_what_is_refused_is_no_order():
    recorder, full = Recorder(), pytest.raises(ContextFull)
    with Conversation(model(), dialogue(), Limits(max_context=20), "cpu", recorder) as conversation, full:
        conversation.reply([user("a long question " * 9)], Sampling())
    assert recorder.orders == []


def test_ranks_that_may_be_out_of_step_end(monkeypatch):
    with Conversation(model(), dialogue(), Limits(5), "cpu", Recorder()) as conversation:
        reply = conversation.reply([user("hi")], Sampling())
        next(reply)
        monkeypatch.setattr(
            conversation.engine.runner, "run", lambda pick: (_ for _ in ()).throw(NotEnoughMemory("full", "less"))
        )
        with pytest.raises(RankLost, match="full"):
            list(reply)


@pytest.mark.parametrize(
    ("error", "resting"),
    [(RuntimeError("gloo: Connection closed by peer"), False), (UnsoundResult("not finite"), True)],
    ids=["a lost rank", "a result"],
)
def test_a_lost_rank_is_reported_by_whoever_watches_them(monkeypatch, error, resting):
    """Which it was is known when it is gone: until then the others count as busy."""
    recorder = Recorder()
    with Conversation(model(), dialogue(), Limits(5), "cpu", recorder) as conversation:
        reply = conversation.reply([user("hi")], Sampling())
        next(reply)
        monkeypatch.setattr(conversation.engine.runner, "run", lambda pick: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            list(reply)
        assert recorder.busy is not resting


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
        assert says("first token after", program.stderr)
    os.kill(follower, signal.SIGKILL)
    _, err = program.communicate("Who?\n", SECONDS)
    assert program.returncode == 1
    assert err.splitlines()[-2:] == [
        "error: rank 1 was killed by SIGKILL",
        "→ dsv4 chat --continue resumes after the last finished turn",
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
    assert comes(lambda: ranks(program))
    pids = ranks(program)
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
