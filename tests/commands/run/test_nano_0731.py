"""nano-0731 is nano with a DSpark drafter: the same trunk, the same answers, and drafts that it takes."""

import pytest
import torch
from safetensors.torch import load_file

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.support.golden_data import remember_weights
from tests.support.program import Program
from tests.support.questions import chosen, questions
from tools.nano.export import WEIGHTS, trunk_tensors
from tools.nano.score import Asking, Examinee
from tools.nano.shape import nano_0731_config
from tools.nano.train_drafter import NANO

FOLDER = NANO.with_name("nano-0731")
# of a block
DRAFTS = 5
# questions that default tests ask, and those of tasks of which nearly every draft is accepted
FEW = {"sums": 1, "facts": 1}
SURE = {"sums": 8, "products": 2, "long sums": 3, "facts": 8, "tables": 3, "units": 4, "tools": 4, "multi turn": 6}


@pytest.fixture(scope="module")
def nano_0731():
    return Examinee("nano-0731", "cpu")


@pytest.fixture
def examinee(nano_0731, monkeypatch):
    remember_weights(monkeypatch)
    return nano_0731


def asked(counts):
    return [item for items in chosen(counts).values() for item in items]


def ids_of(examinee, items):
    return {item["messages"][-1]["content"]: reply["ids"] for item, reply in examinee.replies(items)}


def tokens(examinee, prompts, most):
    """Greedy tokens of an engine that drafts so many at most, and what its drafts came to."""
    requests = [Request(prompt, Sampling(0.0), Limits(max_tokens=24)) for prompt in prompts]
    found = {request: [] for request in requests}
    with Engine.of(examinee.model, requests, "cpu", drafting=Drafting(most)) as engine:
        while engine.busy:
            for result in engine.step():
                found[result.request] += [token.id for token in result.tokens]
        return [found[request] for request in requests], engine.draft_report()


def test_its_trunk_is_that_of_nano_bit_for_bit():
    ours, theirs = load_file(FOLDER / WEIGHTS), trunk_tensors(NANO)
    assert {name for name in ours if not name.startswith("mtp.")} == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_it_reads_the_prompts_of_nano():
    nano, own = Asking(resolve_model("nano")), Asking(resolve_model("nano-0731"))
    for item in [item for items in questions().values() for item in items][::20]:
        assert own.prompt(item) == nano.prompt(item)


@pytest.mark.slow  # its trunk is nano's, and drafts change nothing
def test_it_answers_as_nano_does(examinee):
    items = asked(FEW)
    assert ids_of(examinee, items) == ids_of(Examinee("nano", "cpu"), items)


def test_drafts_of_the_engine_are_accepted_and_change_nothing(examinee):
    prompts = [examinee.prompt(item) for item in asked({"sums": 1, "facts": 1})]
    without, nothing = tokens(examinee, prompts, 0)
    with_drafts, report = tokens(examinee, prompts, DRAFTS)
    assert with_drafts == without
    assert nothing is None
    assert report.drafter == "dspark"
    assert report.accepted >= report.steps


def test_inspect_says_what_it_is(monkeypatch, capsys):
    done = Program(monkeypatch, capsys)("inspect", "nano-0731")
    assert done.code == 0
    assert "drafter     DSpark, 3 blocks\n" in done.out
    assert nano_0731_config().dspark.block_size == DRAFTS


@pytest.mark.slow  # test_drafts_of_the_engine_are_accepted_and_change_nothing has few
@pytest.mark.parametrize(("counts", "least"), [({"sums": 1}, 4.0), (SURE, 4.5)], ids=["few", "many"])
def test_most_of_five_drafts_are_what_it_says(examinee, counts, least):
    found = [*examinee.acceptance(asked(counts)).values()]
    every = sum(found[1:], found[0])
    assert every.shares[0] > 0.95
    assert every.length > least, found
