"""Hyper-connections against loops in fp64 and the check vector of the official code."""

import math

import pytest
import torch

from dsv4cli.kernels.hyper_connections import connect_head, connect_post, connect_pre
from tests.kernels.rounding import FP32, assert_rounded_once

# mixes before scale and base, and what becomes of them (scales 1, bases 0)
MIX = [0.3, -1.2, 0.8, 0.1, 0.5, -0.4, 1.5, -2, 1, -1, 0.5, 0, 2, 0, -2, 1, -0.5, 0.25, 0.75, -1, 0, 3, -3, 1]
PRE = [0.574444, 0.231476, 0.689976, 0.52498]
POST = [1.244919, 0.802625, 1.635149, 0.238406]
COMB = [
    [0.336752, 0.039413, 0.370319, 0.253515],
    [0.525466, 0.0615, 0.017451, 0.395583],
    [0.096153, 0.176032, 0.60847, 0.119344],
    [0.041628, 0.723054, 0.003759, 0.231557],
]
# tokens, streams, width
SHAPES = [(0, 4, 8), (1, 4, 1), (5, 4, 33), (7, 2, 64)]


def test_check_vector():
    streams = 2 * torch.eye(4)[None]  # stream j has a 2 at j: mean square 1, and x_j = 2 * pre_j
    fn = torch.zeros(24, 4, 4)
    fn.diagonal(dim1=1, dim2=2).copy_(torch.tensor(MIX)[:, None] / 8)
    x, post, comb = connect_pre(streams, fn.flatten(1), torch.ones(3), torch.zeros(24), 20, 1e-6, 0.0)
    for found, printed in ((x[0] / 2, PRE), (post[0], POST), (comb[0], COMB)):
        torch.testing.assert_close(found, torch.tensor(printed), rtol=0, atol=1e-6)  # printed with six decimals


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_mix(token: torch.Tensor, fn: torch.Tensor, eps: float) -> list[float]:
    flat = token.double().flatten().tolist()
    inverse = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + eps)
    return [sum(w * value for w, value in zip(row, flat, strict=True)) * inverse for row in fn.double().tolist()]


def slow_sinkhorn(rows: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """Rows, then columns, in turn; the first pass over rows is the softmax."""
    count = range(len(rows))
    exps = [[math.exp(value - max(row)) for value in row] for row in rows]
    comb = [[value / sum(row) + eps for value in row] for row in exps]
    for iteration in range(iterations):
        if iteration:
            comb = [[value / (sum(row) + eps) for value in row] for row in comb]
        sums = [sum(comb[j][k] for j in count) + eps for k in count]
        comb = [[comb[j][k] / sums[k] for k in count] for j in count]
    return comb


def parameters(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = (2 + count) * count
    return torch.randn(rows, count * width) / (count * width) ** 0.5, torch.rand(3) + 0.5, torch.randn(rows)


# the real eps hides behind fp32 (invisible in logits), a large one shows each place where it stands
@pytest.mark.parametrize("hc_eps", [1e-6, 0.05])
@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_connect_pre(shape, iterations, hc_eps):
    tokens, count, width = shape
    streams, (fn, scale, base) = torch.randn(shape), parameters(count, width)
    x, post, comb = connect_pre(streams, fn, scale, base, iterations, hc_eps, 0.01)
    assert (x.shape, post.shape, comb.shape) == ((tokens, width), (tokens, count), (tokens, count, count))
    (s0, s1, s2), b = scale.tolist(), base.tolist()
    for token in range(tokens):
        mix = slow_mix(streams[token], fn, 0.01)
        pre = [sigmoid(mix[j] * s0 + b[j]) + hc_eps for j in range(count)]
        expected = sum(pre[j] * streams[token, j].double() for j in range(count))
        posts = [2 * sigmoid(mix[count + j] * s1 + b[count + j]) for j in range(count)]
        rows = [[mix[at] * s2 + b[at] for at in range((2 + j) * count, (3 + j) * count)] for j in range(count)]
        combs = slow_sinkhorn(rows, iterations, hc_eps)
        for found, truth in ((x, expected), (post, posts), (comb, combs)):
            # the fp32 sum over all streams (up to 132 products) dominates
            torch.testing.assert_close(found[token].double(), torch.as_tensor(truth).double(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_connect_post(shape, dtype):
    tokens, count, width = shape
    x, streams = torch.randn(tokens, width).to(dtype), torch.randn(shape).to(dtype)
    post, comb = torch.rand(tokens, count), torch.rand(tokens, count, count)
    exact = torch.zeros(shape, dtype=torch.float64)
    for target in range(count):
        exact[:, target] = post[:, target, None].double() * x.double()
        for source in range(count):
            exact[:, target] += comb[:, source, target, None].double() * streams[:, source].double()
    # sums of five products, none above 5
    assert_rounded_once(connect_post(x, streams, post, comb), exact, 50 * FP32)


def test_first_index_of_comb_is_the_source():
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 1
    streams = connect_post(torch.zeros(1, 1), torch.tensor([[[10.0], [20], [30], [40]]]), torch.zeros(1, 4), comb)
    assert streams.flatten().tolist() == [0, 0, 0, 20]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_connect_head(shape, dtype):
    tokens, count, width = shape
    streams, (fn, scale, base) = torch.randn(shape).to(dtype), parameters(count, width)
    fn, scale, base = fn[:count], scale[:1], base[:count]
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for j, mix in enumerate(slow_mix(streams[token], fn, 0.01)):
            exact[token] += (sigmoid(mix * scale.item() + base[j].item()) + 0.05) * streams[token, j].double()
    # as in connect_pre
    assert_rounded_once(connect_head(streams, fn, scale, base, 0.05, 0.01), exact, 1e-5)


def test_collapse_rounds_once_to_bf16():
    streams, (fn, scale, base) = torch.randn(7, 4, 65).bfloat16(), parameters(4, 65)
    x, *_ = connect_pre(streams, fn, scale, base, 20, 1e-6, 1e-6)
    wide, *_ = connect_pre(streams.float(), fn, scale, base, 20, 1e-6, 1e-6)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, wide.bfloat16())
