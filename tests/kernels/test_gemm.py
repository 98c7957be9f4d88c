"""Linears over stored formats, on numbers whose products and sums are exact: results are the truth rounded once."""

import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.gemm import grouped_linear, linear, linear_fp32

# tokens, inputs, outputs: none, one, a prime, one more than a block
SHAPES = [(0, 128, 5), (1, 128, 1), (3, 256, 129), (7, 128, 131), (129, 128, 64)]


def weights(form: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight whose values are small multiples of 1/8."""
    if form == "fp4":
        scale = torch.randint(125, 129, (rows, columns // 32), dtype=torch.uint8)
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return packed.view(torch.int8), scale.view(torch.float8_e8m0fnu)
    values = torch.randint(-8, 9, (rows, columns)).float()
    if form == "fp8":
        scale = torch.randint(124, 129, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
        return values.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    return values.to({"bf16": torch.bfloat16, "f32": torch.float32}[form]), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["fp8", "fp4", "bf16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_rounds_once(shape, form, dtype):
    tokens, columns, rows = shape
    x = torch.randint(-16, 17, (tokens, columns)).to(dtype)
    weight, scale = weights(form, rows, columns)
    exact = x.double() @ dequantise(weight, scale).double().T
    y = linear(x, weight, scale)
    assert y.dtype == dtype
    assert torch.equal(y, exact.float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_fp32_is_not_rounded(shape, dtype):
    tokens, columns, rows = shape
    x, (weight, _) = torch.randint(-16, 17, (tokens, columns)).to(dtype), weights("bf16", rows, columns)
    y = linear_fp32(x, weight)
    assert y.dtype == torch.float32
    assert torch.equal(y.double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_grouped_linear(tokens, form, groups):
    x = torch.randint(-16, 17, (tokens, groups, 128)).bfloat16()
    weight, scale = weights(form, groups * 96, 128)  # groups do not align with the blocks of the scale
    values = dequantise(weight, scale).double()
    y = grouped_linear(x, weight, scale)
    assert y.shape == (tokens, groups, 96)
    for group in range(groups):
        exact = x[:, group].double() @ values[96 * group : 96 * (group + 1)].T
        assert torch.equal(y[:, group], exact.float().bfloat16())


def test_sums_are_taken_in_fp32():
    # in bf16 the ones would vanish beside 512
    x, weight = torch.ones(1, 65, dtype=torch.bfloat16), torch.ones(1, 65, dtype=torch.bfloat16)
    weight[0, 0] = 512
    assert linear(x, weight).item() == 576
    # and in TF32 this product would lose its last bits
    exact = 1 + 2.0**-12
    assert linear_fp32(torch.tensor([[exact]]), torch.tensor([[exact]])).item() == exact**2 - 2.0**-24
