"""`dsv4 verify` names what is wrong with a faulty server, at the right check, and nothing of a right one."""

import threading

import pytest
import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.verification import limits
from dsv4cli.engine.verification.discover import ServerHints, discover
from dsv4cli.engine.verification.plan import Scope, plan_checks
from dsv4cli.engine.verification.reference import read_reference
from dsv4cli.engine.verification.sender import Sender
from dsv4cli.engine.verification.verify_run import VerifyRun
from tests.support import serving
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.server_faults import FAULTS
from tests.support.serving import asking, served
from tests.support.shared_models import load_anew
from tests.support.slow import slow

# seconds for a response, on a machine that is busy with other tests
RESPONSE_SECONDS = 3600
# named with the fewest requests
FEW = ("errors are 500",)


@pytest.fixture(scope="module")
def nano():
    with served() as one:
        yield one


# checks whose answers another check judges
NEEDS = {
    "replies.thinking-off": ("replies.reasoning",),
    "replies.usage": ("replies.stream", "replies.utf8"),
    "replies.content": ("replies.thinking-off",),
    "replies.markup": ("replies.thinking-off",),
    "tools": ("tools.answers",),
    "batching": ("batching.repeat",),
}


def checked(url, scope, *names):
    """What is wrong, by the check that says so. names: checks to make, instead of all in the scope."""
    run = VerifyRun(Sender(url, "", 16, RESPONSE_SECONDS))
    server = discover(url, run.sender.send, ServerHints())
    checks = plan_checks(server, scope, lambda: run.calls, read_reference("nano"))
    run.run([one for one in checks if not names or one.name in names], lambda done, total: None)
    return {one.check.name: [p.what for p in one.problems] for one in run.results if one.verdict == "wrong"}


def id_of(fault):
    return fault.name.replace(" ", "-")


CHEAP = [one for one in FAULTS if one.name in FEW]
REST = [one for one in FAULTS if one.name not in FEW]


@pytest.mark.parametrize("fault", [*CHEAP, *slow(*REST)], ids=id_of)
def test_a_fault_is_named(fault, nano, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE", 1.0 if "hangs" in fault.name else 30.0)
    needed = NEEDS.get(fault.check) or NEEDS.get(fault.check.partition(".")[0], ())
    with FaultyProxy(nano.port, fault).serving() as proxy:
        wrong = checked(proxy.url, Scope(quick=not fault.whole, long="long." in fault.check), fault.check, *needed)
    assert fault.check in wrong, wrong


@pytest.mark.slow  # test_verify.py has a right server
def test_a_proxy_without_a_fault_is_right(nano):
    with FaultyProxy(nano.port, Fault("none", "")).serving() as proxy:
        assert checked(proxy.url, Scope(quick=True, only=frozenset({"limits"}))) == {}


def swap_rows(model):
    """Two experts have exchanged one row."""
    weight = model.get_parameter("layers.1.ffn.experts.w1.weight")
    weight[0, 3], weight[1, 3] = weight[1, 3].clone(), weight[0, 3].clone()


def double_scale(model):
    """One bf16 scale of a norm is twice as large."""
    model.get_parameter("layers.1.attn.kv_norm.weight")[5] *= 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", [swap_rows, double_scale])
def test_a_damaged_model_has_other_numbers(damage, monkeypatch):
    def load(name):
        model = load_anew(resolve_model(name), Numerics.reference())
        with torch.no_grad():
            damage(model)
        return model

    monkeypatch.setattr(serving, "shared_model", load)
    with served() as one:
        assert list(checked(one.url, Scope(only=frozenset({"numbers"})))) == ["numbers.logprobs"]


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [AUTO_DRAFTING, Drafting(3, always=True)], ids=["auto", "drafts"])
@pytest.mark.parametrize("load", [False, True], ids=["alone", "under-load"])
def test_a_right_server_is_never_wrong(load, drafting, monkeypatch):
    monkeypatch.setattr(serving, "AUTO_DRAFTING", drafting)
    with served() as nano:
        _verify_often(nano, load)


def _verify_often(nano, load):
    ended = threading.Event()

    def ask():
        number = 0
        while not ended.is_set():
            number += 1
            nano.post("/v1/chat/completions", asking(f"What is {number} + 25?", max_tokens=24))

    threads = [threading.Thread(target=ask) for _ in range(2 * load)]
    for one in threads:
        one.start()
    try:
        for _ in range(5):
            assert checked(nano.url, Scope(quick=True)) == {}
    finally:
        ended.set()
        for one in threads:
            one.join()


@pytest.mark.slow
def test_every_check_of_a_right_server_is_right(nano):
    assert checked(nano.url, Scope()) == {}
