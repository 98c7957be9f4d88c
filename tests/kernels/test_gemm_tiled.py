"""Linears of many rows: on numbers whose products and sums are exact, and against fp64 on others."""

import pytest
import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.kernels.test_gemm import exactly, values_of, weights
from tests.support.slow import slow_rows

pytestmark = pytest.mark.usefixtures("triton_backend")

# tokens, inputs, outputs: none, one, a prime, one more than a tile, the columns in parts, more tokens than are few
SHAPES = [(0, 128, 5), (1, 128, 1), (17, 320, 131), (65, 128, 129), (33, 2304, 24), (513, 64, 24)]
FORMS = ["fp8", "fp4", "bf16", "f32"]
# bf16 everywhere, fp32, which all forms multiply alike, once
CASES = [
    *((shape, "fp8", torch.bfloat16) for shape in SHAPES),
    *((shape, form, torch.bfloat16) for shape in SHAPES[2:4] for form in FORMS[1:3]),
    *slow_rows(*((shape, form, torch.bfloat16) for shape in SHAPES[:2] + SHAPES[4:] for form in FORMS[1:3])),
    *(((17, 320, 131), form, torch.float32) for form in FORMS),
    ((17, 320, 131), "f32", torch.bfloat16),
    ((0, 128, 5), "f32", torch.float32),
]


@pytest.fixture
def tiled():
    from dsv4cli.kernels.gemm.kernel import tiled

    return tiled


@pytest.mark.parametrize(("shape", "form", "dtype"), CASES, ids=str)
def test_linear_rounds_once(tiled, shape, form, dtype):
    tokens, columns, rows = shape
    x = torch.randint(-16, 17, (tokens, columns)).to(dtype)
    matrix = weights(form, rows, columns)
    exact = exactly(x, matrix)
    y = tiled.linear(x, matrix)
    assert torch.equal(y, exact.float().to(dtype))
    if matrix.scale is None:
        assert torch.equal(tiled.linear_fp32(x, matrix).double(), exact)


@pytest.fixture(params=[True, False], ids=["codes", "bf16"])
def coded(request, tiled, monkeypatch):
    """Whether FP8 tensor cores multiply rounded inputs, as where there are some, or bf16 ones."""
    monkeypatch.setattr(tiled.tiled_fp8, "multiplies", lambda x: request.param and x.dtype == torch.bfloat16)
    return request.param


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize(("tokens", "columns"), [(0, 128), (19, 128), (19, 96), (513, 128)])
def test_groups(tiled, tokens, columns, form):
    x = torch.randint(-16, 17, (tokens, 3, columns)).bfloat16()
    matrix = weights(form, 3 * 80, columns)  # groups do not align with the blocks of the scale
    values = values_of(matrix).unflatten(0, (3, 80))
    exact = torch.einsum("tgk,gnk->tgn", x.double(), values)
    assert torch.equal(tiled.grouped_linear(x, matrix), exact.float().bfloat16())


@pytest.mark.parametrize(("shape", "form", "dtype"), [
    ((0, 128, 5), "fp8", torch.bfloat16), ((1, 128, 1), "fp8", torch.bfloat16), ((65, 256, 129), "fp8", torch.bfloat16),
    ((131, 128, 200), "fp8", torch.bfloat16), ((20, 1152, 24), "fp8", torch.bfloat16),
    ((19, 256, 33), "fp4", torch.bfloat16), ((19, 256, 33), "fp8", torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("coded")
def test_rounded_linear_is_exact_on_few_bits(tiled, shape, form, dtype):
    tokens, columns, rows = shape
    # codes of -256, -128, 0, 128 and 256: sums of 128 products of such small ones fit into any tensor core
    x = torch.randint(-2, 3, (tokens, columns)).to(dtype)
    matrix = weights(form, rows, columns)
    if form == "fp8":
        matrix = matrix._replace(weight=torch.randint(-2, 3, (rows, columns)).to(torch.float8_e4m3fn))
    assert torch.equal(tiled.rounded_linear(x, matrix), exactly(x, matrix).float().to(dtype))


# columns that are no power of two, last the hidden size of Pro; more tokens than a tile has; programs of two halves,
# where tiles are many
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"),
    [
        (18, 896, 64),
        (129, 256, 130),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((130, 1152, 130), (18, 7168, 64))),
    ],
)
def test_rounded_linear_of_real_numbers(tiled, coded, tokens, columns, rows, monkeypatch):
    monkeypatch.setattr(tiled.tiled_fp8, "FULL", 4)
    monkeypatch.setattr(tiled.tiled_fp8, "MANY", 130)
    x = torch.randn(tokens, columns) * torch.logspace(-3, 3, columns)[torch.randperm(columns)]
    matrix = weights("fp8", rows, columns)
    rounded, values = block_scale.fp8_round(x.bfloat16(), 128).double(), values_of(matrix)
    y = tiled.rounded_linear(x.bfloat16(), matrix)
    # FP8 tensor cores cut a sum at 13 bits below its largest term, 4 times in 128 columns
    error = 4 * 2.0**-13 if x.is_cuda and coded else columns * FP32
    assert_rounded_once(y, rounded @ values.T, error * (rounded.abs() @ values.abs().T))


@pytest.mark.usefixtures("coded")
def test_several_linears_share_their_input(tiled):
    x = torch.randn(19, 256).bfloat16()
    rounded = [weights("fp8", 40, 256), weights("fp4", 24, 256), weights("fp8", 8, 256)]
    plain, fp32 = [weights("fp8", 16, 256), weights("bf16", 24, 256)], [weights("bf16", 8, 256)]
    ours = tiled.linears(x, rounded, plain, fp32)
    for y, matrix in zip(ours[0], rounded, strict=True):
        assert torch.equal(y, tiled.rounded_linear(x, matrix))
    for y, matrix in zip(ours[1], plain, strict=True):
        assert torch.equal(y, tiled.linear(x, matrix))
    assert torch.equal(ours[2][0], tiled.linear_fp32(x, fp32[0]))


@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_rows_may_lie_apart(tiled, form):
    x = torch.randint(-16, 17, (18, 300)).bfloat16()
    matrix = weights(form, 40, 128)
    for start in (0, 1, 8):  # beginning at 16 bytes or not
        part = x[:, start : start + 128]
        assert torch.equal(tiled.linear(part, matrix), exactly(part, matrix).float().bfloat16())


def test_columns_that_lie_apart_are_refused(tiled):
    matrix = weights("bf16", 8, 64)
    with pytest.raises(KernelUnsupported, match="consecutive columns"):
        tiled.linear(torch.ones(64, 20, dtype=torch.bfloat16).T, matrix)
    with pytest.raises(KernelUnsupported, match="whole weights"):
        tiled.linear(torch.ones(20, 64, dtype=torch.bfloat16), StoredMatrix(matrix.weight[:, ::2]))
