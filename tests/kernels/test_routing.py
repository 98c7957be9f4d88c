"""The router against pure Python and against fp64."""

import math

import pytest
import torch

from dsv4cli.kernels.routing import ref, route, route_by_id
from tests.kernels.rounding import FP32
from tests.support.slow import slow

# of a score, as a part of it: exp, log1p and the root, each right to a few units of the last place
SCORE = 16 * FP32


def score(logit: float) -> float:
    return math.sqrt(logit if logit > 40 else math.log1p(math.exp(logit)))


def given(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, T + 1] and weight [E, T + 1] whose product is exactly these logits [T, E]."""
    tokens, experts = logits.shape
    return torch.eye(tokens, tokens + 1), torch.cat((logits.T, torch.ones(experts, 1)), 1)


def spaced(tokens: int, experts: int) -> torch.Tensor:
    """Numbers in [-1, 1) that differ by at least 2 / experts, in random order: [T, E]."""
    return torch.rand(tokens, experts).argsort(-1) * (2 / experts) - 1


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("logit", [-80.0, -1.0, 0.5, 20.01, 3e38, *slow(-20.0, 0.0, 19.99, 50.0, 1e4)])
def test_scores(logit):
    x, weight = given(torch.tensor([[logit, 0.25]]))
    _, weights = route_by_id(x, weight, torch.tensor([[0, 1]]), torch.tensor([0]), 1.0)
    total = score(logit) + score(0.25)
    # above 20 softplus drops exp(-20) / 20 = 1e-10 of its value
    assert weights.tolist()[0] == pytest.approx([score(logit) / total, score(0.25) / total], rel=4 * SCORE)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("logit", [*slow(7.0), 10.0625, *slow(11.0, 12.0), 19.5, 20.5])
def test_softplus_is_linear_above_20_only(logit):
    # beside an expert that has nearly all of the weight, a score's error is the error of its share; at 10 the logit in
    # the place of its softplus would be twice as far off as this bound
    x, weight = given(torch.tensor([[logit, 1e8]]))
    _, weights = route_by_id(x, weight, torch.tensor([[0, 1]]), torch.tensor([0]), 1.0)
    assert weights[0, 0].item() == pytest.approx(score(logit) / (score(logit) + 1e4), rel=SCORE)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scale", [*slow(1.0), 2.5])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 2), (1, 1, 1), (1, 13, 6), (7, 13, 6), (17, 8, 8)])
def test_best_first_by_biased_score_with_unbiased_weights(tokens, experts, k, scale):
    logits, bias = spaced(tokens, experts), torch.randn(experts)
    chosen, weights = route(*given(logits), bias, k, scale)
    assert (chosen.shape, chosen.dtype) == ((tokens, k), torch.int64)
    assert (weights.shape, weights.dtype) == ((tokens, k), torch.float32)
    for row, found, shares in zip(logits.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        biased = [score(logit) + extra for logit, extra in zip(row, bias.tolist(), strict=True)]
        best = sorted(range(experts), key=lambda e, biased=biased: -biased[e])[:k]
        assert found == best
        total = sum(score(row[expert]) for expert in best)
        assert shares == pytest.approx([score(row[expert]) / total * scale for expert in best], rel=4 * SCORE)
        assert sum(shares) == pytest.approx(scale, rel=4 * SCORE)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_hash_layer_takes_the_experts_of_its_table_in_their_order(tokens):
    logits, table = spaced(tokens, 13), torch.rand(50, 13).argsort(-1)[:, :6]
    ids = torch.randint(0, 50, (tokens,))
    chosen, weights = route_by_id(*given(logits), table, ids, 1.5)
    assert torch.equal(chosen, table[ids])
    exact = torch.nn.functional.softplus(logits.double()).sqrt().gather(-1, chosen)
    exact *= 1.5 / exact.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), exact, rtol=4 * SCORE, atol=0)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tokens", [5, 19])
def test_a_hash_layer_of_many_tokens_computes_all_logits(tokens, monkeypatch):
    monkeypatch.setattr("dsv4cli.kernels.routing.kernel.GATHERED_TOKENS", 4)
    test_a_hash_layer_takes_the_experts_of_its_table_in_their_order(tokens)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("tokens", [*slow(1), 5, *slow(19)])
def test_rows_get_the_experts_of_others(tokens, gathered, monkeypatch):
    """Bit for bit."""
    monkeypatch.setattr("dsv4cli.kernels.routing.kernel.GATHERED_TOKENS", 64 if gathered else 0)
    routed = torch.randint(0, tokens, (tokens,))
    logits, bias, table = spaced(tokens, 13), torch.randn(13), torch.rand(50, 13).argsort(-1)[:, :6]
    ids, (x, weight) = torch.randint(0, 50, (tokens,)), given(logits)
    for own, others in (
        (route(x, weight, bias, 6, 1.5), route(x, weight, bias, 6, 1.5, routed)),
        (route_by_id(x, weight, table, ids, 1.5), route_by_id(x, weight, table, ids, 1.5, routed)),
    ):
        assert all(torch.equal(mine[routed], theirs) for mine, theirs in zip(own, others, strict=True))


# tokens, experts, width: those of Flash and Pro, and what fills no block
SHAPES = [
    pytest.param((1, 256, 4096), marks=pytest.mark.slow),
    (1, 5, 257),
    pytest.param((2, 384, 7168), marks=pytest.mark.slow),
    (17, 20, 130),
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_fp32_sums_of_exact_products(shape, dtype, stored):
    tokens, experts, width = shape
    x = torch.randn(tokens, 2 * width).to(dtype)[:, :width]
    weight, bias = (torch.randn(experts, width) * 3 / width**0.5).to(stored), torch.randn(experts)
    exact = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt()
    order = (exact + bias.double()).sort(-1, descending=True)
    chosen, weights = route(x, weight, bias, 3, 1.0)
    # sums of `width` products of size 3 / sqrt(width), in some order, and scores no steeper than their logits
    error = SCORE + 3 * width**0.5 * FP32
    clear = (order.values[:, :3] - order.values[:, 1:4] > 2 * error).all(-1)
    assert clear.float().mean() >= 0.9
    assert torch.equal(chosen[clear], order.indices[clear, :3])
    expected = exact.gather(-1, chosen)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=2 * error)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tile", [(16, 16, 32, 3), *slow((32, 64, 64, 1), (64, 64, 128, 2))], ids=str)
def test_each_way_to_tile(tile, monkeypatch):
    from dsv4cli.kernels.routing import kernel

    monkeypatch.setattr(kernel, "logit_tiles", lambda *_: kernel.LogitTiles(*tile, warps=4, stages=1))
    test_logits_are_fp32_sums_of_exact_products((17, 20, 130), torch.bfloat16, torch.bfloat16)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize("tile", [(1, 1, 64), (16, 16, 64)], ids=str)
def test_each_way_to_tile_one_launch(tile, dtype, monkeypatch):
    from dsv4cli.kernels.routing import kernel

    left, words = [], kernel.words
    monkeypatch.setattr(kernel, "words", lambda *where: left.append(words(*where)) or left[-1])
    monkeypatch.setattr(kernel, "fused_tiles", lambda _: kernel.FusedRouteTiles(*tile, warps=1))
    test_logits_are_fp32_sums_of_exact_products((1, 20, 130), dtype, torch.bfloat16)
    assert left
    assert not any(one.any() for one in left)


@pytest.mark.usefixtures("triton_backend")
def test_of_equal_scores_the_lower_expert_is_first():
    x, weight = given(torch.tensor([[0.5, 1.0, 0.5, 1.0, 0.25]]))
    chosen, _ = route(x, weight, torch.zeros(5), 4, 1.0)
    assert chosen.tolist() == [[1, 3, 0, 2]]


def test_scores_are_fp32():
    assert ref.scores(torch.zeros(2, 5, dtype=torch.bfloat16)).dtype == torch.float32
