"""RMS norms against fp64 and, where every operation is rounded, against that rounding written out."""

import math

import pytest
import torch

from dsv4cli.kernels.norm import head_norm, rms_norm
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.support.slow import slow, slow_rows

EPS = 1e-6
# the hidden and the query widths of Flash and Pro last
SHAPES = [(0, 64), (1, 1), (1, 257), (3, 5, 128), (131, 7), (2, 1024), (3, 4096), (2, 1536), (2, 7168)]


def exact_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.double()
    return values / (values.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [*slow(1.0), 1e-3, *slow(1e4)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES),
        *((shape, torch.float32) for shape in SHAPES[2:4]),
        *slow_rows(*((shape, torch.float32) for shape in (*SHAPES[:2], *SHAPES[4:]))),
    ],
    ids=str,
)
def test_rms_norm_rounds_once(shape, size, dtype):
    x, weight = (torch.randn(shape) * size).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = exact_norm(x, EPS) * weight.double()
    # fp32 before that: the mean of squares, the root, two products
    assert_rounded_once(rms_norm(x, weight, EPS), exact, exact.abs() * 16 * FP32)


@pytest.mark.usefixtures("backend")
def test_epsilon_is_inside_the_root():
    x = torch.full((1, 4), 1e-3)
    assert rms_norm(x, torch.ones(4), EPS)[0, 0].item() == pytest.approx(1 / math.sqrt(2), rel=1e-5)
    assert not rms_norm(torch.zeros(2, 4), torch.ones(4), EPS).any()
    assert head_norm(torch.full((1, 1, 4), 2**-10), 2.0**-20)[0, 0, 0].item() == pytest.approx(
        1 / math.sqrt(2), rel=1e-5
    )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 4, 128), (1, 1, 128), (7, 3, 128), *slow((2, 64, 512))], ids=str)
@pytest.mark.parametrize("eps", [EPS, *slow(0.3), 100.0])
def test_head_norm_rounds_every_operation(eps, shape):
    # integers: rounded squares and their mean are exact in fp32, so each rounding below is of the true value
    q = torch.randint(-31, 32, shape).bfloat16()
    square = q.float().square().bfloat16()
    mean = square.double().mean(-1, keepdim=True).float().bfloat16()
    inverse = (mean.double() + eps).float().bfloat16().double().rsqrt().float().bfloat16()
    assert torch.equal(head_norm(q, eps), (q.double() * inverse.double()).float().bfloat16())


@pytest.mark.usefixtures("backend")
def test_head_norm_fp32():
    q = torch.randn(5, 3, 128)
    exact = exact_norm(q, EPS)
    assert_rounded_once(head_norm(q, EPS), exact, exact.abs() * 16 * FP32)
    assert head_norm(torch.zeros(1, 1, 4), EPS).abs().sum() == 0


@pytest.mark.usefixtures("backend")
def test_a_slice_of_wider_rows():
    x = torch.randn(5, 3, 200)
    assert torch.equal(head_norm(x[..., 8:136], EPS), head_norm(x[..., 8:136].contiguous(), EPS))
    assert torch.equal(
        rms_norm(x[:, 1, 8:136], x[0, 0, :128], EPS), rms_norm(x[:, 1, 8:136].clone(), x[0, 0, :128], EPS)
    )
