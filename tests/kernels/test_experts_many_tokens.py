"""Routed experts for many tokens: the grouping exactly, the sums against the reference."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4cli.kernels.card import BLACKWELL, CARDS, HOPPER, described
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.experts import ExpertWeights, ref
from dsv4cli.kernels.stored_matrix import StoredMatrix

pytest.importorskip("triton")  # what is tested here is Triton's only

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.experts import kernel as experts_kernel
from dsv4cli.kernels.experts.kernel import hopper, many_tokens, sort_by_expert
from tests.support.slow import slow, slow_rows

BF16, FP32 = torch.bfloat16, torch.float32


def in_tiles(x, weights, experts, routing, limit, round_inputs) -> torch.Tensor:
    outputs = many_tokens.routed_outputs(x, weights, experts, routing, limit, round_inputs)
    return many_tokens.ordered_sum(outputs, experts)


def fp4(*shape: int) -> StoredMatrix:
    *lead, columns = shape
    codes = torch.randint(-128, 128, (*lead, columns // 2), dtype=torch.int8)
    scale = torch.randint(117, 123, (*lead, columns // 32), dtype=torch.uint8)
    return StoredMatrix(codes, scale.view(torch.float8_e8m0fnu))


def fp8(count: int, rows: int, columns: int) -> StoredMatrix:
    scale = torch.randint(118, 122, (count, -(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
    return StoredMatrix(torch.randn(count, rows, columns).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def bf16(*shape: int) -> StoredMatrix:
    return StoredMatrix((torch.randn(shape) * shape[-1] ** -0.5).bfloat16())


def fp32(*shape: int) -> StoredMatrix:
    return StoredMatrix(torch.randn(shape) * shape[-1] ** -0.5)


def stacked(stored, count: int, hidden: int, inner: int) -> ExpertWeights:
    w1, w3, w2 = stored(count, inner, hidden), stored(count, inner, hidden), stored(count, hidden, inner)
    return ExpertWeights(w1, w2, w3)


def routed(tokens: int, count: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, count).argsort(-1)[:, :chosen], torch.rand(tokens, chosen)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "size"),
    [(1, 6, 256, 16), (2, 6, 256, 2), (257, 1, 1, 64), (700, 3, 5, 16), (300, 2, 384, 128), (131, 8, 8, 32)],
)
def test_pairs_by_expert_in_tiles(tokens, chosen, count, size):
    experts, _ = routed(tokens, count, chosen)
    rows = torch.randperm(2 * count)[:count]
    groups = sort_by_expert.group(experts, rows, count, size)
    assert torch.equal(groups.order.long(), experts.flatten().argsort(stable=True))
    expected, start = [], 0
    for expert, pairs in enumerate(experts.flatten().bincount(minlength=count).tolist()):
        expected += [(int(rows[expert]), start + first, min(size, pairs - first)) for first in range(0, pairs, size)]
        start += pairs
    assert len(expected) <= len(groups.rows) <= experts.numel()
    needed = slice(len(expected))
    found = zip(groups.row[needed].tolist(), groups.start[needed].tolist(), groups.rows[needed].tolist(), strict=True)
    assert list(found) == expected
    assert not groups.rows[len(expected) :].any()
    # both begin at multiples of 16 bytes: for what does not, kernels would be compiled anew
    assert not groups.turns.any()
    assert groups.rows.data_ptr() % 16 == 0
    assert groups.turns.data_ptr() % 16 == 0


def assert_like_reference(x, weights, experts, routing, limit=7.0, round_inputs=False):
    """Sums in another order: a few 2 ** -24 of them in fp32; in bf16 an inner value, or an output, rounds otherwise."""
    ours = in_tiles(x, weights, experts, routing, limit, round_inputs)
    expected = ref.routed_experts(x, weights, experts, routing, limit, round_inputs)
    assert ours.dtype == FP32
    largest = expected.abs().max() if len(x) else 0
    # one place of bf16 in an output, or of e4m3 in an inner value, which is one of many terms
    bound = 2**-8 if x.dtype == BF16 else 1e-5
    torch.testing.assert_close(ours, expected, rtol=bound, atol=bound * largest)
    # and few do: the mean error is that of single flips
    assert (ours - expected).norm() <= (2**-11 if x.dtype == BF16 else 2e-6) * expected.norm()


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(("stored", "dtype", "hidden", "inner", "round_inputs"), [
    (fp4, BF16, 256, 128, True), (fp8, BF16, 200, 136, False), (fp32, FP32, 200, 136, False),
    *slow_rows((fp4, BF16, 160, 96, False), (fp8, BF16, 256, 128, True), (bf16, BF16, 200, 136, False)),
    *slow_rows((fp4, FP32, 256, 128, False), (fp8, FP32, 136, 72, False), (bf16, FP32, 136, 72, False),
               (fp32, BF16, 136, 72, False)),
])  # fmt: skip
def test_every_format(stored, dtype, hidden, inner, round_inputs):
    x = torch.randn(5, hidden + 8).to(dtype)[:, 8:]
    assert_like_reference(x, stacked(stored, 2, hidden, inner), *routed(5, 2, 1), round_inputs=round_inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_backend")
def test_tiles_of_every_width():
    """224 + 40 tokens in tiles of 128: a whole one, three quarters and half of one."""
    experts = (torch.arange(264) % 33 >= 28).long()[:, None]
    x, routing = torch.randn(264, 128).bfloat16(), torch.rand(264, 1)
    assert_like_reference(x, stacked(fp4, 2, 128, 128), experts, routing, round_inputs=True)


# the widths of Flash and Pro; those of Pro take seconds to interpret
@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(("hidden", "inner"), [
    pytest.param(4096, 128, marks=pytest.mark.slow), pytest.param(128, 2048, marks=pytest.mark.slow),
    pytest.param(7168, 128, marks=pytest.mark.gpu), pytest.param(128, 3072, marks=pytest.mark.gpu),
])  # fmt: skip
def test_real_widths(hidden, inner):
    x = torch.randn(2, hidden).bfloat16()
    assert_like_reference(x, stacked(fp4, 1, hidden, inner), *routed(2, 1, 1), limit=10.0, round_inputs=True)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    x = torch.randn(tokens, 128).bfloat16()
    assert_like_reference(x, stacked(fp4, 4, 128, 128), *routed(tokens, 4, 4), limit=0.0, round_inputs=True)


@pytest.mark.usefixtures("triton_backend")
def test_every_scale():
    weights = stacked(fp4, 1, 256, 128)
    code = torch.arange(256, dtype=torch.uint8)
    scale = code[:, None].expand(-1, 4).contiguous().view(torch.float8_e8m0fnu)
    weights = replace(weights, w2=weights.w2._replace(scale=scale[None]))
    x, (experts, routing) = torch.randn(2, 256), routed(2, 1, 1)
    ours = in_tiles(x, weights, experts, routing, 7.0, False)
    expected = ref.routed_experts(x, weights, experts, routing, 7.0, False)
    assert ours[:, 169:].isnan().all()  # 6 * 2 ** 41 and more is no weight
    size = block_scale.e8m0(scale[:169, 0]).double()
    # 128 terms of up to 6 times the scale, each with the rounding of inner values and of the sum
    ours, expected = ours.double()[:, :169], expected.double()[:, :169]
    torch.testing.assert_close(ours[:, 35:] / size[35:], expected[:, 35:] / size[35:], rtol=1e-5, atol=1e-4)
    assert (ours[:, :35].abs() <= 2.0**-80).all()  # 1e-24: lost beside any other


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(("tokens", "chosen", "width"), [(3, 6, 200), (2, 1, 8), (5, 8, 4096)])
def test_sum_is_in_the_order_of_experts(tokens, chosen, width):
    outputs = torch.randn(tokens * chosen, width) * torch.logspace(-3, 3, chosen).repeat(tokens)[:, None]
    experts, _ = routed(tokens, 9, chosen)
    if chosen > 1:
        experts[0, 1] = experts[0, 0]  # as a hash layer may choose: in the order of places then
    parts = outputs.unflatten(0, (tokens, chosen))
    order = experts.argsort(dim=-1, stable=True)
    expected = torch.zeros(tokens, width)
    for token in range(tokens):
        for place in order[token].tolist():
            expected[token] += parts[token, place]
    assert torch.equal(many_tokens.ordered_sum(outputs, experts), expected)
    # the shared expert comes last, and the whole is rounded once
    shared = torch.randn(tokens, width).bfloat16()
    assert torch.equal(many_tokens.ordered_sum(outputs, experts, shared, BF16), (expected + shared.float()).bfloat16())


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("dtype", [BF16, *slow(FP32)])
def test_a_mixture_is_its_parts_added_in_fp32(dtype):
    weights, x, chosen = stacked(bf16, 3, 128, 128), torch.randn(3, 128).bfloat16(), routed(3, 3, 2)
    shared = ExpertWeights(*(fp8(1, 128, 128).row(0) for _ in range(3)))
    parts = experts_kernel.routed_experts(x, weights, *chosen, 7.0, False)
    parts += experts_kernel.shared_expert(x, shared, 7.0, True)
    assert torch.equal(experts_kernel.mixture(x, weights, shared, *chosen, 7.0, True, dtype), parts.to(dtype))


@pytest.mark.usefixtures("triton_backend")
def test_what_is_not_a_number_stays_so():
    x = torch.randn(2, 128).bfloat16()
    x[0, 3] = torch.nan
    ours = in_tiles(x, stacked(fp4, 1, 128, 128), *routed(2, 1, 1), 7.0, False)
    assert ours[0].isnan().all()
    assert ours[1].isfinite().all()


@pytest.mark.usefixtures("triton_backend")
def test_what_is_refused():
    x, (experts, routing) = torch.randn(2, 192).bfloat16(), routed(2, 2, 1)
    weights = stacked(fp4, 2, 192, 128)
    with pytest.raises(KernelUnsupported, match="multiples of 128"):
        in_tiles(x, weights, experts, routing, 7.0, True)
    turned = replace(weights, w2=weights.w2._replace(weight=weights.w2.weight.mT.contiguous().mT))
    with pytest.raises(KernelUnsupported, match="contiguous"):
        in_tiles(x, turned, experts, routing, 7.0, False)


# large tiles of all widths and small ones, whole and not; one expert with many pairs; experts without any
SHARED = [(300, 3), (260, 2), (400, 20), (70, 192)]


@pytest.mark.parametrize("pairs", [pytest.param(128, marks=pytest.mark.slow), 64])
def test_warps_that_share_experts_in_an_interpreter(pairs):
    """The kernel's arithmetic and its barriers; layouts are the compiler's, and bits the GPU's."""
    from dsv4cli.kernels.experts.kernel import warp_specialized
    from tests.support.gluon_interpreter import run

    tokens, count = 98, 4
    x, weights = torch.randn(tokens, 512).bfloat16(), stacked(fp4, count, 512, 512)
    # 97, 65, 33 pairs and one: each a little wider than a way to multiply them
    token, routing = torch.arange(tokens), torch.rand(tokens, 2)
    experts = torch.stack((torch.where(token < 97, 0, 3), torch.where(token < 65, 1, 2)), 1)
    groups = sort_by_expert.group(experts, None, count, pairs)
    tiles = (groups.order, groups.row, groups.start, groups.rows, len(groups.rows))
    w1, w2, w3 = ((one.view(torch.int32), scale.view(torch.int32)) for one, scale, _ in weights.matrices)
    inner, outputs = torch.full((2, tokens * 2, 512), torch.nan).bfloat16()
    run(warp_specialized._warp_specialized, 3, many_tokens._inputs(x, "fp4", False), *tiles, routing, groups.turns, *w1,
        *w3, inner, 7.0, 512, 512, 2, True, pairs, races=True)  # fmt: skip
    run(warp_specialized._warp_specialized, 3, inner, *tiles, None, groups.turns, *w2, *w2, outputs, 0.0, 512, 512, 1,
        False, pairs, races=True)  # fmt: skip
    expected = ref.routed_experts(x, weights, experts, routing, 7.0, False)
    assert (many_tokens.ordered_sum(outputs, experts) - expected).norm() <= 2**-11 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "count"), SHARED)
def test_warps_that_share_experts(tokens, count, triton_backend, monkeypatch):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        x, weights, chosen = torch.randn(tokens, 1024).bfloat16(), stacked(fp4, 2 * count, 1024, 512), 2
        weights = replace(weights, rows=torch.randperm(2 * count)[:count])
        given = routed(tokens, count, chosen)
        monkeypatch.setattr(hopper, "LEAST", 0)
        assert hopper.suits(x, weights, tokens * chosen, count)
        for rounded in (True, False):
            assert_like_reference(x, weights, *given, round_inputs=rounded)
        outputs = many_tokens.routed_outputs(x, weights, *given, 7.0, True)
        assert all(torch.equal(many_tokens.routed_outputs(x, weights, *given, 7.0, True), outputs) for _ in range(5))
        # a token's bits are its own, whichever tile it is in
        few = slice(tokens // 3, tokens // 3 + 5)
        alone = many_tokens.routed_outputs(x[few], weights, *(one[few] for one in given), 7.0, True)
        assert torch.equal(alone, outputs.unflatten(0, (tokens, chosen))[few].flatten(0, 1))
        # and those of the kernel for other cards
        monkeypatch.setattr(hopper, "suits", lambda *_: False)
        assert torch.equal(many_tokens.routed_outputs(x, weights, *given, 7.0, True), outputs)


@pytest.mark.parametrize(
    ("card", "stored", "dtype", "hidden", "inner", "suits"),
    [
        ("h200", fp4, BF16, 4096, 2048, True),
        ("h100", fp4, BF16, 7168, 512, True),
        ("h200", fp4, BF16, 4096, 256, False),
        ("h200", fp4, BF16, 4224, 512, False),
        ("h200", fp4, FP32, 4096, 2048, False),
        ("h200", fp8, BF16, 4096, 2048, False),
        ("h200", bf16, BF16, 4096, 2048, False),
        ("a100", fp4, BF16, 4096, 2048, False),
        ("b200", fp4, BF16, 4096, 2048, False),
        ("rtx5090", fp4, BF16, 4096, 2048, False),
    ],
)
def test_which_experts_warps_share(card, stored, dtype, hidden, inner, suits, monkeypatch):
    with FakeTensorMode(), described(CARDS[card]), torch.device("cuda"):
        x, weights = torch.empty(70, hidden, dtype=dtype), stacked(stored, 2, hidden, inner)
        assert hopper.suits(x, weights, 420, 2) == suits
        # 16 pairs an expert
        assert hopper.suits(x, weights, 420, 26) == suits
        assert not hopper.suits(x, weights, 420, 27)
        # it counts values of inputs in 32 bits
        assert not hopper.suits(x, weights, 2**31 // inner, 2)
        assert not hopper.suits(torch.empty(2**31 // hidden + 1, hidden, dtype=dtype), weights, 420, 2)
        monkeypatch.setattr("triton.__version__", "3.9.0")
        assert not hopper.suits(x, weights, 420, 2)


def test_experts_that_are_waited_for_have_small_tiles():
    # chunks of 1,024 and of 2,048 tokens of Flash with 192 experts, 6 a token
    assert hopper.tile(1024 * 6, 192) == 64
    assert hopper.tile(2048 * 6, 192) == 128
