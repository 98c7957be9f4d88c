"""Linears over stored formats, on numbers whose products and sums are exact: results are the truth rounded once."""

from typing import Any

import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.gemm import grouped_linear, linear, linear_fp32, linears, normed_linears, rounded_linear
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.support.slow import slow, slow_except, slow_rows

# tokens, inputs, outputs: none, one, primes, one more than a tile; columns for several programs; tokens for wide tiles,
# for the widest of few rows, for many
SHAPES = [(0, 128, 5), (1, 128, 1), (2, 384, 7), (3, 256, 65), (5, 1024, 3), (17, 128, 67), (64, 128, 9), (65, 128, 9)]
FEW = SHAPES[1:4]


def cases(first: str, *forms: str) -> list[Any]:
    """Every shape in bf16 inputs of the first form, and a few in the others and in fp32; the rest is slow."""
    few = [(shape, first, torch.bfloat16) for shape in SHAPES]
    few += [(shape, form, torch.bfloat16) for form in forms for shape in FEW]
    few += [(FEW[1], form, torch.float32) for form in (first, *forms)]
    dtypes = torch.bfloat16, torch.float32
    return slow_except(few, [(s, form, dtype) for form in (first, *forms) for s in SHAPES for dtype in dtypes])


# columns that are no multiple of what a program takes
WIDTHS = [65, 320, 1536]


def weights(form: str, rows: int, columns: int) -> StoredMatrix:
    """A matrix whose values are small multiples of 1/8."""
    if form == "fp4":
        scale = torch.randint(125, 129, (rows, columns // 32), dtype=torch.uint8)
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return StoredMatrix(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    values = torch.randint(-8, 9, (rows, columns)).float()
    if form == "fp8":
        scale = torch.randint(124, 129, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
        return StoredMatrix(values.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    return StoredMatrix(values.to({"bf16": torch.bfloat16, "f32": torch.float32}[form]))


def inputs(*shape: int) -> torch.Tensor:
    """Integers that FP8 has at every scale that they get."""
    return torch.randint(-16, 17, shape)


def values_of(matrix: StoredMatrix) -> torch.Tensor:
    """The values of a matrix in fp64."""
    return dequantise(matrix.weight, matrix.scale).double()


def exactly(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """x @ values_of(matrix).T in fp64."""
    return x.double() @ values_of(matrix).T


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "form", "dtype"), cases("fp8", "fp4", "bf16", "f32"), ids=str)
def test_linear_rounds_once(shape, form, dtype):
    tokens, columns, rows = shape
    x = inputs(tokens, columns).to(dtype)
    matrix = weights(form, rows, columns)
    y = linear(x, matrix)
    assert y.dtype == dtype
    assert torch.equal(y, exactly(x, matrix).float().to(dtype))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "form", "dtype"), cases("fp8", "fp4"), ids=str)
def test_a_rounded_linear_rounds_its_input(shape, form, dtype):
    tokens, columns, rows = shape
    x = inputs(tokens, columns).to(dtype)
    # beside 449 and in its block: 17 becomes 16, 1.03 becomes 1
    x[:, :3] = torch.tensor([449.0, 17.0, 1.03]).to(dtype)
    matrix = weights(form, rows, columns)
    exact = exactly(block_scale.fp8_round(x, 128), matrix)
    assert not torch.equal(exact, exactly(x, matrix)) or not tokens
    y = rounded_linear(x, matrix)
    assert y.dtype == dtype
    assert torch.equal(y, exact.float().to(dtype))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("form", "tokens"), [("fp8", 1), ("fp8", 2), ("fp8", 3), ("fp4", 1)])
@pytest.mark.parametrize("columns", [1024, *slow(4096, 7168)])  # of Flash and Pro
def test_a_rounded_linear_of_any_numbers(columns, form, tokens):
    x = (torch.randn(tokens, columns) * torch.logspace(-4, 2, columns)).bfloat16()
    matrix = weights(form, 3, columns)
    rounded = block_scale.fp8_round(x, 128)
    size = rounded.double().abs() @ values_of(matrix).abs().T
    # bf16 tensor cores add up a few bits short of fp32 (H200: 1e-6 of the result)
    assert_rounded_once(rounded_linear(x, matrix), exactly(rounded, matrix), size * 2.0**-19)


@pytest.mark.gpu
def test_columns_that_fill_no_power_of_two():
    """Pro's w2 of one token: ptxas gave zeros beyond the columns that are there the codes of what it found, NaN too."""
    matrix = weights("fp8", 7168, 3072)
    x = inputs(1, 3072).bfloat16()
    exact = exactly(block_scale.fp8_round(x, 128), matrix)
    given = x.cuda(), StoredMatrix(matrix.weight.cuda(), matrix.scale.cuda())
    for _ in range(10):
        assert torch.equal(rounded_linear(*given).cpu(), exact.float().bfloat16())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES),
        (FEW[1], torch.float32),
        *slow_rows(*((shape, torch.float32) for shape in SHAPES if shape != FEW[1])),
    ],
    ids=str,
)
def test_linear_fp32_is_not_rounded(shape, dtype):
    tokens, columns, rows = shape
    x, matrix = inputs(tokens, columns).to(dtype), weights("bf16", rows, columns)
    y = linear_fp32(x, matrix)
    assert y.dtype == torch.float32
    assert torch.equal(y.double(), exactly(x, matrix))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [1, *slow(3)])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("columns", WIDTHS)
def test_columns_of_any_number(columns, form, tokens):
    x, matrix = inputs(tokens, columns).bfloat16(), weights(form, 9, columns)
    assert torch.equal(linear(x, matrix), exactly(x, matrix).float().bfloat16())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", ["fp8", "bf16"])
# groups of 96 rows do not align with the blocks of the scale, those of 5 not with a program's rows
@pytest.mark.parametrize(
    ("tokens", "groups", "rows"),
    [
        *((0, 2, 96), (1, 2, 24), (2, 3, 5), (3, 2, 128), (33, 2, 128)),
        *slow_rows((1, 5, 3), (17, 2, 96), (1, 2, 96), (5, 2, 6)),
    ],
)
def test_grouped_linear(tokens, groups, rows, form):
    x = inputs(tokens, groups, 128).bfloat16()
    matrix = weights(form, groups * rows, 128)
    values = values_of(matrix)
    y = grouped_linear(x, matrix)
    assert y.shape == (tokens, groups, rows)
    for group in range(groups):
        exact = x[:, group].double() @ values[rows * group : rows * (group + 1)].T
        assert torch.equal(y[:, group], exact.float().bfloat16())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [0, 1, 3, 17, *slow(2, 65)])
def test_linears_are_the_single_ones(tokens):
    x = inputs(tokens, 256).bfloat16()
    rounded = [weights("fp8", 66, 256), weights("fp8", 5, 256)]
    plain = [weights("bf16", 3, 256), weights("fp8", 4, 256)]
    fp32 = [weights("bf16", rows, 256) for rows in (9, 8, 1)]
    got = linears(x, rounded, plain, fp32)
    expected = (
        [rounded_linear(x, matrix) for matrix in rounded],
        [linear(x, matrix) for matrix in plain],
        [linear_fp32(x, matrix) for matrix in fp32],
    )
    assert [[y.dtype for y in ys] for ys in got] == [[y.dtype for y in ys] for ys in expected]
    assert all(
        torch.equal(a, b) for ours, theirs in zip(got, expected, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tokens", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_may_take_rows_several_times(tokens, monkeypatch):
    from dsv4cli.kernels.gemm.kernel import gemv

    # three times 4 rows of 256 columns in FP8, once in bf16 and fp32; of FP4 six times
    monkeypatch.setattr(gemv, "gemv_tiles", lambda x, products: gemv.GemvTiles(4, 4, tokens, 3 * 4 * 256))
    # in fp32, which is not for tensor cores
    x = inputs(tokens, 256).float()
    for form, rows in [("fp8", 29), ("bf16", 5), ("fp4", 29), ("f32", 5), ("fp8", 13), ("fp8", 4)]:
        matrix = weights(form, rows, 256)
        assert torch.equal(linear(x, matrix), exactly(x, matrix).float())
    matrix = weights("fp8", 3 * 20, 256)
    exact = values_of(matrix).unflatten(0, (3, 20))
    x = inputs(tokens, 3, 256).float()
    y = grouped_linear(x, matrix)
    assert torch.equal(y, torch.einsum("tgk,gnk->tgn", x.double(), exact).float())


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(("tokens", "form"), [(17, "fp8"), (65, "fp8"), (3, "fp4")])
def test_linears_of_many_rows_round_their_input_once(tokens, form, monkeypatch):
    from dsv4cli.kernels.block_scale import kernel

    calls = []
    for name in ("fp8_round", "fp8_codes"):
        way = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *given, way=way: calls.append(given) or way(*given))
    linears(inputs(tokens, 128).bfloat16(), [weights(form, 4, 128), weights(form, 5, 128)])
    assert len(calls) == 1


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((tokens, torch.bfloat16) for tokens in (0, 1, 2, 3, 17)),
        (1, torch.float32),
        *(pytest.param(tokens, torch.float32, marks=pytest.mark.slow) for tokens in (0, 2, 3, 17)),
    ],
)
def test_normed_linears_are_those_of_the_norm(tokens, dtype):
    # rows of a wider matrix; three threes and five ones have a mean square of 4
    x = torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1]).repeat(tokens, 96) * (2 * torch.randint(0, 2, (tokens, 768)) - 1)
    x = (x * 2.0 ** (torch.arange(tokens)[:, None] % 3)).to(dtype)[:, 128:384]
    # times 1.5 none of these is exact in bf16
    factor = torch.randint(64, 128, (256,)).mul(2).add(1).bfloat16()
    normed = x.double() / x.double().square().mean(1, keepdim=True).sqrt() * factor.double()
    rounded = [weights("fp8", 9, 256), weights("fp8", 5, 256)]
    plain = [weights("bf16", 3, 256), weights("fp8", 4, 256)]
    ours = normed_linears(x, factor, 1e-9, rounded, plain)
    expected = linears(normed.to(dtype), rounded, plain)[:2]
    for got, wanted in zip(ours, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_norm_is_rounded_once(tokens):
    x, factor = torch.randn(tokens, 320).bfloat16(), torch.randn(320).bfloat16()
    ((y,),) = normed_linears(x, factor, 0.1, plain=[StoredMatrix(torch.eye(320).bfloat16())])[1:]
    exact = factor.double() * x.double() / (x.double().square().mean(1, keepdim=True) + 0.1).sqrt()
    # the sum of squares, the root and two products
    assert_rounded_once(y, exact, exact.abs() * 16 * FP32)


@pytest.mark.usefixtures("backend")
def test_linears_of_each_kind_alone():
    x, matrix = inputs(1, 128).bfloat16(), weights("fp8", 4, 128)
    exact = exactly(x, matrix).float()
    assert torch.equal(linears(x, rounded=[matrix])[0][0], exact.bfloat16())
    assert torch.equal(linears(x, plain=[matrix])[1][0], exact.bfloat16())
    assert torch.equal(linears(x, fp32=[StoredMatrix(values_of(matrix).float())])[2][0], exact)
    assert linears(x) == ([], [], [])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [1, 4, 17])
def test_tokens_may_lie_apart(tokens):
    wide, matrix = inputs(tokens, 384).bfloat16(), weights("fp8", 3, 128)
    x = wide[:, 128:256]
    assert torch.equal(rounded_linear(x, matrix), exactly(x, matrix).float().bfloat16())


@pytest.mark.usefixtures("backend")
def test_sums_are_taken_in_fp32():
    # in bf16 the ones would vanish beside 512
    x, weight = torch.ones(1, 65, dtype=torch.bfloat16), torch.ones(1, 65, dtype=torch.bfloat16)
    weight[0, 0] = 512
    assert linear(x, StoredMatrix(weight)).item() == 576
    # and in TF32 this product would lose its last bits
    exact = 1 + 2.0**-12
    assert linear_fp32(torch.tensor([[exact]]), StoredMatrix(torch.tensor([[exact]]))).item() == exact**2 - 2.0**-24


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [1, 3])
def test_fp32_is_multiplied_in_fp32(tokens):
    x, weight = torch.randn(tokens, 256), torch.randn(9, 256)
    # each of the products and sums rounds once
    error = (x.double().abs() @ weight.double().abs().T) * 256 * FP32
    assert_rounded_once(linear_fp32(x, StoredMatrix(weight)), exactly(x, StoredMatrix(weight)), error)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("byte", [0, 1, 253])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_scales_of_any_size(form, byte):
    x, matrix = torch.zeros(1, 128), weights(form, 1, 128)
    matrix.weight[:] = 0
    matrix.weight.view(torch.uint8)[0, 2] = 0x22  # FP4: 1 in columns 4 and 5; FP8: 5 / 128 in column 2
    x[0, 2:5] = 0.5
    matrix.scale.view(torch.uint8).fill_(byte)
    assert torch.equal(linear(x, matrix), exactly(x, matrix).float())


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gpu_without_fp8_gives_the_same(tokens, monkeypatch):
    from dsv4cli.kernels.gemm.kernel import few_rows, gemv, swap_ab

    for module in (few_rows, gemv, swap_ab):
        monkeypatch.setattr(module, "has_fp8", lambda x: False)
    x = torch.randn(tokens, 256).bfloat16()
    values = torch.arange(256, dtype=torch.uint8) & 0xBF  # every code but the largest and NaN
    matrix = StoredMatrix(values.view(torch.float8_e4m3fn)[None].repeat(3, 1), weights("fp8", 3, 256).scale)
    given = block_scale.fp8_round(x, 128)
    error = given.double().abs() @ values_of(matrix).abs().T * 256 * FP32
    assert_rounded_once(rounded_linear(x, matrix), exactly(given, matrix), error)


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernels_do_not_take():
    matrix = weights("fp8", 4, 128)
    with pytest.raises(KernelUnsupported, match="consecutive columns"):
        linear(torch.ones(128, 4).bfloat16().T, matrix)
    with pytest.raises(KernelUnsupported, match="float16"):
        linear(torch.ones(1, 128).half(), matrix)
    with pytest.raises(KernelUnsupported, match="up to 16384"):
        linear(torch.ones(1, 16385).bfloat16(), StoredMatrix(torch.ones(1, 16385)))
    with pytest.raises(KernelUnsupported, match="whole weights"):
        linear(torch.ones(1, 64).bfloat16(), StoredMatrix(torch.ones(2, 128)[:, :64]))
    with pytest.raises(KernelUnsupported, match="blocks of 128 columns, not 96"):
        rounded_linear(torch.ones(1, 96).bfloat16(), weights("fp4", 4, 96))
