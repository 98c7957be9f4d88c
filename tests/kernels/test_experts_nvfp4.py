"""Experts in NVFP4: the bits of FP4 where the values are FP4's, else the numbers of a loop in fp64."""

import pytest
import torch

from dsv4cli.kernels import recode
from dsv4cli.kernels.block_scale import fp8_round
from dsv4cli.kernels.experts import ExpertWeights, ref, routed_experts, shared_expert
from dsv4cli.kernels.gemm import linear
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.kernels.test_experts import assert_close, large_programs, routes, slow_experts, stored  # noqa: F401
from tests.support.slow import slow

# tokens, hidden width, inner width, experts, experts of a token; one, a few, and as many as fill tiles
SHAPES = [
    (1, 128, 128, 3, 2),
    (3, 128, 128, 2, 2),
    (65, 128, 128, 2, 2),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(0, 128, 128, 2, 2), (1, 256, 256, 5, 2)]),
    *(
        pytest.param(shape, marks=pytest.mark.gpu)
        for shape in [(1, 4096, 2048, 9, 6), (5, 4096, 2048, 9, 6), (64, 4096, 2048, 9, 6), (700, 4096, 2048, 9, 6)]
    ),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def as_nvfp4(weights: ExpertWeights) -> ExpertWeights:
    """The same values in NVFP4; each expert has a scale_2 of its own."""
    made = []
    for codes, scale, _ in weights.matrices:
        parts = []
        for number, pair in enumerate(zip(codes, scale, strict=True)):
            parts.append(recode.fp4_to_nvfp4(*pair, recode.nvfp4_exponent([pair]) + number % 3))
        made.append(StoredMatrix(*map(torch.stack, zip(*parts, strict=True))))
    return ExpertWeights(*made)


def nvfp4(experts: int, rows: int, columns: int) -> StoredMatrix:
    """Codes; scales from 0.4 to 1.9 with every mantissa, and subnormal ones; scale_2 of no power of two."""
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(0x2D, 0x3F, (experts, rows, columns // 16), dtype=torch.uint8)
    scale[:, :, 0] = torch.randint(1, 8, (experts, rows), dtype=torch.uint8)
    second = (torch.rand(experts) + 0.5) * columns**-0.5 / 3
    return StoredMatrix(codes, scale.view(torch.float8_e4m3fn), second)


def any_nvfp4(experts: int, inner: int, hidden: int) -> ExpertWeights:
    return ExpertWeights(nvfp4(experts, inner, hidden), nvfp4(experts, hidden, inner), nvfp4(experts, inner, hidden))


def values(matrix: StoredMatrix) -> torch.Tensor:
    """By the definition, in fp64: [..., N, K]."""
    codes, scale, second = matrix
    table = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
    pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    return pairs * scale.double().repeat_interleave(16, -1) * second.double()[..., None, None]


def widened(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(StoredMatrix(values(matrix)) for matrix in weights.matrices))


@pytest.mark.usefixtures("backend", "large_programs")
@pytest.mark.parametrize("shape", [SHAPES[0], *slow(*SHAPES[1:3]), *SHAPES[3:]], ids=str)
def test_what_was_fp4_has_its_bits(shape, monkeypatch):
    """In kernels for both; on Hopper, few tokens of FP4 use another one."""
    pytest.importorskip("triton")
    monkeypatch.setattr("dsv4cli.kernels.experts.kernel.fp8_hopper.suits", lambda *_: False)
    tokens, hidden, inner, count, k = shape
    weights, chosen = stored("fp4", count, inner, hidden), routes(tokens, count, k)
    x = torch.randn(tokens, hidden).bfloat16()
    expected = routed_experts(x, weights, *chosen, 10.0, True)
    assert torch.equal(routed_experts(x, as_nvfp4(weights), *chosen, 10.0, True), expected)


@pytest.mark.usefixtures("backend", "large_programs")
@pytest.mark.parametrize("shape", [*slow(SHAPES[0]), SHAPES[1], *slow(SHAPES[2])], ids=str)
def test_the_numbers_of_any_nvfp4(shape):
    tokens, hidden, inner, count, k = shape
    weights, chosen = any_nvfp4(count, inner, hidden), routes(tokens, count, k)
    x = torch.randn(tokens, hidden).bfloat16()
    y = routed_experts(x, weights, *chosen, 10.0, False)
    exact = slow_experts(x, widened(weights), *chosen, 10.0, False)
    assert_close(y, exact, False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("k", [96, 160])
def test_rows_that_fill_no_block_of_128(k):
    weights, chosen = any_nvfp4(2, 96, k), routes(3, 2, 1)
    x = torch.randn(3, k).bfloat16()
    assert_close(
        routed_experts(x, weights, *chosen, 10.0, False), slow_experts(x, widened(weights), *chosen, 10.0, False), False
    )


@pytest.mark.usefixtures("backend", "large_programs")
@pytest.mark.parametrize("tokens", [1, 2, 80])
def test_every_scale_and_every_code(tokens):
    # each token picks a column of w1; the rows have all scales but those of no number, and all codes
    weights = any_nvfp4(1, 128, 128)
    scale = torch.arange(1, 127).repeat(9)[:1024].view(1, 128, 8)
    weights.w1.scale.view(torch.uint8).copy_(scale)
    weights.w1.weight.copy_((torch.arange(8192) * 37 % 256).view(1, 128, 64))
    weights.w1.scale_2.fill_(2.0**-4)
    weights.w3.weight.fill_(0x22)  # all ones
    weights.w3.scale.view(torch.uint8).fill_(0x38)
    x = torch.eye(128)[torch.arange(tokens) * 19 % 128].bfloat16()
    chosen = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)
    # values up to 168: the gate is as good as open
    y = routed_experts(x, weights, *chosen, 0.0, False)
    assert_close(y, slow_experts(x, widened(weights), *chosen, 0.0, False), False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_linears_and_a_shared_expert(tokens):
    every = any_nvfp4(1, 128, 256)
    one = ExpertWeights(*(matrix.row(0) for matrix in every.matrices))
    x = torch.randn(tokens, 256).bfloat16()
    y = linear(x, one.w1)
    exact = x.double() @ values(one.w1).T
    # fp32 sums, rounded once to bf16
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-5)
    shared = shared_expert(x, one, 10.0, True)
    assert_close(shared, ref.shared_expert(x, one, 10.0, True).double(), True)
    assert (fp8_round(x, 128) != x).any() or not tokens
