"""Products of many rows whose warps share the work: which these are, and on a Hopper that bits are Triton's."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4cli.engine.compiling.launches import driven_by, recording
from dsv4cli.engine.compiling.no_data import NoData
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.card import BLACKWELL, CARDS, HOPPER, described
from tests.kernels.test_gemm import weights

pytest.importorskip("triton")
from dsv4cli.kernels.gemm.kernel import hopper, tiled_fp8


def codes(tokens, columns, apart=0, start=0):
    """Of the described card; apart: columns between rows."""
    size, shape, strides = start + tokens * (columns + apart), (tokens, columns), (columns + apart, 1)
    return torch.empty(size, dtype=torch.float8_e4m3fn, device="cuda").as_strided(shape, strides, start)


@pytest.mark.parametrize(
    ("card", "tokens", "features", "columns", "suits"),
    [
        ("h200", 4096, 32768, 1024, True),
        ("h100", 8192, 4096, 8192, True),
        ("h200", 1024, 2048, 4096, True),
        ("h200", 513, 32768, 1024, True),
        ("h200", 1024, 1024, 4096, False),  # 64 tiles
        ("h200", 640, 2048, 4096, False),  # 80 tiles
        ("h200", 1152, 2048, 4096, False),  # 144 tiles: the second time for 12 of them
        ("h200", 4096, 4128, 1024, False),
        ("h200", 4096, 4096, 1088, False),
        ("a100", 4096, 4096, 1024, False),
        ("l40s", 4096, 4096, 1024, False),
        ("b200", 4096, 4096, 1024, False),
        ("rtx5090", 4096, 4096, 1024, False),
    ],
)
def test_which_products_warps_share(card, tokens, features, columns, suits):
    with FakeTensorMode(), described(CARDS[card]):
        x, weight = codes(tokens, columns), codes(features, columns)
        assert hopper.suits(x, weight) == suits
        # copies begin at multiples of 16 bytes, rows lie behind each other
        for options in ({"start": 8}, {"apart": 128}):
            assert not hopper.suits(codes(tokens, columns, **options), weight)
            assert not hopper.suits(x, codes(features, columns, **options))
    x, weight = (torch.empty(rows, columns, device="meta") for rows in (tokens, features))
    assert not hopper.suits(x, weight)


def test_another_triton_is_not_asked_for_gluon(monkeypatch):
    with FakeTensorMode(), described(CARDS["h200"]):
        x = codes(4096, 1024)
        assert hopper.suits(x, x)
        monkeypatch.setattr("triton.__version__", "3.9.0")
        assert not hopper.suits(x, x)


@pytest.mark.parametrize(
    ("tokens", "features", "blocks"),
    [
        (4096, 32768, 2),
        (1024, 4096, 2),  # one round of 128 tiles, or two of 256
        (1024, 2048, 1),  # 128 tiles, or 64
        (4096, 512, 1),
        (8192, 512, 2),
        (4096, 4224, 1),  # 33 blocks
    ],
)
def test_tiles_leave_few_multiprocessors_idle(tokens, features, blocks):
    assert hopper.blocks(tokens, features, 132) == blocks


def test_a_rounded_linear_takes_them(triton_backend, monkeypatch):
    from dsv4cli.kernels.gemm.kernel import tiled

    given = []
    monkeypatch.setattr(hopper, "suits", lambda x, weight: len(weight) == 8)
    monkeypatch.setattr(hopper, "linear", lambda *parts: given.append(parts))
    x, matrices = torch.randn(11, 128).bfloat16(), [weights("fp8", rows, 128) for rows in (8, 16)]
    assert [y is None for y in tiled.linears(x, matrices, (), ())[0]] == [True, False]
    ((codes, scale, *parts),) = given
    assert torch.equal(codes.double() * scale.double(), block_scale.fp8_round(x, 128).double())
    assert all(one is other for one, other in zip(parts, matrices[0][:2], strict=True))


def test_a_prompt_compiles_one_kernel_for_all_widths():
    """And another for tiles of one block of features."""
    with driven_by(CARDS["h200"]), NoData(), described(CARDS["h200"]), recording() as recorder:
        for tokens, features, columns in (
            (4096, 32768, 1024),
            (8192, 4096, 8192),
            (2000, 4096, 2048),
            (1024, 2048, 4096),
        ):
            scales = (
                torch.empty(rows, columns // 128, dtype=torch.float8_e8m0fnu, device="cuda")
                for rows in (tokens, features // 128)
            )
            hopper.linear(codes(tokens, columns), next(scales), codes(features, columns), next(scales))
        from dsv4cli.kernels.gemm.kernel.warp_specialized import _warp_specialized

        # it is launched again without asking Triton, for all that its descriptors are Gluon's
        assert [(call.direct, len(call.descriptors)) for call in _warp_specialized.calls.values()] == [(True, 3)]
    assert [name for _, name, _ in recorder.launches] == ["_warp_specialized"] * 2


# more tiles than multiprocessors and fewer, a last tile of one row and of one half, one block of columns and several,
# as many as slots and one more; scales of both kinds
PRODUCTS = [
    (128, 128, 128, torch.float8_e8m0fnu),
    (257, 256, 640, torch.float8_e8m0fnu),
    (1472, 4096, 1024, torch.float8_e8m0fnu),
    (1025, 4224, 896, torch.float8_e8m0fnu),
    (1025, 4096, 512, torch.float32),
    (4096, 32768, 1024, torch.float8_e8m0fnu),
]


@pytest.fixture
def on_hopper():
    if not torch.cuda.is_available() or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("tokens", "features", "columns", "scales"), PRODUCTS)
@pytest.mark.usefixtures("on_hopper")
def test_products_are_those_of_triton(tokens, features, columns, scales, blocks, monkeypatch):
    from dsv4cli.kernels.block_scale.kernel import fp8_codes
    from dsv4cli.kernels.gemm.kernel import warp_specialized

    if features % (128 * blocks):
        pytest.skip("tiles of two blocks need an even number of them")
    with torch.device("cuda"):
        torch.manual_seed(tokens)
        x = (torch.randn(tokens, columns) * torch.logspace(-3, 3, columns)[torch.randperm(columns)]).bfloat16()
        weight = torch.randn(features, columns).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-features // 128), columns // 128) + 0.5
        if scales != torch.float32:
            scale = torch.randint(121, 130, scale.shape, dtype=torch.uint8).view(scales)
        given, y = fp8_codes(x, 128), torch.full((tokens, features), torch.nan, dtype=torch.bfloat16)
        few, alone = slice(tokens // 3, tokens // 3 + 70), torch.full_like(y[:70], torch.nan)
        for _ in range(3):  # Triton's own way to a launch, then ours
            warp_specialized.linear(*given, weight, scale, y, blocks)
        warp_specialized.linear(*(part[few] for part in given), weight, scale, alone, blocks)
    assert torch.equal(alone, y[few])
    monkeypatch.setattr(tiled_fp8, "SHORT", 1 << 20)  # no split sums
    assert torch.equal(y, tiled_fp8.linear(*given, weight, scale))
    exact = block_scale.fp8_round(x, 128).double() @ block_scale.dequantise(weight, scale).double().T
    assert ((y.double() - exact).norm() / exact.norm()).item() < 2.5e-3  # a rounding to bf16 is 1.7e-3
