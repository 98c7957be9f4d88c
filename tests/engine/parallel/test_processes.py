"""How ranks part: graphs first, and each way out with its exit code."""

import atexit
import socket
import subprocess
import sys
from weakref import WeakSet

import pytest
import torch
from torch import distributed

from dsv4cli.engine.chat.answers import generate_answers
from dsv4cli.engine.chat.conversation import Conversation
from dsv4cli.engine.parallel import processes
from dsv4cli.engine.parallel.processes import joined, rendezvous_addresses
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import NotEnoughMemory, RankLost
from tests.engine.chat.test_conversation import dialogue, user
from tests.support.program import ROOT
from tests.support.small_model import model


def test_nobody_takes_the_port_meanwhile():
    first, other = rendezvous_addresses(2)
    assert (first.rank, other.rank, other.port) == (0, 1, first.port)
    with socket.socket() as taken, pytest.raises(OSError, match="in use"):
        taken.bind(("", first.port))


@pytest.fixture(autouse=True)
def _apart():
    """What a test that fails has joined does not reach the next one."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def converse(held):
    with Conversation(model(), dialogue(), Limits(5), "cpu") as conversation:
        held.append(conversation)
        for _ in conversation.reply([user("hi")], Sampling(seed=1)):
            pass


def answers():
    request = Request(dialogue().prompt([user("hi")]).ids, Sampling(seed=1), Limits(5))
    return generate_answers(model(), dialogue(), [request], "cpu")


def generate(held):
    held.append(answers())
    assert len(list(held[0])) > 1


@pytest.mark.parametrize("work", [converse, generate])
def test_graphs_go_before_the_ranks_part(monkeypatch, work):
    """A process group waits for the graphs that hold NCCL's launches, and so would the program for ever."""
    steps, left, held = WeakSet(), [], []
    prepared, destroy = GraphRunner._prepared, distributed.destroy_process_group

    def remembered(decoder, *key):
        step = prepared(decoder, *key)
        steps.add(step)
        left.append(len(steps))
        return step

    def counted():
        left.append(len(steps))
        destroy()

    monkeypatch.setattr(runner, "captures", lambda device: True)
    monkeypatch.setattr(GraphRunner, "_prepared", remembered)
    monkeypatch.setattr(distributed, "destroy_process_group", counted)
    with joined(torch.device("cpu"), rendezvous_addresses(1)[0]):
        work(held)
    assert left == [1, 0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (NotEnoughMemory("full"), 5),
        (ValueError("a bug"), 1),
        (SystemExit("words"), 1),
    ],
    ids=lambda value: repr(value),
)
def test_a_rank_that_fails_ends_with_its_own_code(monkeypatch, error, code):
    ends = []
    monkeypatch.setattr(atexit, "register", lambda *call: ends.append(call))
    with pytest.raises(type(error)), joined(torch.device("cpu"), rendezvous_addresses(1)[0]):
        raise error
    [(_, *given)] = ends
    assert given == [code, error]


@pytest.mark.slow
def test_a_rank_that_fails_lets_go_of_nothing(tmp_path):
    """A graph that goes waits for its step, and the step for a rank that may be gone."""
    script = (
        "import torch\n"
        "from dsv4cli.engine.parallel.processes import joined, rendezvous_addresses\n"
        "class Graph:\n"
        "    def __del__(self):\n"
        "        print('waits for ever', flush=True)\n"
        "def answers(graph):\n"
        "    yield graph\n"
        "    yield graph\n"
        "def work():\n"
        "    steps = answers(Graph())\n"
        "    for _ in steps:\n"
        "        raise KeyboardInterrupt\n"
        "with joined(torch.device('cpu'), rendezvous_addresses(1)[0]):\n"
        "    work()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")


def test_a_lost_connection_is_told_in_words(monkeypatch):
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0)
    with pytest.raises(RankLost) as caught, joined(torch.device("cpu"), rendezvous_addresses(1)[0]):
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert caught.value.message == "rank 0 lost the connection to another rank"
