"""Hyper-connections against loops in fp64 and the check vector of the official code."""

import math

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.hyper_connections import Connection, connect_head, connect_post, connect_post_pre, connect_pre, ref
from dsv4cli.kernels.norm.ref import rms_norm
from dsv4cli.kernels.workspace import Workspace
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.support.slow import slow, slow_rows

# mixes before scale and base, and what becomes of them (scales 1, bases 0)
MIX = [0.3, -1.2, 0.8, 0.1, 0.5, -0.4, 1.5, -2, 1, -1, 0.5, 0, 2, 0, -2, 1, -0.5, 0.25, 0.75, -1, 0, 3, -3, 1]
PRE = [0.574444, 0.231476, 0.689976, 0.52498]
POST = [1.244919, 0.802625, 1.635149, 0.238406]
COMB = [
    [0.336752, 0.039413, 0.370319, 0.253515],
    [0.525466, 0.0615, 0.017451, 0.395583],
    [0.096153, 0.176032, 0.60847, 0.119344],
    [0.041628, 0.723054, 0.003759, 0.231557],
]
# tokens, streams, width
SHAPES = [(0, 4, 8), (1, 4, 1), (3, 4, 33), (5, 2, 64)]
# bf16 everywhere, fp32 once
TYPED = [
    *((shape, torch.bfloat16) for shape in SHAPES),
    (SHAPES[2], torch.float32),
    *slow_rows(*((shape, torch.float32) for shape in SHAPES if shape != SHAPES[2])),
]
# one token, a few, more than the few; the widths of Flash and Pro
STEPS = [
    (0, 4, 8, torch.bfloat16), (1, 4, 33, torch.float32), (5, 2, 70, torch.bfloat16), (17, 4, 9, torch.float32),
    (3, 4, 256, torch.bfloat16),
    pytest.param((1, 4, 4096, torch.bfloat16), marks=pytest.mark.slow),
    pytest.param((1, 4, 7168, torch.bfloat16), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.usefixtures("backend")
def test_check_vector():
    streams = 2 * torch.eye(4)[None]  # stream j has a 2 at j: mean square 1, and x_j = 2 * pre_j
    fn = torch.zeros(24, 4, 4)
    fn.diagonal(dim1=1, dim2=2).copy_(torch.tensor(MIX)[:, None] / 8)
    x, post, comb = connect_pre(streams, Connection(fn.flatten(1), torch.ones(3), torch.zeros(24), 20, 1e-6, 0.0))
    for found, printed in ((x[0] / 2, PRE), (post[0], POST), (comb[0], COMB)):
        torch.testing.assert_close(found, torch.tensor(printed), rtol=0, atol=1e-6)  # printed with six decimals


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_mix(token: torch.Tensor, fn: torch.Tensor, eps: float) -> list[float]:
    flat = token.double().flatten().tolist()
    inverse = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + eps)
    return [sum(w * value for w, value in zip(row, flat, strict=True)) * inverse for row in fn.double().tolist()]


def slow_sinkhorn(rows: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """Rows, then columns, in turn; the first pass over rows is the softmax."""
    count = range(len(rows))
    exps = [[math.exp(value - max(row)) for value in row] for row in rows]
    comb = [[value / sum(row) + eps for value in row] for row in exps]
    for iteration in range(iterations):
        if iteration:
            comb = [[value / (sum(row) + eps) for value in row] for row in comb]
        sums = [sum(comb[j][k] for j in count) + eps for k in count]
        comb = [[comb[j][k] / sums[k] for k in count] for j in count]
    return comb


def parameters(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = (2 + count) * count
    return torch.randn(rows, count * width) / (count * width) ** 0.5, torch.rand(3) + 0.5, torch.randn(rows)


# the real eps hides behind fp32 (invisible in logits), a large one shows each place where it stands
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("iterations", "hc_eps"), [(20, 1e-6), *slow_rows((3, 0.05)), (1, 0.05)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_connect_pre(shape, iterations, hc_eps):
    tokens, count, width = shape
    streams, (fn, scale, base) = torch.randn(shape), parameters(count, width)
    x, post, comb = connect_pre(streams, Connection(fn, scale, base, iterations, hc_eps, 0.01))
    assert (x.shape, post.shape, comb.shape) == ((tokens, width), (tokens, count), (tokens, count, count))
    (s0, s1, s2), b = scale.tolist(), base.tolist()
    for token in range(tokens):
        mix = slow_mix(streams[token], fn, 0.01)
        pre = [sigmoid(mix[j] * s0 + b[j]) + hc_eps for j in range(count)]
        expected = sum(pre[j] * streams[token, j].double() for j in range(count))
        posts = [2 * sigmoid(mix[count + j] * s1 + b[count + j]) for j in range(count)]
        rows = [[mix[at] * s2 + b[at] for at in range((2 + j) * count, (3 + j) * count)] for j in range(count)]
        combs = slow_sinkhorn(rows, iterations, hc_eps)
        for found, truth in ((x, expected), (post, posts), (comb, combs)):
            # the fp32 sum over all streams (up to 132 products) dominates
            torch.testing.assert_close(found[token].double(), torch.as_tensor(truth).double(), rtol=5e-6, atol=5e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "dtype"), TYPED, ids=str)
def test_connect_post(shape, dtype):
    tokens, count, width = shape
    x, streams = torch.randn(tokens, width).to(dtype), torch.randn(shape).to(dtype)
    post, comb = torch.rand(tokens, count), torch.rand(tokens, count, count)
    exact = torch.zeros(shape, dtype=torch.float64)
    for target in range(count):
        exact[:, target] = post[:, target, None].double() * x.double()
        for source in range(count):
            exact[:, target] += comb[:, source, target, None].double() * streams[:, source].double()
    # sums of five products, none above 5
    assert_rounded_once(connect_post(x, streams, post, comb), exact, 50 * FP32)


@pytest.mark.usefixtures("backend")
def test_first_index_of_comb_is_the_source():
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 1
    streams = connect_post(torch.zeros(1, 1), torch.tensor([[[10.0], [20], [30], [40]]]), torch.zeros(1, 4), comb)
    assert streams.flatten().tolist() == [0, 0, 0, 20]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "dtype"), TYPED, ids=str)
def test_connect_head(shape, dtype):
    tokens, count, width = shape
    streams, (fn, scale, base) = torch.randn(shape).to(dtype), parameters(count, width)
    fn, scale, base = fn[:count], scale[:1], base[:count]
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for j, mix in enumerate(slow_mix(streams[token], fn, 0.01)):
            exact[token] += (sigmoid(mix * scale.item() + base[j].item()) + 0.05) * streams[token, j].double()
    # as in connect_pre
    assert_rounded_once(connect_head(streams, Connection(fn, scale, base, 0, 0.05, 0.01)), exact, 1e-5)


@pytest.mark.usefixtures("backend")
def test_collapse_rounds_once_to_bf16():
    streams, (fn, scale, base) = torch.randn(3, 4, 65).bfloat16(), parameters(4, 65)
    x, *_ = connect_pre(streams, Connection(fn, scale, base, 1, 1e-6, 1e-6))
    wide, *_ = connect_pre(streams.float(), Connection(fn, scale, base, 1, 1e-6, 1e-6))
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, wide.bfloat16())


def exact_weights(
    streams, fn, scale, base, iterations, hc_eps, norm_eps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre, post and comb in fp64."""
    count, flat = streams.shape[1], streams.double().flatten(1)
    mix = flat @ fn.double().T * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    pre, post, comb = mix.split((count, count, count * count), -1)
    bases, (s0, s1, s2) = base.double().split((count, count, count * count)), scale.double()
    comb = (comb * s2 + bases[2]).unflatten(-1, (count, count)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return torch.sigmoid(pre * s0 + bases[0]) + hc_eps, 2 * torch.sigmoid(post * s1 + bases[1]), comb


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_connect_step(case):
    *shape, dtype = case
    tokens, count, width = shape
    iterations = 20 if tokens == 1 else 2  # interpreted, they take most of the time
    before, x = torch.randn(shape).to(dtype), torch.randn(tokens, width).to(dtype)
    post, comb, weight = torch.rand(tokens, count), torch.rand(tokens, count, count), torch.randn(width)
    fn, scale, base = parameters(count, width)
    connection = Connection(fn, scale, base, iterations, 1e-6, 1e-6)
    streams, y, next_post, next_comb = connect_post_pre(x, before, post, comb, connection, weight.to(dtype))
    assert (streams.dtype, y.dtype, y.shape) == (dtype, dtype, x.shape)
    mixed = (
        torch.einsum("tjk,tjd->tkd", comb.double(), before.double()) + post.double()[..., None] * x.double()[:, None]
    )
    assert_rounded_once(streams, mixed, 50 * FP32)  # as connect_post
    # from here on of the streams as rounded
    pre, exact_post, exact_comb = exact_weights(streams, fn, scale, base, iterations, 1e-6, 1e-6)
    # 4 * 7168 products of size 0.01, added up in fp32
    torch.testing.assert_close(next_post.double(), exact_post, rtol=0, atol=1e-5)
    torch.testing.assert_close(next_comb.double(), exact_comb, rtol=0, atol=1e-5)
    collapsed = (pre[..., None] * streams.double()).sum(1)
    # x is rounded before the norm, up or down where fp32 cannot tell
    sides = torch.stack([(collapsed + sign * 2e-5).to(dtype).double() for sign in (-1, 1)])
    squares = torch.stack([sides.abs().amin(0), sides.abs().amax(0)]).square().mean(-1, keepdim=True)
    normed = (weight.to(dtype).double() * sides * (squares[:, None] + 1e-6).rsqrt()).flatten(0, 1)
    low, high = normed.amin(0), normed.amax(0)
    # and fp32 in the norm
    assert_rounded_once(y, (low + high) / 2, (high - low) / 2 + high.abs() * 16 * FP32)


# in two launches: tokens, columns, columns in a step; from 64 tokens on the weights are split beforehand;
# in one: tokens, columns; 0: one token and one stream
@pytest.fixture(
    params=[(16, 16, 16), pytest.param((32, 32, 16), marks=pytest.mark.slow), (64, 96, 32), (0, 32), (16, 32)], ids=str
)
def tile(request, triton_backend, monkeypatch):
    from dsv4cli.kernels.hyper_connections import kernel

    if len(request.param) == 2:
        monkeypatch.setattr(kernel, "fused_tiles", lambda _: kernel.FusedConnectTiles(*request.param, warps=4))
    else:
        monkeypatch.setattr(kernel, "FEW", 0)
        monkeypatch.setattr(kernel, "project_tiles", lambda *_: kernel.ProjectTiles(*request.param, warps=4, stages=1))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_each_way_to_tile(dtype):
    for count in (1, 3):
        test_connect_step((count, 2, 70, dtype))


@pytest.mark.usefixtures("tile")
def test_projection_weights_keep_their_24_bits():
    streams = 2 * torch.eye(2).bfloat16()[None]  # mean square 2
    fn, rest = torch.zeros(8, 2, 2), torch.rand(8) - 0.5
    fn[:, 0, 0] = 1 + torch.rand(8)
    fn[:, 1, 1] = rest - fn[:, 0, 0]
    _, post, _ = connect_pre(streams, Connection(fn.flatten(1), torch.ones(3), torch.zeros(8), 20, 1e-6, 0.0))
    mix = fn.double().diagonal(dim1=1, dim2=2).sum(-1)[2:4] * 2**0.5
    # without the last 8 bits of the weights 4e-6 off
    torch.testing.assert_close(post[0].double(), 2 * torch.sigmoid(mix), rtol=0, atol=5e-7)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    "shape", [(1, 4, 64), (5, 2, 32), pytest.param((16, 4, 1024), marks=pytest.mark.slow)], ids=str
)
def test_a_step_is_post_pre_and_norm(shape):
    tokens, count, width = shape
    streams, x = torch.randn(shape).bfloat16(), torch.randn(tokens, width).bfloat16()
    post, comb, weight = torch.rand(tokens, count), torch.rand(tokens, count, count), torch.rand(width).bfloat16()
    connection = Connection(*parameters(count, width), 2, 1e-6, 1e-6)
    step = connect_post_pre(x, streams, post, comb, connection, weight)
    joined, _, *mixes = ref.connect_post_pre(x, streams, post, comb, connection, weight)
    assert torch.equal(step[0], connect_post(x, streams, post, comb))
    # the norm has its own rounding: of the collapsed streams that it was given, which have theirs
    collapsed = connect_pre(step[0], connection)[0]
    pairs = [*zip(step, [joined, rms_norm(collapsed, weight, 1e-6), *mixes], strict=True)]
    # fp32 sums in another order: a last bit of bf16 here and there
    for found, expected in [*pairs, (collapsed, ref.connect_pre(joined, connection)[0])]:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found != expected).float().mean() < 0.05 or found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_launch_repeats_and_leaves_nothing(tokens, monkeypatch):
    from dsv4cli.kernels.hyper_connections import kernel

    left, words = [], kernel.words
    monkeypatch.setattr(kernel, "words", lambda *where: left.append(words(*where)) or left[-1])
    streams, weights = torch.randn(tokens, 4, 40).bfloat16(), parameters(4, 40)
    with Workspace().current():
        first = connect_pre(streams, Connection(*weights, 2, 1e-6, 1e-6))
        assert not left[0].any()
        for found, again in zip(first, connect_pre(streams, Connection(*weights, 2, 1e-6, 1e-6)), strict=True):
            assert torch.equal(found, again)
    assert left[0] is left[1]


@pytest.mark.usefixtures("triton_backend")
def test_one_launch_ends_whatever_it_is_given():
    streams, (fn, scale, base) = torch.randn(2, 4, 8), parameters(4, 8)
    fn.view(torch.int32)[3] = -1  # of all NaN the one whose inverted bits are 0
    streams[0] = torch.inf
    for values in connect_pre(streams, Connection(fn, scale, base, 2, 1e-6, 1e-6)):
        assert values[0].isnan().any()
    streams[0] = 0
    assert not connect_pre(streams, Connection(*parameters(4, 8), 2, 1e-6, 1e-6))[0][0].any()


@pytest.mark.usefixtures("backend")
def test_streams_that_are_one_tensor_seen_several_times():
    embedded, connection = torch.randn(3, 40).bfloat16(), Connection(*parameters(4, 40), 1, 1e-6, 1e-6)
    streams = embedded[:, None].expand(-1, 4, -1)
    for found, expected in zip(connect_pre(streams, connection), connect_pre(streams.clone(), connection), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernels_do_not_take():
    with pytest.raises(KernelUnsupported, match="power of two"):
        connect_pre(torch.zeros(1, 3, 8), Connection(*parameters(3, 8), 20, 1e-6, 1e-6))
    with pytest.raises(KernelUnsupported, match="16384"):
        connect_pre(torch.zeros(1, 1, 16385), Connection(*parameters(1, 16385), 20, 1e-6, 1e-6))
