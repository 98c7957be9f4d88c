"""The drafters that are trained are the engine's: same drafts at every place, gradients to all of them."""

import argparse
import json

import pytest
import torch
from safetensors.torch import save_file

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.drafts.drafters import Drafts, default_drafts
from dsv4cli.engine.weights.load import load_model
from tests.support.slow import slow
from tools.nano import acceptance, pool, train_drafter
from tools.nano.acceptance import drafts_along
from tools.nano.drafter import DrafterTwin
from tools.nano.drafting import Blocks, draft_loss
from tools.nano.export import DRAFTER, export_drafter, parameters_of, trunk_tensors
from tools.nano.model import Mode
from tools.nano.quantise import Rounding, working_weights
from tools.nano.shape import initial_parameters, nano_config, parameter_table
from tools.nano.train_drafter import MODELS, NANO

CONFIG = nano_config()
SIZE = 5


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


def twin_of(name: str) -> DrafterTwin:
    return MODELS[name].twin(parse_config(MODELS[name].values, name))


def table_of(name: str):
    return parameter_table(parse_config(MODELS[name].values, name))


def parameters(name: str) -> dict[str, torch.Tensor]:
    """The drafter's initial ones, with those that start at a constant moved from it."""
    generator, first = torch.Generator().manual_seed(3), initial_parameters(twin_of(name).config, 0)
    found = {name: tensor for name, tensor in first.items() if name.startswith(DRAFTER)}
    for tensor in found.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return found


def tokens(length: int) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))


def trunk() -> dict[str, torch.Tensor]:
    given = {name: tensor for name, tensor in parameters_of(NANO).items() if not name.startswith(DRAFTER)}
    return working_weights(given, table_of("nano"), Rounding(False, True), torch.float32)


@pytest.mark.parametrize("name", ["nano-0731", *slow("nano")], indirect=True)
@pytest.mark.parametrize(
    "simulate", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="rounded")]
)
def test_the_same_drafts_in_fp32(name, simulate, tmp_path):
    # the context is one token, the window but one, the window, and more
    ids, places, size = tokens(150), [1, 127, 128, 129], default_drafts(twin_of(name).config)
    export_drafter(parameters(name), MODELS[name].values, NANO, tmp_path)
    net = load_model(FolderSource(name, tmp_path), Numerics(torch.float32, simulate))
    given = ids[0].tolist()

    logits = []

    def followed(place):
        def choose(row, number):
            logits.append(row)
            return torch.tensor([given[place + 1 + number]])

        return choose

    drafts = [
        one
        for some, start in ((given[:2], 1), (given[:130], 127))
        for one in drafts_along(net, some, start, size, followed)
    ]
    twin, mode = twin_of(name), Mode(simulate, sparse=True)
    weights = working_weights(parameters(name), table_of(name), Rounding(True, simulate), torch.float32)
    blocks = Blocks(ids, torch.tensor([places]), torch.ones(1, len(places), size, dtype=torch.bool))
    with torch.no_grad():
        ours = twin(trunk(), weights, twin.see(trunk(), ids, mode).context, blocks, mode)
    theirs = torch.cat(logits).view(len(places), size, -1)
    # the engine's MTP block reports the chance of the draft, which is the text's token here, not the likeliest
    chances = theirs.softmax(-1).amax(-1) if name == "nano" else torch.cat([one.chances for one in drafts])
    for mine, expected in ((ours.logits[0], theirs), (ours.confidence[0].sigmoid(), chances)):
        distance = (mine - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        # sums in another order; where values are rounded, they move a code here and there to its neighbour
        assert distance.max() <= (0.1 if simulate else 1e-5), distance
        assert distance.median() <= (0.05 if simulate else 1e-5), distance


def test_the_trunk_is_that_of_nano_byte_for_byte(name, tmp_path):
    export_drafter(parameters(name), MODELS[name].values, NANO, tmp_path)
    ours, theirs = trunk_tensors(tmp_path), trunk_tensors(NANO)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.slow
def test_gradients_reach_all_of_the_drafter(name):
    found = {key: tensor.requires_grad_(not key.endswith("bias")) for key, tensor in parameters(name).items()}
    ids = tokens(300)
    blocks = Blocks.choose(ids, torch.ones_like(ids, dtype=torch.bool), 40, default_drafts(twin_of(name).config))
    twin, mode, given = twin_of(name), Mode(True, sparse=True), trunk()
    seen = twin.see(given, ids, mode)
    working = working_weights(found, table_of(name), Rounding(True, True), torch.float32)
    drafted = twin(given, working, seen.context, blocks, mode)
    draft_loss(drafted, blocks, seen.main, given["head.weight"]).total.backward()
    for key, tensor in found.items():
        if key.endswith("gate.bias"):
            assert tensor.grad is None, key
        else:
            assert tensor.grad.isfinite().all(), key
            # some tokens never come, and an expert may have no row
            assert key.endswith("markov_w1.weight") or (tensor.grad != 0).float().mean() > 0.7, key


def test_blocks_are_taken_from_answers():
    learned = torch.zeros(2, 64, dtype=torch.bool)
    learned[0, 20:31] = learned[1, 40:60] = True
    ids = torch.arange(128).view(2, 64)
    blocks = Blocks.choose(ids, learned, 10, SIZE)
    # every token of the first answer but its last
    assert sorted(blocks.places[0].tolist()) == [*range(20, 30)]
    for row, places in enumerate(blocks.places.tolist()):
        assert len(set(places)) == 10
        for number, place in enumerate(places):
            assert blocks.tokens[row, number].tolist() == ids[row, place : place + SIZE + 1].tolist()
            # the token at the place and the first draft are an answer's, and all drafts up to its end count
            assert learned[row, place]
            assert blocks.wanted[row, number, 0]
            assert torch.equal(blocks.wanted[row, number], learned[row, place + 1 : place + 6])


def test_what_counts_as_accepted(monkeypatch):
    # a prompt of two tokens, an answer of six, and three drafts behind each of its tokens but the last
    ids = [90, 91, 10, 11, 12, 13, 14, 15]
    drafted = [[11, 12, 13], [12, 0, 14], [0, 14, 15], [14, 15, 0], [15, 0, 0]]
    found = [Drafts(torch.tensor([row]), torch.ones(1, 3)) for row in drafted]
    monkeypatch.setattr(acceptance, "drafts_along", lambda model, ids, start, count: found)
    one = acceptance.acceptance(None, ids, 2, 3)
    assert (one.wanted, one.accepted) == ([5, 4, 3], [4, 2, 1])
    # behind 10 three are accepted and 14 is drawn, behind 14 the last is
    assert (one.steps, one.tokens) == (2, 5)
    assert (one + one).shares == one.shares == [4 / 5, 2 / 4, 1 / 3]


def test_the_text_says_which_tokens_are_an_answers():
    ids, learned = pool.make(0, 256)
    assert ids.shape == learned.shape == (pool.PIECE, 256)
    assert 0.2 < learned.float().mean() < 0.8
    # an answer ends with its EOS, and no prompt has one
    assert learned[ids == CONFIG.eos_token_ids[0]].all()


@pytest.mark.slow
def test_training_learns_and_leaves_a_checkpoint(name, tmp_path, monkeypatch):
    monkeypatch.setattr(train_drafter, "HELD_BACK", 1)
    monkeypatch.setattr(train_drafter, "LOG_STEPS", 5)
    ids, learned = (tensor[:3] for tensor in pool.make(0, 128))
    save_file({"ids": ids.contiguous(), "learned": learned.contiguous()}, tmp_path / "text.safetensors")
    arguments = argparse.Namespace(
        model=name, text=tmp_path / "text.safetensors", out=tmp_path, resume=None, minutes=0.6, seed=0, rate=2e-3,
        rows=1, places=8, device="cpu",
    )  # fmt: skip
    train_drafter.Trainer(arguments).train()
    found = [json.loads(line)["entropy"] for line in (tmp_path / "log.jsonl").read_text().splitlines()[1:-1]]
    assert found[-1] < 0.7 * found[0]
    load_model(FolderSource(name, tmp_path / "checkpoint"), Numerics.reference())
