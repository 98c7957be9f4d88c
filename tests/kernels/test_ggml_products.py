"""Triton's products with GGUF blocks: the values of every type to the bit, linears and experts against fp64."""

import pytest
import torch

from dsv4cli.kernels import experts, gemm
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts.kernel import ggml_hopper
from dsv4cli.kernels.gemm.kernel import few_rows, ggml_fp16, swap_ab
from dsv4cli.kernels.ggml.kernel import fp16
from dsv4cli.kernels.ggml.kernel.octets import blocks_of
from dsv4cli.kernels.ggml.types import DECODED, TYPES
from dsv4cli.kernels.rows import exact_rows
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix
from tests.kernels.rounding import assert_rounded_once
from tests.kernels.test_experts import assert_close, routes, slow_experts
from tests.support.ggml_blocks import block_matrix, random_rows
from tests.support.slow import slow, slow_rows

pytestmark = pytest.mark.usefixtures("triton_backend")
# types with different code: of a simple block, of a large one with minima, with a codebook
HOT = ("Q8_0", "Q2_K", "IQ2_XXS")
OTHERS = sorted(set(DECODED) - {*HOT, "BF16", "F32"})
# clamps of the activation that a few percent of the products reach, if rows have unit length
LIMIT = 2.0
gpu = [pytest.param(*one, marks=pytest.mark.gpu) for one in [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q6_K")]]


def blocks(kind: str, *shape: int, seed: int = 1, scale: float | None = 0.02) -> BlockMatrix:
    *stack, columns = shape
    rows = random_rows(kind, torch.Size(stack).numel(), columns // TYPES[kind].values, seed, scale)
    return block_matrix(torch.from_numpy(rows).view(*stack, -1).to(torch.get_default_device()), kind)


@pytest.mark.parametrize("kind", [*HOT, *slow(*OTHERS)])
def test_every_value_has_the_bits_of_the_type(kind):
    # a row of x that picks a column: the products are the values
    # the products of a row add up all its values, times 0: the largest of MXFP4 are infinite
    matrix = blocks(kind, 16, 256, scale=None if TYPES[kind].halves else 0.02)
    x = torch.eye(256)[torch.arange(16) * 17]
    expected = matrix.values().T[torch.arange(16) * 17]
    assert torch.equal(gemm.linear(x, matrix), expected)


LINEARS = [(1, "Q8_0", 96), (1, "Q6_K", 256), (5, "Q2_K", 512), (17, "IQ2_XXS", 256), (130, "Q5_0", 96)]
MORE_LINEARS = [
    (tokens, kind, columns)
    for tokens in (0, 1, 5, 16, 17, 70, 150)
    for kind, columns in (("Q8_0", 288), ("Q2_K", 512), ("IQ2_XXS", 1024), ("Q6_K", 512), ("Q5_0", 96))
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize(("tokens", "kind", "columns"), [*LINEARS, *slow_rows(*MORE_LINEARS)])
def test_linear_rounds_once(tokens, kind, columns, dtype):
    matrix = blocks(kind, 19, columns)
    x = torch.randn(tokens, 2, columns).to(dtype)[:, 1]
    values = matrix.values().double()
    y = gemm.linear(x, matrix)
    assert y.dtype == dtype
    # fp32 sums, and for more than 16 tokens values of one fp16 number, rounded to nearest
    value = 2.0**-11 if tokens >= ggml_fp16.LEAST and dtype == torch.bfloat16 else 2.0**-17
    error = (value + columns * 2.0**-24) * (x.double().abs() @ values.abs().T)
    assert_rounded_once(y, x.double() @ values.T, error)


@pytest.mark.parametrize("kind", sorted(set(DECODED) - {"F16", "BF16", "F32"}))
def test_few_tokens_of_every_type(kind):
    matrix, x = blocks(kind, 8, 256), torch.randn(1, 256).bfloat16()
    values = matrix.values().double()
    error = 256 * 2.0**-24 * (x.double().abs() @ values.abs().T)
    assert_rounded_once(gemm.linear(x, matrix), x.double() @ values.T, error)


@pytest.mark.parametrize("tokens", [3, *slow(8)])
def test_the_bits_of_a_row_do_not_depend_on_the_others(tokens):
    # on Hopper one token and two have another kernel, except with exact rows
    matrix, x = blocks("IQ2_XXS", 8, 256), torch.randn(tokens, 256).bfloat16()
    with exact_rows(True):
        assert torch.equal(gemm.linear(x, matrix), torch.cat([gemm.linear(row[None], matrix) for row in x]))


@pytest.mark.parametrize(("kind", "scale"), [("Q8_0", 0.02), ("F32", 2.0**-55), *slow_rows(("MXFP4", 2.0**50))])
def test_many_rows_of_any_size(kind, scale):
    """Rows with values that no fp16 number could hold; the power of two of a result may be no fp32 number."""
    matrix = blocks(kind, 20, 64, scale=scale)
    x = (torch.randn(150, 64) * torch.logspace(-60, 60, 150, base=2)[:, None]).bfloat16()
    values = matrix.values().double()
    error = (2.0**-11 + 64 * 2.0**-24) * (x.double().abs() @ values.abs().T)
    assert_rounded_once(gemm.linear(x, matrix), x.double() @ values.T, error)


@pytest.mark.parametrize("groups", [1, 3])
def test_many_rows_in_parts(groups, monkeypatch):
    matrix, x = blocks("Q4_K", groups * 300, 256), torch.randn(150, groups, 256).bfloat16()
    whole = gemm.grouped_linear(x, matrix)
    # parts of 256 rows of each group, and of 128 rows of x
    monkeypatch.setattr(ggml_fp16, "PART", groups * 256 * 128)
    assert torch.equal(gemm.grouped_linear(x, matrix), whole)
    each = [gemm.linear(x[:, g], BlockMatrix.of(matrix.weight[300 * g : 300 * g + 300], "Q4_K")) for g in range(groups)]
    torch.testing.assert_close(whole, torch.stack(each, 1), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", [*HOT, *slow(*OTHERS, "BF16", "F32")])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_rows_in_fp16_neither_overflow_nor_lose_bits(kind, scale):
    matrix = blocks(kind, 9, 512, scale=scale)
    kernel_blocks, values = blocks_of(matrix), matrix.values().double().view(3, 3, 512)[:, 1:]
    shifts = fp16.row_shifts(kernel_blocks, 512).view(3, 3)[:, 1:].contiguous()
    found, rest = halves = torch.empty(2, 3, 2, 512, dtype=torch.float16)
    fp16.decoded_halves(kernel_blocks, shifts, halves, 1)
    exact = values * 2.0 ** shifts.double()[:, :, None]
    finite = exact.isfinite()
    assert found[finite].isfinite().all()
    # one rounding to 11 bits, and subnormal numbers
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-11 + 2.0**-25)[finite].all()
    both = found.double() + rest.double()
    assert ((both - exact).abs() <= exact.abs() * 2.0**-22 + 2.0**-25)[finite].all()
    # the bound from scales is within a factor of 8 of the largest value
    assert (exact.abs().where(finite, 2.0**14).amax(2) >= 2.0**11).all()


@pytest.mark.parametrize("tokens", [2, *slow(20)])
def test_groups(tokens):
    matrix, x = blocks("Q8_0", 3 * 20, 128), torch.randn(tokens, 3, 128).bfloat16()
    y = gemm.grouped_linear(x, matrix)
    each = [gemm.linear(x[:, g], BlockMatrix.of(matrix.weight[20 * g : 20 * g + 20], "Q8_0")) for g in range(3)]
    assert torch.equal(y, torch.stack(each, 1))


@pytest.mark.parametrize(("tokens", "kind"), [(1, "Q8_0"), (17, "Q8_0"), *slow_rows((5, "Q6_K"), (1, "F16"))])
def test_linear_fp32_is_not_rounded(tokens, kind):
    matrix = blocks(kind, 19, 256)
    x = torch.randn(tokens, 256).bfloat16()
    y, exact = gemm.linear_fp32(x, matrix), x.double() @ matrix.values().double().T
    assert y.dtype == torch.float32
    # for more than 16 tokens, values are two fp16 numbers
    error = (2.0**-22 * (tokens > 16) + 256 * 2.0**-24) * (x.double().abs() @ matrix.values().double().abs().T)
    assert ((y - exact).abs() <= error).all()


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, *slow(8, 70)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
def test_fp16_is_multiplied_exactly(tokens, dtype):
    # subnormal numbers too: bf16 has neither their bits nor, in one number, those of larger ones
    weight = torch.randn(40, 128).mul(2.0 ** -torch.randint(0, 24, (40, 1))).half()
    matrix, x = StoredMatrix(weight), torch.randn(tokens, 128).to(dtype)
    exact, error = x.double() @ weight.double().T, 128 * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert ((gemm.linear_fp32(x, matrix) - exact).abs() <= error).all()
    assert_rounded_once(gemm.linear(x, matrix), exact, error)
    (of_plain,), (of_fp32,) = gemm.linears(x, (), [matrix], [matrix])[1:]
    assert ((of_fp32 - exact).abs() <= error).all()
    assert_rounded_once(of_plain, exact, error)
    assert_rounded_once(gemm.grouped_linear(x[:, None], matrix)[:, 0], exact, error)


def test_fp16_has_one_product_per_weight_of_many_tokens(monkeypatch):
    matrix, multiply, multiplied = StoredMatrix(torch.randn(8, 64).half()), ggml_fp16.multiply, list[int]()
    monkeypatch.setattr(ggml_fp16, "multiply", lambda x, pairs: (multiplied.append(len(x)), multiply(x, pairs)))
    for tokens in (16, 17, 70):
        gemm.linear(torch.randn(tokens, 64).bfloat16(), matrix)
    assert multiplied == [17, 70]
    # on tensor cores, with each weight read once
    assert few_rows.takes(torch.zeros(8, 1, 128).bfloat16(), StoredMatrix(torch.zeros(8, 128).half()))
    assert swap_ab.takes(torch.zeros(16, 1, 64).bfloat16(), matrix.weight)


@pytest.mark.parametrize("tokens", [1, *slow(20)])
def test_linears_of_several_types_and_formats(tokens):
    plain = [blocks("Q8_0", 9, 64), StoredMatrix(torch.randn(5, 64).bfloat16()), blocks("Q4_0", 7, 64)]
    plain.append(blocks("Q8_0", 17, 64, seed=2))
    fp32 = [blocks("Q8_0", 7, 64, seed=3), StoredMatrix(torch.randn(6, 64)), StoredMatrix(torch.randn(3, 64).half())]
    x, norm = torch.randn(tokens, 64).bfloat16(), torch.rand(64)
    _, found, of_fp32 = gemm.linears(x, (), plain, fp32)
    for y, matrix in zip(found, plain, strict=True):
        # a kernel for several bf16 or fp32 linears may sum in another order
        assert torch.equal(y, gemm.linear(x, matrix)) or matrix.block_type is None
        torch.testing.assert_close(y, gemm.linear(x, matrix), rtol=2**-7, atol=2**-7)
    for y, matrix in zip(of_fp32, fp32, strict=True):
        torch.testing.assert_close(y, gemm.linear_fp32(x, matrix), rtol=1e-4, atol=1e-4)
    _, normed = gemm.normed_linears(x, norm, 1e-6, (), plain)
    expected = gemm.linears(gemm.rms_norm(x, norm, 1e-6), (), plain)[1]
    assert all(map(torch.equal, normed, expected))


def unit_rows(kind: str, *shape: int, seed: int) -> BlockMatrix:
    """Return random blocks whose rows have about unit length, so that products are as large as the inputs."""
    size = float(blocks(kind, 64, 256, scale=1.0).values().std())
    return blocks(kind, *shape, seed=seed, scale=1 / (size * shape[-1] ** 0.5))


def stacks(up: str, down: str, count: int, inner: int, hidden: int) -> ExpertWeights:
    return ExpertWeights(
        unit_rows(up, count, inner, hidden, seed=1), unit_rows(down, count, hidden, inner, seed=2),
        unit_rows(up, count, inner, hidden, seed=3),
    )  # fmt: skip


def values_of(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(StoredMatrix(matrix.values()) for matrix in weights.matrices), weights.rows)


@pytest.mark.parametrize(
    ("up", "down", "hidden", "inner"),
    [("Q8_0", "Q4_0", 64, 32), *slow_rows(("IQ2_XXS", "Q2_K", 256, 256), ("Q4_K", "Q6_K", 256, 256))],
)
@pytest.mark.parametrize("tokens", [1, 4, 30, *slow(2, 8, 80, 400)])
def test_experts(tokens, up, down, hidden, inner, monkeypatch):
    # values of two bf16 numbers on Hopper too; its kernel, which rounds values, is in test_ggml_experts_hopper.py
    monkeypatch.setattr(ggml_hopper, "suits", lambda *_: False)
    weights, chosen = stacks(up, down, 3, inner, hidden), routes(tokens, 3, 2)
    x = torch.randn(tokens, hidden).bfloat16()
    y = experts.routed_experts(x, weights, *chosen, LIMIT, False)
    assert_close(y, slow_experts(x, values_of(weights), *chosen, LIMIT, False), False)


@pytest.mark.parametrize(("up", "down"), gpu)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_experts_of_flash(tokens, up, down):
    weights, chosen = stacks(up, down, 8, 2048, 4096), routes(tokens, 8, 6)
    x = torch.randn(tokens, 4096).bfloat16()
    y = experts.routed_experts(x, weights, *chosen, LIMIT, False)
    expected = experts.ref.routed_experts(x, values_of(weights), *chosen, LIMIT, False)
    assert_close(y, expected.double(), False)


@pytest.mark.parametrize("tokens", [1, *slow(3, 20)])
def test_a_mixture_adds_the_shared_expert_and_rows_may_move(tokens):
    weights, (chosen, routing) = stacks("Q8_0", "Q4_0", 4, 32, 32), routes(tokens, 4, 2)
    shared = ExpertWeights(*(matrix.row(0) for matrix in stacks("Q8_0", "Q8_0", 1, 32, 32).matrices))
    x = torch.randn(tokens, 32).bfloat16()
    y = experts.mixture(x, weights, shared, chosen, routing, LIMIT, True, torch.float32)
    routed = experts.routed_experts(x, weights, chosen, routing, LIMIT, False)
    assert torch.equal(y, routed + experts.shared_expert(x, shared, LIMIT, True).float())
    order = torch.tensor([2, 0, 3, 1])
    moved = [BlockMatrix.of(matrix.weight[order], matrix.block_type) for matrix in weights.matrices]
    elsewhere = ExpertWeights(*moved, order.argsort())
    assert torch.equal(experts.routed_experts(x, elsewhere, chosen, routing, LIMIT, False), routed)


def test_rounded_inputs():
    weights, chosen = stacks("Q8_0", "Q8_0", 1, 128, 128), routes(1, 1, 1)
    x = torch.randn(1, 128).bfloat16()
    y = experts.routed_experts(x, weights, *chosen, LIMIT, True)
    assert_close(y, slow_experts(x, values_of(weights), *chosen, LIMIT, True), True)


def test_what_no_kernel_decodes_is_refused():
    matrix = blocks("Q8_0", 8, 64)
    with pytest.raises(KernelUnsupported, match="contiguous"):
        gemm.linear(torch.randn(1, 32).bfloat16(), BlockMatrix.of(matrix.weight[:, :34], "Q8_0"))
    mixed = ExpertWeights(
        blocks("Q8_0", 2, 32, 32),
        StoredMatrix(torch.zeros(2, 32, 16).char(), torch.ones(2, 32, 1)),
        blocks("Q8_0", 2, 32, 32),
    )
    with pytest.raises(KernelUnsupported, match="beside GGUF blocks"):
        experts.routed_experts(torch.randn(1, 32).bfloat16(), mixed, *routes(1, 2, 1), 10.0, False)
