"""Routed experts and the shared one against a loop over tokens and their experts in fp64."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise, fp8_round
from dsv4cli.kernels.experts import ExpertWeights, mixture, ref, routed_experts, shared_expert
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support.slow import slow, slow_rows

# tokens, hidden width, inner width, experts, experts of a token
SHAPES = [(0, 128, 128, 4, 2), (1, 128, 128, 1, 1), (7, 256, 128, 5, 3), (65, 128, 256, 3, 3)]
# chunks of four tokens and of fewer; the widths of Flash, of Pro, and of Flash on two ranks
GPU_ONLY = [
    (9, 256, 384, 2, 2),
    (41, 128, 256, 7, 4),
    (5, 4096, 2048, 9, 6),
    (2, 7168, 3072, 7, 6),
    (17, 4096, 1024, 9, 6),
]
# and whether inputs are rounded; what the interpreter takes seconds for is slow
ROUNDED = [
    ((0, 128, 128, 4, 2), True),
    *slow_rows(((1, 128, 128, 5, 2), True)),
    ((3, 128, 128, 1, 1), True),  # all of one expert
    *(pytest.param((1, 256, 256, 5, 2), rounded, marks=pytest.mark.slow) for rounded in (False, True)),
    *(pytest.param((3, 128, 128, 3, 2), rounded, marks=pytest.mark.slow) for rounded in (False, True)),
    *(pytest.param(shape, rounded, marks=pytest.mark.gpu) for shape in GPU_ONLY for rounded in (False, True)),
]
# tokens that stream, and one more; the real widths
SHARED = [
    *((tokens, 128, 128) for tokens in (0, 1, 3)),
    *slow((17, 128, 128)),
    *(pytest.param(shape[:3], marks=pytest.mark.gpu) for shape in GPU_ONLY),
]


@pytest.fixture
def large_programs(backend, monkeypatch):
    """Few programs in the interpreter, which takes 25 ms for each: 64 rows of w1 and w3, 128 of w2, 64 of a linear."""
    if backend == "interpreter":
        from dsv4cli.kernels.experts.kernel import few_tokens
        from dsv4cli.kernels.gemm.kernel import gemv as linears

        monkeypatch.setattr(linears, "gemv_tiles", lambda x, products: linears.GemvTiles(64, 4, min(2, len(x)), 0))
        rows = few_tokens.ProductTiles(64, 2, 1, 2), few_tokens.ProductTiles(128, 2, 1, 2)
        small, large = (few_tokens.FewTokensTiles(*sizes, *rows) for sizes in ((2, 8), (4, 16)))
        monkeypatch.setattr(few_tokens, "few_tokens_tiles", lambda tokens, inner: small if tokens <= 2 else large)
        monkeypatch.setattr(few_tokens, "ONE_TOKEN_DOWN", few_tokens.OneTokenDown(128, 1, 2, 2, 2))
        monkeypatch.setattr(few_tokens, "ALONE_EACH", 2)


def stored(form: str, experts: int, inner: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> StoredMatrix:
        if form == "f32":
            return StoredMatrix(torch.randn(experts, rows, columns) / columns**0.5)
        # codes of e2m1 have a root mean square of 2.7: about one with this scale and that width
        scale = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
        return StoredMatrix(codes.view(torch.int8), scale.view(torch.float8_e8m0fnu))

    return ExpertWeights(matrix(inner, hidden), matrix(hidden, inner), matrix(inner, hidden))


def stored_once(form: str, inner: int, hidden: int) -> ExpertWeights:
    """A shared expert: matrices in FP8, fp32 or, as the tensors of one of several, FP4."""
    if form == "fp8":

        def matrix(rows: int, columns: int) -> StoredMatrix:
            scale = torch.randint(121, 124, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
            return StoredMatrix(torch.randn(rows, columns).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))

        return ExpertWeights(matrix(inner, hidden), matrix(hidden, inner), matrix(inner, hidden))
    weights = stored(form, 1, inner, hidden)
    return ExpertWeights(*(matrix.row(0) for matrix in weights.matrices))


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

    w1, w2, w3 = (dequantise(weight, scale) for weight, scale, _ in weights.matrices)
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


@pytest.fixture
def gated(backend) -> Callable[..., torch.Tensor]:
    """The gated product in fp32 of the reference, or of the kernel that has no contract of its own."""
    if backend.startswith("torch"):
        return ref.gated
    from dsv4cli.kernels.experts import kernel

    return partial(kernel.gated, dtype=torch.float32)


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_clamps(gated, limit):
    gate, up = torch.meshgrid(torch.linspace(-5, 5, 21), torch.linspace(-5, 5, 21), indexing="ij")
    y = gated(gate, up, limit)
    torch.testing.assert_close(y.double(), slow_gated(gate.double(), up.double(), limit), rtol=1e-6, atol=1e-7)  # fp32
    assert gated(gate.bfloat16(), up.bfloat16(), limit).dtype == torch.float32
    # the gate is free below, both sides of the other are not
    assert gated(torch.tensor(-5.0), torch.tensor(1.0), 2.0).item() == pytest.approx(-5 / (1 + math.exp(5)), rel=1e-6)
    assert gated(torch.tensor(9.0), torch.tensor(-9.0), 2.0).item() == pytest.approx(-4 / (1 + math.exp(-2)), rel=1e-6)


def assert_close(y: torch.Tensor, exact: torch.Tensor, round_inputs: bool) -> None:
    # as above
    assert y.isfinite().all()
    assert (y.double() - exact).norm() <= (2**-7 if round_inputs else 2**-10) * exact.norm()


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize(("shape", "round_inputs"), ROUNDED, ids=str)
def test_fp4_experts_of_few_tokens(shape, round_inputs):
    tokens, hidden, inner, count, k = shape
    weights, (experts, routing) = stored("fp4", count, inner, hidden), routes(tokens, count, k)
    x = torch.randn(tokens, 2, hidden).bfloat16()[:, 1]
    y = routed_experts(x, weights, experts, routing, 10.0, round_inputs)
    assert (y.shape, y.dtype) == (x.shape, torch.float32)
    if tokens > 5:  # slow_experts takes seconds
        assert_close(y, ref.routed_experts(x, weights, experts, routing, 10.0, round_inputs).double(), round_inputs)
    else:
        assert_close(y, slow_experts(x, weights, experts, routing, 10.0, round_inputs), round_inputs)
    assert torch.equal(y, routed_experts(x, weights, experts, routing, 10.0, round_inputs))


@pytest.mark.usefixtures("large_programs")
def test_every_code_and_scale_of_fp4():
    # a token that picks one column, in a matrix whose rows begin with all codes, under scales of every size
    weights = stored("fp4", 1, 128, 128)
    weights.w1.weight.view(torch.uint8)[0, :, 0] = torch.arange(128, dtype=torch.uint8) * 2 + torch.arange(128) % 2
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    x[0, 0], x[1, 1] = 1, 1
    for scale in (127 - 40, 127, 127 + 40):
        weights.w1.scale.view(torch.uint8).fill_(scale)
        weights.w3.scale.view(torch.uint8).fill_(254 - scale)
        given = (x, weights, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 0.0, False)
        assert_close(routed_experts(*given), ref.routed_experts(*given).double(), False)


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_shared_expert(shape, round_inputs):
    tokens, hidden, inner = shape
    weights, x = stored_once("fp8", inner, hidden), torch.randn(tokens, hidden).bfloat16()
    y = shared_expert(x, weights, 10.0, round_inputs)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    one = ExpertWeights(*(StoredMatrix(weight[None], scale[None]) for weight, scale, _ in weights.matrices))
    exact = slow_experts(x, one, torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), 10.0, round_inputs)
    assert_close(y, exact, round_inputs)


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("scaled", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("w1", "w2")), "w3"])
def test_shared_expert_rounds_the_inputs_of_scaled_matrices_only(scaled):
    weights, x = stored_once("f32", 128, 128), torch.randn(2, 128).bfloat16()
    scale = torch.full((1, 1), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    coded = StoredMatrix(torch.randn(128, 128).to(torch.float8_e4m3fn), scale)
    weights = replace(weights, **{scaled: coded})
    y, expected = shared_expert(x, weights, 10.0, True), ref.shared_expert(x, weights, 10.0, True)
    # an input of w1 or w3 that is rounded, or not, by mistake is 2 ** -5.5 away
    assert_close(y, expected.double(), scaled == "w2")


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize(
    ("shape", "routed", "shared", "dtype"),
    [  # a sum of one routed expert would be in bf16 already
        ((0, 128, 128, 4, 2), "fp4", "fp8", torch.bfloat16),
        # one token: its two experts have a warp each, which halve the shared one's columns where these are two blocks
        *slow_rows(((1, 128, 128, 2, 2), "fp4", "fp8", torch.bfloat16)),
        ((1, 128, 256, 2, 2), "fp4", "fp8", torch.bfloat16),
        *(
            pytest.param((1, 4096, inner, 9, 6), "fp4", "fp8", torch.bfloat16, marks=pytest.mark.gpu)
            for inner in (384, 512, 2048)
        ),
        pytest.param((3, 128, 128, 3, 2), "fp4", "fp8", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((9, 4096, 2048, 9, 6), "fp4", "fp8", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((65, 256, 128, 5, 3), "fp4", "fp8", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((3, 256, 128, 5, 3), "fp4", "f32", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((3, 256, 128, 5, 3), "f32", "f32", torch.float32, marks=pytest.mark.gpu),
        *slow_rows(((1, 128, 128, 2, 2), "f32", "f32", torch.bfloat16)),
    ],
    ids=str,
)
def test_mixture_is_the_sum_rounded_once(shape, routed, shared, dtype, round_inputs):
    tokens, hidden, inner, count, k = shape
    weights, one = stored(routed, count, inner, hidden), stored_once(shared, inner, hidden)
    (experts, routing), x = routes(tokens, count, k), torch.randn(tokens, hidden).to(dtype)
    y = mixture(x, weights, one, experts, routing, 1.0, round_inputs, dtype)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    rounded = round_inputs and weights.w1.scale is not None
    total = ref.routed_experts(x, weights, experts, routing, 1.0, rounded)
    total += ref.shared_expert(x, one, 1.0, round_inputs)
    # as above, and one rounding to bf16
    assert (y.double() - total).norm() <= (2**-7 if round_inputs else 2**-9) * total.double().norm()
    if tokens and not round_inputs and dtype == torch.bfloat16:
        # parts that are summed in another order differ in few values, sums that are rounded twice in a fifth
        assert (y == total.to(dtype)).double().mean() > 0.9


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize(
    "shape",
    [
        (1, 128, 256, 2, 2),
        pytest.param((3, 128, 128, 3, 2), marks=pytest.mark.slow),
        *(pytest.param((tokens, 4096, 1024, 9, 6), marks=pytest.mark.gpu) for tokens in (1, 2, 9, 65)),
    ],
    ids=str,
)
def test_what_one_rank_adds_of_a_mixture_is_not_rounded(shape):
    tokens, hidden, inner, count, k = shape
    weights, one = stored("fp4", count, inner, hidden), stored_once("fp8", inner, hidden)
    (experts, routing), x = routes(tokens, count, k), torch.randn(tokens, hidden).bfloat16()
    y = mixture(x, weights, one, experts, routing, 1.0, False, torch.float32)
    assert (y.shape, y.dtype) == (x.shape, torch.float32)
    assert_close(y, ref.mixture(x, weights, one, experts, routing, 1.0, False, torch.float32).double(), False)
    assert torch.equal(y.bfloat16(), mixture(x, weights, one, experts, routing, 1.0, False, torch.bfloat16))
    assert (y != y.bfloat16()).double().mean() > 0.5


@pytest.mark.usefixtures("large_programs")
def test_one_token_adds_its_experts_in_ascending_order():
    # outputs 2 ** 30 v, -2 ** 30 v and v: only in ascending order v is not lost
    weights, x = stored("fp4", 3, 128, 128), torch.randn(1, 128).bfloat16()
    for tensor in (tensor for matrix in weights.matrices for tensor in matrix[:2]):
        tensor.view(torch.uint8)[1:] = tensor.view(torch.uint8)[0].clone()
    weights.w2.weight.view(torch.uint8)[1] ^= 0x88
    weights.w2.scale.view(torch.uint8)[:2] += 30
    y = routed_experts(x, weights, torch.tensor([[2, 0, 1]]), torch.ones(1, 3), 10.0, True)
    assert y.any()
    assert torch.equal(y, routed_experts(x, weights, torch.tensor([[2]]), torch.ones(1, 1), 10.0, True))


@pytest.mark.usefixtures("large_programs")
def test_order_of_experts_and_tokens_is_that_of_the_call():
    # an expert's tokens in several chunks, tokens with their experts in any order, an expert twice
    weights, x = stored("fp4", 3, 128, 128), torch.randn(3, 128).bfloat16()
    experts, routing = torch.tensor([[2, 0], [1, 0], [0, 0]]), torch.rand(3, 2)
    y = routed_experts(x, weights, experts, routing, 10.0, True)
    assert_close(y, slow_experts(x, weights, experts, routing, 10.0, True), True)
    turned = routed_experts(x, weights, experts.flip(-1), routing.flip(-1), 10.0, True)
    assert torch.equal(y[:2], turned[:2])


def test_experts_are_added_in_ascending_order():
    # outputs 2 ** 30, 1 and -2 ** 30: only in ascending order the one is lost
    one = StoredMatrix(torch.ones(3, 1, 1))
    weights = ExpertWeights(one, StoredMatrix(torch.tensor([2.0**30, 1, -(2.0**30)])[:, None, None]), one)
    factor = torch.full((2, 3), 1 / torch.sigmoid(torch.tensor(1.0)).item())
    y = routed_experts(torch.ones(2, 1), weights, torch.tensor([[0, 2, 1], [0, 1, 2]]), factor, 0.0, False)
    assert y.flatten().tolist() == [0, 0]


def test_an_expert_without_tokens_is_never_read():
    weights, x = stored("f32", 3, 128, 128), torch.randn(2, 128)
    for matrix in weights.matrices:
        matrix.weight[1] = float("nan")
    experts, routing = torch.tensor([[0, 2], [2, 0]]), torch.ones(2, 2)
    assert routed_experts(x, weights, experts, routing, 10.0, False).isfinite().all()


def chunks_of(experts: torch.Tensor, chunk: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """What `prepare` finds: expert, position and size of each chunk it lists, 0 for none; the pair at each position."""
    from dsv4cli.kernels.experts.kernel import few_tokens

    x, pairs = torch.randn(len(experts), 128).bfloat16(), experts.numel()
    call = few_tokens._Call(x, stored("fp4", 9, 128, 128), None, experts, torch.ones(experts.shape), 1.0, False, x)
    *_, order, _, chunks = few_tokens._prepare(call, chunk, 0, pairs)
    words = chunks.tolist()
    return [(word >> 32, word >> 8 & 0xFFFFFF, word & 255) for word in words], order.tolist()


@pytest.mark.parametrize("chunk", [2, 4])
def test_chunks_are_listed_without_gaps_the_large_ones_first(triton_backend, monkeypatch, chunk):
    from dsv4cli.kernels.experts.kernel import few_tokens

    # of one expert nine, of others four, three, one and none
    experts = torch.tensor([5] * 9 + [0] * 4 + [8] * 3 + [2])[torch.randperm(17)][:, None]
    found = {}
    for most in (0, 64):
        monkeypatch.setattr(few_tokens, "SPARSE", most)
        found[most], order = chunks_of(experts, chunk)
        assert experts[order, 0].tolist() == sorted(experts[:, 0].tolist())
    listed, sizes = found[0], [4, 4, 4, 3, 1, 1] if chunk == 4 else [2, 2, 1, 2, 2, 2, 2, 1, 2, 1]
    assert [size for _, _, size in listed] == [*sizes, *[0] * (17 - len(sizes))]
    assert sorted(listed[: len(sizes)]) == [one for one in found[64] if one[2]]


@pytest.mark.usefixtures("triton_backend")
def test_warps_take_rows_or_columns_and_nothing_changes(monkeypatch):
    from dsv4cli.kernels.experts.kernel import few_tokens

    (experts, routing), x = routes(5, 3, 2), torch.randn(5, 128).bfloat16()
    weights, one = stored("fp4", 3, 128, 128), stored_once("fp8", 128, 128)
    results = []
    for warps in (1, 4):
        tiles = few_tokens.ProductTiles(128, warps, 1, 1)
        monkeypatch.setattr(few_tokens, "few_tokens_tiles", lambda *_, t=tiles: few_tokens.FewTokensTiles(4, 8, t, t))
        results.append(mixture(x, weights, one, experts, routing, 10.0, True, torch.float32))
    assert torch.equal(*results)


def test_warps_with_rows_of_their_own_need_no_columns():
    from dsv4cli.kernels.experts.kernel.few_tokens import ProductTiles, _fitting

    assert _fitting(ProductTiles(64, 4, 2, 2), 384) == ProductTiles(64, 4, 2, 1)
    assert _fitting(ProductTiles(16, 2, 2, 2), 384) == ProductTiles(16, 1, 2, 1)
    assert _fitting(ProductTiles(16, 8, 2, 2), 512) == ProductTiles(16, 4, 1, 1)


def scattered(weights: ExpertWeights) -> ExpertWeights:
    """The same experts in other rows of larger stacks, whose other rows are poison."""
    count = weights.count
    rows = torch.randperm(2 * count + 1)[:count]

    def spread(matrix: torch.Tensor | None) -> torch.Tensor | None:
        if matrix is None:
            return None
        stack = torch.full((2 * count + 1, *matrix.shape[1:]), 0xFF, dtype=torch.uint8).view(torch.uint8)
        if matrix.itemsize > 1:
            stack = torch.full((2 * count + 1, *matrix.shape[1:]), math.nan, dtype=matrix.dtype)
        stack = stack.view(matrix.dtype)
        stack.view(torch.uint8)[rows] = matrix.view(torch.uint8)
        return stack

    return ExpertWeights(*(StoredMatrix(*map(spread, matrix)) for matrix in weights.matrices), rows)


@pytest.mark.usefixtures("backend", "large_programs")
@pytest.mark.parametrize(
    ("form", "tokens"),
    # one token, a few that stream, tiles
    [("fp4", 1), *slow_rows(("fp4", 3)), ("f32", 5), pytest.param("fp4", 70, marks=pytest.mark.gpu)],
)
def test_experts_may_lie_anywhere(form, tokens):
    """Not a bit depends on where."""
    weights, (experts, routing) = stored(form, 5, 128, 128), routes(tokens, 5, 3)
    x = torch.randn(tokens, 128).to(torch.float32 if form == "f32" else torch.bfloat16)
    expected = routed_experts(x, weights, experts, routing, 7.0, form == "fp4")
    assert torch.equal(routed_experts(x, scattered(weights), experts, routing, 7.0, form == "fp4"), expected)
