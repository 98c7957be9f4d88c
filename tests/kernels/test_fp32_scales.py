"""FP8 weights under fp32 block scales of any mantissa: linears of every number of rows, and experts, against fp64."""

import pytest
import torch

from dsv4cli.kernels import gemm
from dsv4cli.kernels.block_scale import fp8_round
from dsv4cli.kernels.experts import ExpertWeights, mixture, ref, routed_experts, shared_expert
from dsv4cli.kernels.rows import ROWS_ALIKE
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support.slow import slow

# each way of the Triton linears: one row, few, as many as fill tiles, and so many that FP8 tensor cores multiply
ROWS = [1, 17, *slow(70, 513)]


def stored(*shape: int) -> StoredMatrix:
    """e4m3 codes [..., N, K] and scales from 1/3 to 1/2 of 2 ** -5."""
    *lead, rows, columns = shape
    scale = (torch.rand(*lead, -(-rows // 128), -(-columns // 128)) + 2) / 6 / 32
    return StoredMatrix(torch.randn(shape).to(torch.float8_e4m3fn), scale)


def values(matrix: StoredMatrix) -> torch.Tensor:
    """By the definition, in fp64."""
    codes, scale, _ = matrix
    rows, columns = codes.shape[-2:]
    return (
        codes.double()
        * scale.double().repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    )


def assert_close(y: torch.Tensor, exact: torch.Tensor, sum_error: float = 0) -> None:
    """Assert that y differs from fp64 results by one rounding to bf16 of sums that are off by sum_error of their norm.

    Scales rounded to bf16 would add 2 ** -10 of the norm to an error of 2 ** -9.3: a fifth, where 2 % are allowed.
    """
    rounded = exact.bfloat16().double()
    bound = torch.hypot((rounded - exact).norm(), sum_error * exact.norm())
    assert (y.double() - exact).norm() <= 1.02 * bound
    assert sum_error or (y.double() != rounded).float().mean() < 0.02


@pytest.mark.parametrize("rows", ROWS)
def test_linears(backend, rows):
    matrix = stored(192, 256)
    x, exact = torch.randn(rows, 256).bfloat16(), values(matrix)
    assert_close(gemm.linear(x, matrix), x.double() @ exact.T)
    short = backend == "triton-cuda" and rows > ROWS_ALIKE and gemm.sums_shortly(x.device)
    y = gemm.rounded_linear(x, matrix)
    assert_close(y, fp8_round(x, 128).double() @ exact.T, gemm.SHORT_SUM if short else 0)
    wide = torch.randn(rows, 256)
    # fp32 sums
    torch.testing.assert_close(gemm.linear(wide, matrix).double(), wide.double() @ exact.T, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("rows", [1, 20])
def test_groups_and_several_at_once(rows):
    matrix, x = stored(256, 128), torch.randn(rows, 2, 128).bfloat16()
    exact = values(matrix).unflatten(0, (2, 128))
    y = gemm.grouped_linear(x, matrix)
    assert_close(y, torch.einsum("tgk,gnk->tgn", x.double(), exact))
    together, plain, _ = gemm.linears(x[:, 0], [matrix], [matrix])
    assert torch.equal(together[0], gemm.rounded_linear(x[:, 0], matrix))
    assert_close(plain[0], x[:, 0].double() @ values(matrix).T)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [1, *slow(70)])
def test_experts(tokens):
    w1, w2, w3 = stored(2, 128, 128), stored(2, 128, 128), stored(2, 128, 128)
    weights = ExpertWeights(w1, w2, w3)
    x, experts, routing = torch.randn(tokens, 128).bfloat16(), torch.rand(tokens, 2).argsort(-1), torch.rand(tokens, 2)
    given = (x, weights, experts, routing, 10.0, True)
    expected = ref.routed_experts(*given)
    # an inner value rounds otherwise here and there
    assert (routed_experts(*given) - expected).norm() <= 2**-8 * expected.norm()
    shared = ExpertWeights(*(matrix.row(0) for matrix in (w1, w2, w3)))
    expected = ref.shared_expert(x, shared, 10.0, True).float()
    assert (shared_expert(x, shared, 10.0, True).float() - expected).norm() <= 2**-8 * expected.norm()
    both = (x, weights, shared, experts, routing, 10.0, True, torch.bfloat16)
    assert (mixture(*both).float() - ref.mixture(*both).float()).norm() <= 2**-7 * expected.norm()
