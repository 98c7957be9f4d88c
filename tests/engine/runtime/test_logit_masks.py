"""The logits that tokens are drawn from: masks, biases and bans of each row, on a CPU and on a GPU."""

import gc
from itertools import pairwise

import pytest
import torch

from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.sampling import logit_biases
from dsv4cli.engine.runtime.sampling.logit_masks import BANNED, RequestTables, masked_logits
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import build_random
from tests.engine.runtime.test_speculation import Divided, Script
from tests.support.small_model import FP32
from tests.support.speculation import CONFIGS, mask_of, text

WIDTH = 131  # no multiple of 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def chunk(drafts=(), constraint=None, bias=()) -> Chunk:
    request = Request([1], Sampling(0.0, logit_bias=bias), Limits(), constraint)
    return Chunk(request, 0, 1 + len(drafts), 0, list(drafts))


def masked(*allowed, width=136) -> Script:
    """A constraint of one mask a row, None for none. width: how many tokens a mask covers."""
    rule = Script(banned={0: [2, 130]})
    rule.masks = lambda drafts: [None if own is None else mask_of(own, width) for own in allowed]
    return rule


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_has_what_its_request_asks_for(device):
    given = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    logits, expected = given.clone(), given.clone()
    ready = [
        chunk(),
        chunk([4, 5], masked([0, 2, 7, 8, 130], None, [129])),
        chunk([6], bias=((0, -100.0), (130, 1.5))),
        chunk([], Script(banned={0: [3]}), ((3, 100.0), (4, 2.0))),
        chunk([], masked()),
    ]
    keep = torch.full((WIDTH,), BANNED, device=device)
    expected[1] = keep
    expected[1, [0, 7, 8]] = given[1, [0, 7, 8]]  # 2 and 130 are banned
    expected[3] = keep
    expected[3, 129] = given[3, 129]
    expected[4:6, 0] += -100.0
    expected[4:6, 130] += 1.5
    expected[6, 3] = BANNED
    expected[6, 4] += 2.0
    expected[7, [2, 130]] = BANNED
    assert torch.equal(masked_logits(ready, logits, RequestTables.on(logits.device)), expected)
    assert torch.equal(logits, given)


def test_masks_of_a_step_may_have_different_lengths():
    """A grammar's covers whole words of its vocabulary, one that bans tokens covers the model's."""
    given = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    found = masked_logits(
        [chunk([], masked([5], width=160)), chunk([], masked([6]))], given, RequestTables.on(given.device)
    )
    assert (found > BANNED).nonzero().tolist() == [[0, 5], [1, 6]]


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_follow_the_bias_and_precede_the_bans(device):
    given = torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0]]).to(device)
    bias, rule = ((0, 3.0), (1, -2.0)), Script(banned={0: [3]})
    request = Request([0, 1, 3], Sampling(0.0, logit_bias=bias, repetition_penalty=2.0), Limits(), rule)
    expected = torch.tensor([[2.0, -8.0, 0.5, BANNED, -1.0]]).to(device)
    before = given.clone()
    assert torch.equal(masked_logits([Chunk(request, 0, 3, 0, [])], given, RequestTables.on(given.device)), expected)
    assert torch.equal(given, before)


@pytest.mark.parametrize("rule", [Script(banned={0: [3]}), masked([1, 2])], ids=["ban", "mask"])
def test_the_given_logits_stay_as_they_are(rule):
    logits = torch.zeros(1, WIDTH)
    assert masked_logits([chunk([], rule)], logits, RequestTables.on(logits.device)).min() == torch.tensor(BANNED)
    assert not logits.any()


def test_nothing_is_made_where_nothing_is_asked():
    logits = torch.zeros(3, WIDTH)
    assert masked_logits([chunk(), chunk([7], Script())], logits, RequestTables.on(logits.device)) is logits


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_an_engine_on_a_gpu_follows_a_mask(drafts):
    """Steps ahead, or drafts: every token is one that the tokens before it let come."""
    config = parse_config(CONFIGS["mtp"], "test")
    model = build_random(config, Numerics.plain(), device="cuda", formats=FP32)
    one = Engine(model, Capacity(3, 300), "cuda", drafting=Drafting(drafts))
    requests = [
        Request(text(9 + number, number), Sampling(1.0, 0.9, number), Limits(60), rule, stop_ids=())
        for number, rule in enumerate([Divided(0), None, Divided(20)])
    ]
    for request in requests:
        one.add(request)
    while one.busy:
        one.step()
    for request, start in ((requests[0], 0), (requests[2], 20)):
        path = [0, *request.ids[len(request.prompt) :]][start:]
        assert all((first + second) % 3 == 0 for first, second in pairwise(path))
    assert not all((first + second) % 3 == 0 for first, second in pairwise(requests[1].ids))


def test_a_bias_is_uploaded_once_for_all_steps(monkeypatch):
    """However many tokens it has; that of a request that has ended is freed."""
    made, upload = [], logit_biases.upload
    monkeypatch.setattr(logit_biases, "upload", lambda *given: made.append(1) or upload(*given))
    logits, bias = torch.zeros(3, WIDTH), tuple((token, 0.5 * token) for token in range(WIDTH))
    one, tables = chunk([4], bias=bias), RequestTables.on(logits.device)
    for _ in range(3):
        found = masked_logits([chunk(), one], logits, tables)
        assert not found[0].any()
        assert found[1:].tolist() == [[0.5 * token for token in range(WIDTH)]] * 2
    assert len(made) == len(tables.biases._rows) == 1
    other = chunk(bias=bias)  # another answer to the prompt
    assert masked_logits([one, other], logits, tables)[2].tolist() == found[1].tolist()
    assert len(made) == 1
    del one, other
    gc.collect()
    assert len(tables.biases._rows) == 0
