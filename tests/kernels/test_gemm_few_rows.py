"""Linears of one to eight rows on tensor cores: exact where sums are, and a row's bits the same beside any others."""

import pytest
import torch

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.gemm import grouped_linear, linears, normed_linears
from dsv4cli.kernels.rows import exact_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.kernels.test_gemm import exactly, inputs, values_of, weights
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("triton_backend")
# the first row of a step and how many there are
STEPS = [(0, 1), (7, 1), (3, 2), (2, 3)]


@pytest.fixture(autouse=True)
def exact():
    """One row too goes this way."""
    with exact_rows(True):
        yield


@pytest.fixture
def tiled(monkeypatch):
    """Sets the tiles of what follows."""
    from dsv4cli.kernels.gemm.kernel import few_rows

    def tile(*numbers: int) -> None:
        monkeypatch.setattr(few_rows, "few_rows_tiles", lambda x, products: few_rows.FewRowsTiles(*numbers))

    return tile


@pytest.mark.parametrize("tokens", [1, 5, *slow(2)])
# a program takes rows once or thrice, the last of them beyond the matrix; asks for all ahead or a part
@pytest.mark.parametrize(("columns", "tiles"), [(512, (2, 2, 1, 0)), (384, (1, 5, 3, 0)), (256, (2, 1, 3, 0))])
def test_all_kinds_of_weights(tokens, columns, tiles, tiled):
    tiled(*tiles)
    x, coded, plain = inputs(tokens, columns).bfloat16(), weights("fp8", 70, columns), weights("bf16", 33, columns)
    # in the block of 449 17 becomes 16
    x[:, :2] = torch.tensor([449.0, 17.0]).bfloat16()
    rounded, same, wide = linears(x, [coded], [coded, plain], [plain])
    assert torch.equal(rounded[0], exactly(block_scale.fp8_round(x, 128), coded).float().bfloat16())
    assert torch.equal(same[0], exactly(x, coded).float().bfloat16())
    assert torch.equal(same[1], exactly(x, plain).float().bfloat16())
    assert torch.equal(wide[0], exactly(x, plain).float())


def test_groups():
    x, matrix = inputs(3, 2, 256).bfloat16(), weights("fp8", 2 * 128, 256)
    exact = values_of(matrix).unflatten(0, (2, 128))
    y = grouped_linear(x, matrix)
    assert torch.equal(y, torch.einsum("tgk,gnk->tgn", x.double(), exact).float().bfloat16())


@pytest.mark.parametrize("normed", [False, True])
def test_a_row_gets_the_bits_that_it_gets_alone(normed, tiled):
    tiled(2, 2, 1, 0)
    x, factor = (torch.randn(8, 512) * torch.logspace(-3, 2, 512)).bfloat16(), torch.randn(512).bfloat16()
    coded = [weights("fp8", 40, 512)._replace(weight=torch.randn(40, 512).to(torch.float8_e4m3fn))]
    plain = [StoredMatrix(torch.randn(20, 512).bfloat16()), *coded]

    def products(rows: torch.Tensor) -> list[torch.Tensor]:
        found = normed_linears(rows, factor, 1e-6, coded, plain) if normed else linears(rows, coded, plain)
        return [y for ys in found for y in ys]

    every = products(x)
    for first, count in STEPS:
        part = products(x[first : first + count])
        assert all(torch.equal(ours, whole[first : first + count]) for ours, whole in zip(part, every, strict=True))


@pytest.mark.parametrize(
    ("numbers", "columns", "registers"), [([512], 4096, 128), ([32768], 1024, 0), ([32768, 8192], 1024, 168)]
)
def test_registers_leave_room_for_the_programs_that_run_at_once(numbers, columns, registers):
    from dsv4cli.kernels.gemm.kernel.dequant import Product
    from dsv4cli.kernels.gemm.kernel.few_rows import few_rows_tiles

    scale = torch.empty(1, 1, dtype=torch.float8_e8m0fnu)
    coded = [torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta") for rows in numbers]
    products = [Product(StoredMatrix(weight, scale), True, torch.bfloat16) for weight in coded]
    assert few_rows_tiles(torch.empty(2, 1, columns), products).registers == registers


@pytest.mark.parametrize(
    ("kinds", "ahead", "registers"),
    [
        (("rounded", "rounded"), 3, 128),
        (("rounded", "exact"), 4, 128),
        (("rounded", "plain"), 2, 128),
        (("plain",), 2, 0),
    ],
)
def test_tiles_of_products_in_one_launch(kinds, ahead, registers):
    from dsv4cli.kernels.gemm.kernel.dequant import Product
    from dsv4cli.kernels.gemm.kernel.few_rows import few_rows_tiles

    scale, products = torch.empty(1, 1, dtype=torch.float8_e8m0fnu), []
    for kind in kinds:
        dtype = torch.bfloat16 if kind == "plain" else torch.float8_e4m3fn
        matrix = StoredMatrix(torch.empty(512, 4096, dtype=dtype, device="meta"), None if kind == "plain" else scale)
        products.append(Product(matrix, kind == "rounded", torch.bfloat16))
    tiles = few_rows_tiles(torch.empty(2, 1, 4096), products)
    assert (tiles.ahead, tiles.registers) == (ahead, registers)


def test_what_is_multiplied_elsewhere():
    from dsv4cli.kernels.gemm.kernel.few_rows import takes

    x, fp8, bf16 = torch.ones(8, 1, 256).bfloat16(), weights("fp8", 160, 256), weights("bf16", 160, 256)
    assert takes(x, fp8)
    assert takes(x, bf16)
    assert not takes(x, weights("fp4", 160, 256))
    assert not takes(x.float(), fp8)
    assert not takes(torch.ones(9, 1, 256).bfloat16(), fp8)
    assert not takes(x[..., :192], bf16)
    # groups whose rows do not fill blocks of 128
    assert not takes(torch.ones(2, 2, 256).bfloat16(), bf16)


def test_one_row_takes_another_way_unless_it_shall_be_exact(monkeypatch):
    from dsv4cli.kernels.gemm.kernel import few_rows

    calls = []
    monkeypatch.setattr(few_rows, "multiply", lambda *given: calls.append(len(given[0])))
    matrix = StoredMatrix(
        torch.empty(256, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 2, dtype=torch.float8_e8m0fnu)
    )
    monkeypatch.setattr("dsv4cli.kernels.gemm.kernel.gemv._launch", lambda *given: calls.append(0))
    for tokens, alike in ((1, False), (2, False), (1, True)):
        with exact_rows(alike):
            linears(torch.ones(tokens, 256).bfloat16(), [matrix])
    assert calls == [0, 2, 1]
