"""Queries and keys against norm, rope and block_scale one after another, each of which has its own test."""

import pytest
import torch

from dsv4cli.kernels.block_scale import fp4_round, hadamard
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.qk_norm_rope import KeyCells, KeyNorm, queries_and_keys, queries_keys_and_index, ref
from dsv4cli.kernels.rope import rotate
from tests.support.slow import slow, slow_rows

EPS = 1e-6
# tokens, heads, width, rotated pairs; keys without queries; last the width of Flash and Pro
SHAPES = [(0, 4, 128, 32), (1, 1, 128, 32), (7, 2, 192, 32), (2, 5, 80, 8), (3, 0, 128, 32), (2, 8, 512, 32)]


def inputs(tokens: int, heads: int, width: int, pairs: int, dtype: torch.dtype, cells: int = 20) -> list[torch.Tensor]:
    q, kv = torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, width).to(dtype)
    kv *= torch.logspace(-3, 1, width).to(dtype)
    angles = torch.rand(tokens, pairs) * 7
    rotation = torch.polar(torch.ones_like(angles), angles)
    stored = torch.where(torch.arange(tokens) % 3 == 1, -1, torch.randperm(cells)[:tokens])
    return [q, kv, torch.rand(width).to(dtype) + 0.5, rotation, torch.zeros(cells, width, dtype=dtype), stored]


def rest(
    weight: torch.Tensor, rotation: torch.Tensor, ring: torch.Tensor, cells: torch.Tensor, rounded: bool
) -> tuple[KeyNorm, torch.Tensor, KeyCells]:
    """What the functions take behind queries and keys."""
    return KeyNorm(weight, EPS, rounded), rotation, KeyCells(ring, cells)


def assert_near(ours: torch.Tensor, expected: torch.Tensor, steps: float) -> None:
    """Equal but for a few values that another order of sums has moved to the next number of the format."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    apart = (ours.double() - expected.double()).abs()
    assert (apart <= steps * expected.double().abs() + 1e-6).all()
    if ours.dtype == torch.bfloat16 and ours.numel():
        assert (apart > 0).double().mean() < 0.01


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_norm_rotation_and_rounding(shape, dtype):
    tokens, heads, width, pairs = shape
    rounded = (width - 2 * pairs) % 64 == 0
    given = inputs(tokens, heads, width, pairs, dtype)
    q, kv, *others = [x.clone() for x in given]
    expected = ref.queries_and_keys(q, kv, *rest(*others, rounded))
    queries, keys, ring = queries_and_keys(*given[:2], *rest(*given[2:], rounded))
    # queries: a step of bf16, or fp32 sums of 512; keys: a code of e4m3 is 1/8 apart at most
    fine = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert_near(queries, expected[0], fine)
    assert_near(keys, expected[1], 1 / 8 if rounded else fine)
    assert_near(keys[..., width - 2 * pairs :], expected[1][..., width - 2 * pairs :], fine)
    cells = given[-1]
    stored = torch.zeros_like(ring).index_copy_(0, cells[cells >= 0], keys[cells >= 0])
    assert ring is given[4]
    assert torch.equal(ring, stored)


@pytest.mark.usefixtures("backend")
def test_codes_where_every_sum_is_exact():
    # small integers, a turn by nothing: no order of sums can change a bit
    q, kv = torch.randint(-8, 9, (5, 4, 192)).bfloat16(), torch.randint(-8, 9, (5, 192)).bfloat16()
    turns = torch.polar(torch.ones(5, 32), torch.zeros(5, 32))
    given = [q, kv, torch.rand(192).bfloat16(), turns, torch.zeros(6, 192).bfloat16(), torch.arange(5)]
    for round_keys in (False, True):
        arguments = (*given[:2], *rest(*given[2:], round_keys))
        expected = ref.queries_and_keys(*arguments)[:2]
        for ours, theirs in zip(queries_and_keys(*arguments), expected, strict=False):
            # the root alone may differ by a bit of fp32, which rounds away nearly always
            assert (ours != theirs).double().mean() < 2e-3


@pytest.mark.usefixtures("backend")
def test_slices_of_wider_rows():
    q, kv, weight, rotation, ring, cells = inputs(4, 3, 128, 32, torch.bfloat16)
    both = torch.cat((q.flatten(1), torch.ones(4, 8).bfloat16(), kv), 1)
    parts = both[:, : 3 * 128].unflatten(1, (3, 128)), both[:, -128:]
    expected = queries_and_keys(q, kv, *rest(weight, rotation, ring.clone(), cells, True))
    found = queries_and_keys(*parts, *rest(weight, rotation, ring, cells, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


# tokens, heads, width, those of the indexer, rotated pairs; last Flash's widths
INDEX_SHAPES = [(0, 2, 128, 4, 32, 8), (3, 1, 128, 9, 32, 16), (2, 0, 192, 5, 64, 32), (1, 2, 512, 7, 128, 32)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("dtype", "round_keys"),
    [
        (torch.bfloat16, True),
        *slow_rows((torch.float32, False)),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shape", INDEX_SHAPES, ids=str)
def test_queries_of_the_indexer_in_the_same_launch(shape, dtype, round_keys):
    tokens, heads, width, index_heads, index_width, pairs = shape
    q, kv, weight, rotation, ring, cells = inputs(tokens, heads, width, pairs, dtype)
    round_keys = round_keys and (width - 2 * pairs) % 64 == 0
    wide = torch.randn(tokens, index_heads * index_width + 24).to(dtype)  # the other columns belong to others
    index_q = wide[:, 8:-16].unflatten(1, (index_heads, index_width))
    others = rest(weight, rotation, ring.clone(), cells, round_keys)
    *ours, index = queries_keys_and_index(q, kv, index_q, *rest(weight, rotation, ring, cells, round_keys))
    assert all(torch.equal(*pair) for pair in zip(ours, queries_and_keys(q, kv, *others), strict=True))
    expected = rotate(index_q.contiguous(), rotation)
    expected = fp4_round(hadamard(expected), 32) if round_keys else expected
    # compilers and PyTorch fuse different products of a rotation with its sum: visible in fp32, not in bf16's 8 bits
    atol = 0 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(index, expected, rtol=0, atol=atol)
    if tokens > 1:  # those of some rows: ranks divide them
        own, others = slice(1, tokens - tokens // 3), rest(weight, rotation, ring.clone(), cells, round_keys)
        *again, some = queries_keys_and_index(q, kv, index_q[own], *others, 1)
        assert all(torch.equal(*pair) for pair in zip([*again, some], [*ours, index[own]], strict=True))
        reference = ref.queries_keys_and_index(q, kv, index_q[own], *others, 1)[3]
        torch.testing.assert_close(reference, expected[own], rtol=0, atol=atol)


def test_a_gradient_flows_through_a_new_ring():
    q, kv, weight, rotation, ring, cells = inputs(4, 2, 128, 32, torch.float32)
    kv.requires_grad_()
    _, keys, stored = queries_and_keys(q, kv, *rest(weight, rotation, ring, cells, False))
    assert not ring.any()
    assert torch.equal(stored[cells[0]], keys[0])
    stored.sum().backward()
    assert (kv.grad != 0).any(1).tolist() == (cells >= 0).tolist()


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    q, kv, weight, rotation, ring, cells = inputs(2, 2, 128, 30, torch.bfloat16)
    with pytest.raises(KernelUnsupported, match="blocks of 64"):
        queries_and_keys(q, kv, *rest(weight, rotation, ring, cells, True))
    with pytest.raises(KernelUnsupported, match="one dtype"):
        queries_and_keys(q, kv, *rest(weight, rotation, ring.float(), cells, False))
    with pytest.raises(KernelUnsupported, match="power of two"):
        queries_keys_and_index(q, kv, q[..., :96], *rest(weight, rotation, ring, cells, False))
