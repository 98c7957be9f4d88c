"""Routed experts against a loop over tokens and their experts in fp64."""

import math

import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise, fp8_round
from dsv4cli.kernels.experts import ExpertWeights, gated, routed_experts

# tokens, hidden width, inner width, experts, experts of a token
SHAPES = [(0, 128, 128, 4, 2), (1, 128, 128, 1, 1), (7, 256, 128, 5, 3), (65, 128, 256, 3, 3)]


def stored(form: str, experts: int, inner: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if form == "f32":
            return torch.randn(experts, rows, columns) / columns**0.5, None
        # codes of e2m1 have a root mean square of 2.7: about one with this scale and that width
        scale = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
        return codes.view(torch.int8), scale.view(torch.float8_e8m0fnu)

    return ExpertWeights(*matrix(inner, hidden), *matrix(hidden, inner), *matrix(inner, hidden))


def routes(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, experts).argsort(-1)[:, :k], torch.rand(tokens, k) + 0.1


def slow_gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up


def slow_experts(x, weights, experts, routing, limit, round_inputs) -> torch.Tensor:
    def through(matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        row = fp8_round(row.to(x.dtype), 128) if round_inputs else row.to(x.dtype)
        return (matrix.double() @ row.double()).to(x.dtype).double()

    w1, w2, w3 = (
        dequantise(*pair)
        for pair in ((weights.w1, weights.w1_scale), (weights.w2, weights.w2_scale), (weights.w3, weights.w3_scale))
    )
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x):
        for expert, weight in zip(experts[token].tolist(), routing[token].tolist(), strict=True):
            inner = weight * slow_gated(through(w1[expert], row), through(w3[expert], row), limit)
            total[token] += through(w2[expert], inner)
    return total


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_experts(shape, limit):
    tokens, hidden, inner, count, k = shape
    weights, (experts, routing) = stored("f32", count, inner, hidden), routes(tokens, count, k)
    x = torch.randn(tokens, hidden)
    y = routed_experts(x, weights, experts, routing, limit, round_inputs=False)
    assert (y.shape, y.dtype) == (x.shape, torch.float32)
    # fp32 sums of up to 256 products of numbers around 1
    torch.testing.assert_close(y.double(), slow_experts(x, weights, experts, routing, limit, False), rtol=0, atol=2e-5)


@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp4_experts(shape, round_inputs):
    tokens, hidden, inner, count, k = shape
    weights, (experts, routing) = stored("fp4", count, inner, hidden), routes(tokens, count, k)
    x = torch.randn(tokens, hidden).bfloat16()
    y = routed_experts(x, weights, experts, routing, 10.0, round_inputs)
    exact = slow_experts(x, weights, experts, routing, 10.0, round_inputs)
    # the rounding of an fp32 sum may go the other way in single values, each a step of bf16 or FP8 in 128 and more;
    # a weight applied after w2 is as far as 2 ** -8.3 without and 2 ** -5.2 with FP8 inputs
    assert (y.double() - exact).norm() <= (2**-7 if round_inputs else 2**-10) * exact.norm()
    assert y.dtype == torch.float32


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_clamps(limit):
    gate, up = torch.meshgrid(torch.linspace(-5, 5, 21), torch.linspace(-5, 5, 21), indexing="ij")
    y = gated(gate, up, limit)
    torch.testing.assert_close(y.double(), slow_gated(gate.double(), up.double(), limit), rtol=1e-6, atol=1e-7)  # fp32
    assert gated(gate.bfloat16(), up.bfloat16(), limit).dtype == torch.float32
    # the gate is free below, both sides of the other are not
    assert gated(torch.tensor(-5.0), torch.tensor(1.0), 2.0).item() == pytest.approx(-5 / (1 + math.exp(5)), rel=1e-6)
    assert gated(torch.tensor(9.0), torch.tensor(-9.0), 2.0).item() == pytest.approx(-4 / (1 + math.exp(-2)), rel=1e-6)


def test_experts_are_added_in_ascending_order():
    # outputs 2 ** 30, 1 and -2 ** 30: only in ascending order the one is lost
    one = torch.ones(3, 1, 1)
    weights = ExpertWeights(one, None, one * torch.tensor([2.0**30, 1, -(2.0**30)])[:, None, None], None, one, None)
    factor = torch.full((2, 3), 1 / torch.sigmoid(torch.tensor(1.0)).item())
    y = routed_experts(torch.ones(2, 1), weights, torch.tensor([[0, 2, 1], [0, 1, 2]]), factor, 0.0, False)
    assert y.flatten().tolist() == [0, 0]


def test_an_expert_without_tokens_is_never_read():
    weights, x = stored("f32", 3, 128, 128), torch.randn(2, 128)
    for matrix in (weights.w1, weights.w2, weights.w3):
        matrix[1] = float("nan")
    experts, routing = torch.tensor([[0, 2], [2, 0]]), torch.ones(2, 2)
    assert routed_experts(x, weights, experts, routing, 10.0, False).isfinite().all()
