"""Streams of many tokens whose warps share the work: which these are, and on a Hopper that they are Triton's."""

import pytest
import torch

from dsv4cli.engine.compiling.launches import driven_by, recording
from dsv4cli.engine.compiling.no_data import NoData
from dsv4cli.kernels.card import BLACKWELL, CARDS, HOPPER, described
from dsv4cli.kernels.hyper_connections import Connection, ref
from tests.kernels.rounding import FP32

pytest.importorskip("triton")
from dsv4cli.kernels.hyper_connections import kernel
from dsv4cli.kernels.hyper_connections.kernel import hopper


@pytest.mark.parametrize(
    ("card", "tokens", "streams", "width", "lines", "dtype", "suits"),
    [
        ("h200", 4096, 4, 4096, 24, torch.bfloat16, True),
        ("h100", 768, 4, 7168, 24, torch.bfloat16, True),
        ("h200", 767, 4, 4096, 24, torch.bfloat16, False),
        ("h200", 4096, 2, 4096, 24, torch.bfloat16, False),
        ("h200", 4096, 4, 4112, 24, torch.bfloat16, False),
        ("h200", 4096, 4, 4096, 8, torch.bfloat16, False),
        ("h200", 4096, 4, 4096, 32, torch.bfloat16, False),
        ("h200", 4096, 4, 4096, 24, torch.float32, False),
        ("a100", 4096, 4, 4096, 24, torch.bfloat16, False),
        ("b200", 4096, 4, 4096, 24, torch.bfloat16, False),
    ],
)
def test_which_streams_warps_share(card, tokens, streams, width, lines, dtype, suits, monkeypatch):
    def rows(*shape, apart=0, start=0):
        strides = [*torch.empty(shape, device="meta").stride()]
        strides[0] += apart
        return torch.empty(start + tokens * strides[0], dtype=dtype, device="cuda").as_strided(shape, strides, start)

    with NoData(), described(CARDS[card]):
        x, held = rows(tokens, width), rows(tokens, streams, width)
        assert hopper.suits(x, held, lines) == hopper.suits(rows(tokens, width, apart=8), held, lines) == suits
        # copies begin at multiples of 16 bytes, streams lie behind each other
        assert not hopper.suits(rows(tokens, width, apart=4), held, lines)
        assert not hopper.suits(rows(tokens, width, start=4), held, lines)
        assert not hopper.suits(x, rows(tokens, streams, width, apart=8), lines)
        assert not hopper.suits(x, rows(tokens, streams, width, start=4), lines)
        monkeypatch.setattr("triton.__version__", "3.9.0")
        assert not hopper.suits(x, held, lines)
    assert not hopper.suits(
        torch.empty(tokens, width, dtype=dtype), torch.empty(tokens, streams, 32, dtype=dtype), lines
    )


@pytest.mark.parametrize(
    ("tokens", "splits"),
    [
        (8192, 2),  # 128 programs, one after the other takes 64 steps
        (4096, 4),
        (1024, 16),
        (768, 16),
        (5000, 3),  # 120 programs of 43 steps
        (1500, 11),
        (20_000, 4),
    ],
)
def test_columns_are_split_so_that_all_multiprocessors_work(tokens, splits):
    with described(CARDS["h200"]):
        assert hopper.splits(tokens, 4096, torch.device("cuda")) == splits


def test_a_prompt_compiles_one_kernel():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    with driven_by(CARDS["h200"]), NoData(), described(CARDS["h200"]), recording() as recorder:
        for tokens, width in ((1030, 4096), (8192, 4096), (4096, 7168)):
            shares = (empty(tokens, *more, dtype=torch.float32) for more in ((4,), (4, 4)))
            streams, fn = empty(tokens, 4, width), empty(3, 24, 4 * width)
            parts = hopper.mixed_and_projected(empty(tokens, width), streams, *shares, fn, empty(*streams.shape))
            assert parts.shape[1:] == (tokens, 32)
    assert [name for _, name, _ in recorder.launches] == ["_warp_specialized"]


def test_a_step_of_sublayers_takes_them(triton_backend, monkeypatch):
    """And a connection without a sublayer's output takes the Triton kernel."""
    x, streams, post, comb = (
        torch.randn(5, 32).bfloat16(),
        torch.randn(5, 4, 32).bfloat16(),
        torch.rand(5, 4),
        torch.rand(5, 4, 4),
    )
    connection = Connection(torch.randn(24, 128), torch.rand(3), torch.randn(24), 2, 1e-6, 1e-6)
    given, inputs = [], (x, streams, post, comb)

    def computed(*matrices):
        given.append(matrices)
        mixed = kernel.connect_post(*inputs)
        matrices[-1].copy_(mixed)
        return kernel._sweep(mixed, connection.fn, None, mixed)

    monkeypatch.setattr(kernel, "FEW", 0)
    expected = kernel.connect_post_pre(*inputs, connection, torch.ones(32))
    monkeypatch.setattr(hopper, "suits", lambda x, streams, lines: lines == 24)
    monkeypatch.setattr(hopper, "mixed_and_projected", computed)
    found = kernel.connect_post_pre(*inputs, connection, torch.ones(32))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    ((*matrices, weights, _),) = given
    assert all(torch.equal(one, other) for one, other in zip(matrices, inputs, strict=True))
    assert torch.equal(weights.double().sum(0), connection.fn.double())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "width"),
    [(768, 4096), (1025, 64), (1153, 96), (1500, 7168), (4096, 4096), (8192, 4096)],  # fewer steps than slots too
)
def test_streams_are_those_of_triton(tokens, width, monkeypatch):
    if not torch.cuda.is_available() or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        torch.manual_seed(tokens)
        x, streams = torch.randn(tokens, width + 8).bfloat16()[:, :width], torch.randn(tokens, 4, width).bfloat16()
        post, comb, weight = torch.rand(tokens, 4), torch.rand(tokens, 4, 4), torch.randn(width).bfloat16()
        connection = Connection(
            torch.randn(24, 4 * width) / width**0.5 / 4, torch.rand(3), torch.randn(24), 20, 1e-6, 1e-6
        )
    assert hopper.suits(x, streams, 24)
    inputs = (x, streams, post, comb, connection, weight)
    mixed, y, next_post, next_comb = kernel.connect_post_pre(*inputs)
    for _ in range(3):
        again = kernel.connect_post_pre(*inputs)
        assert all(torch.equal(one, other) for one, other in zip(again, (mixed, y, next_post, next_comb), strict=True))
    monkeypatch.setattr(hopper, "suits", lambda *matrices: False)
    assert torch.equal(mixed, kernel.connect_post_pre(*inputs)[0])
    monkeypatch.undo()
    _, exact_post, exact_comb = ref.connect_pre(mixed, connection)
    # 4 * 7168 products of size 0.01, added up in fp32
    torch.testing.assert_close(next_post, exact_post, rtol=0, atol=1e-5)
    torch.testing.assert_close(next_comb, exact_comb, rtol=0, atol=1e-5)
    parts = kernel._sweep(streams, connection.fn, kernel.SublayerOutput(x, post, comb), torch.empty_like(streams))
    sums, flat = parts.double().sum(0), mixed.double().flatten(1)
    products = flat.abs() @ connection.fn.double().abs().T
    assert ((sums[:, :24] - flat @ connection.fn.double().T).abs() <= 64 * FP32 * products).all()
    torch.testing.assert_close(sums[:, 24], flat.square().sum(1), rtol=3e-5, atol=0)  # 512 squares a thread
