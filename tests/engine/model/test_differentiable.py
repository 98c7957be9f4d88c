"""The plain forward can be trained: gradients reach every parameter, are right, and flow through the cache."""

import re
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random
from tests.support.drafting import mtp_logits
from tests.support.golden_data import chunks
from tests.support.slow import slow

LENGTHS = (9, 133, 1)
# every kind of layer; all entries and all experts are chosen, so that the loss has no steps
SMALL = {"hidden_size": 64, "head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 32}
SMALL |= {"index_head_dim": 32, "index_topk": 64, "moe_intermediate_size": 32, "n_routed_experts": 3, "vocab_size": 64}
SMALL |= {"num_experts_per_tok": 3, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
# what only chooses has no gradient: the indexer chooses entries, the router's bias chooses experts
CHOOSING = re.compile(r"\.indexer\.|\.gate\.bias$")


@pytest.fixture(scope="module")
def model() -> Transformer:
    net = build_random(parse_config(TINY | SMALL, "test"), Numerics.plain(), formats=Formats("f32", "f32", "f32"))
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return net


def texts(model: Transformer) -> list[list[int]]:
    """Tokens of three sequences, each with two more for the targets."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(model.config.vocab_size, (n + 2,), generator=generator).tolist() for n in LENGTHS]


def loss(model: Transformer, split: dict[int, list[int]] | None = None) -> torch.Tensor:
    """Cross entropy of the model and of its MTP block over all texts in one ragged batch, fp64.

    split: for the sequence of a length, its chunks; each step takes one chunk of every sequence that has one left.
    """
    cache = Cache(model.config, model.numerics, slots=len(LENGTHS))
    places = [chunks((split or {}).get(n, []), n) for n in LENGTHS]
    sequences = [cache.allocate() for _ in LENGTHS]
    total = torch.zeros((), dtype=torch.float64)
    for step in range(max(map(len, places))):
        work = [(s, ids, *p[step]) for s, ids, p in zip(sequences, texts(model), places, strict=True) if step < len(p)]
        batch = make_batch(cache, [(sequence, ids[start:end]) for sequence, ids, start, end in work])
        first, second = (
            torch.tensor([token for _, ids, start, end in work for token in ids[start + ahead : end + ahead]])
            for ahead in (1, 2)
        )
        streams = model(batch, cache.layers).streams
        drafted = mtp_logits(model, streams, first, batch, cache, torch.arange(len(first)))
        for logits, targets in ((model.logits(streams), first), (drafted, second)):
            total = total + F.cross_entropy(logits.double(), targets, reduction="sum")
        for sequence, _, start, end in work:
            cache.advance(sequence, end - start)
    return total / sum(LENGTHS)


def gradients(model: Transformer, split: dict[int, list[int]] | None = None) -> dict[str, torch.Tensor | None]:
    """The gradient of each floating parameter."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parts = torch.autograd.grad(loss(model, split), list(named.values()), allow_unused=True)
    return dict(zip(named, parts, strict=True))


def test_every_parameter_that_computes_has_a_gradient(model):
    for name, gradient in gradients(model).items():
        assert (gradient is None) == bool(CHOOSING.search(name)), name
        if gradient is not None:
            assert gradient.isfinite().all(), name
            # some tokens are never read; anything else without a gradient is a path cut off
            assert name == "embed.weight" or (gradient != 0).double().mean() > 0.9, name


def kind(name: str) -> str:
    """A parameter's name within its block; the MTP block counts as one more."""
    return re.sub(r"^(layers|mtp)\.\d+\.", "block.", name)


@pytest.mark.slow
def test_gradients_are_the_slopes_of_the_loss(model):
    named = dict(model.named_parameters())
    found = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
    for family, names in groupby(sorted(found, key=kind), kind):
        # up the gradient, as far as the loss is nearly straight and its change far above fp32 noise (1e-6 here)
        members = list(names)
        slope = sum(found[name].square().sum().item() for name in members) ** 0.5
        size = sum(named[name].square().sum().item() for name in members) ** 0.5
        step = min(0.02 / slope, 0.02 * max(size, 1))
        moves = {name: found[name] * (step / slope) for name in members}
        rise = risen(model, moves, 1) - risen(model, moves, -1)
        assert rise / (2 * step) == pytest.approx(slope, rel=0.02), family


@torch.no_grad()
def risen(model: Transformer, moves: dict[str, torch.Tensor], sign: int) -> float:
    """The loss with parameters moved, which are put back."""
    named = dict(model.named_parameters())
    kept = {name: named[name].clone() for name in moves}
    for name, move in moves.items():
        named[name].add_(move, alpha=sign)
    value = loss(model).item()
    for name, values in kept.items():
        named[name].copy_(values)
    return value


@pytest.mark.slow  # test_every_parameter_that_computes_has_a_gradient goes the same way
@pytest.mark.parametrize(
    "split", [{133: [70], 9: [3]}, *slow({133: [127, 1, 4], 9: [1, 1, 2]})], ids=["two steps", "four"]
)
def test_gradients_flow_through_the_cache(split, model):
    whole, cut = gradients(model), gradients(model, split)
    for name, expected in whole.items():
        if expected is not None:
            # sums in another order: fp32
            assert (cut[name] - expected).norm() <= 1e-4 * expected.norm(), name
