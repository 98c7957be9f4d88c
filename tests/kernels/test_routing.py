"""The router against pure Python."""

import math

import pytest
import torch

from dsv4cli.kernels.routing import choose, scores, weigh


@pytest.mark.parametrize("logit", [-80.0, -20.0, -1.0, 0.0, 0.5, 19.99, 20.01, 50.0, 1e4, 3e38])
def test_scores(logit):
    exact = math.sqrt(logit if logit > 40 else math.log1p(math.exp(logit)))
    # fp32's log1p and exp; above 20 softplus drops exp(-20) / 20 = 1e-10 of its value
    assert scores(torch.tensor([[logit]])).item() == pytest.approx(exact, rel=1e-6)


def test_scores_are_fp32():
    assert scores(torch.zeros(0, 5)).shape == (0, 5)
    assert scores(torch.zeros(2, 5, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 2), (1, 1, 1), (7, 13, 6), (65, 8, 8)])
def test_choose_best_first_by_biased_score(tokens, experts, k):
    score, bias = torch.rand(tokens, experts), torch.randn(experts)
    chosen = choose(score, bias, k)
    assert (chosen.shape, chosen.dtype) == ((tokens, k), torch.int64)
    biased = (score + bias).tolist()
    assert chosen.tolist() == [sorted(range(experts), key=lambda e, row=row: -row[e])[:k] for row in biased]


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.5])
@pytest.mark.parametrize(("tokens", "k"), [(0, 3), (1, 1), (7, 6)])
def test_weigh_normalises_unbiased_scores(tokens, k, scale):
    score = torch.rand(tokens, 13)
    chosen = torch.rand(tokens, 13).argsort(-1)[:, :k]
    weights = weigh(score, chosen, scale)
    assert (weights.shape, weights.dtype) == ((tokens, k), torch.float32)
    for row, experts, found in zip(score.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        total = sum(row[expert] for expert in experts)
        assert found == pytest.approx([row[expert] / total * scale for expert in experts], rel=1e-6)  # fp32 twice
        assert sum(found) == pytest.approx(scale, rel=1e-6)


def test_a_hash_layer_may_name_any_experts():
    # weights follow the order of the table, not of the scores
    assert weigh(torch.tensor([[1.0, 2.0, 5.0]]), torch.tensor([[1, 0]]), 3.0).tolist() == [[2.0, 1.0]]
