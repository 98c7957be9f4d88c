"""Inside `exact_rows` each row of a Triton kernel gets the bits that it gets alone, in a step of any number of rows."""

from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4cli.kernels import attention, experts, gemm, hyper_connections, indexer, norm, routing
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.indexer import IndexEntries, IndexKeys, IndexQueries, WindowList
from dsv4cli.kernels.rows import ROWS_EXACT, exact_rows, planned_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support.slow import slow

# the first row of a step and how many there are: on a GPU, and interpreted, which takes long
STEPS = [*((0, count) for count in (1, 2, 3, 5, ROWS_EXACT)), *((row, 1) for row in range(1, ROWS_EXACT))]
FEW_STEPS = [(0, 3), (0, 1), (ROWS_EXACT - 1, 1)]
Rows = tuple[torch.Tensor, ...]
# what is computed of rows, and these
Case = tuple[Callable[..., torch.Tensor | Rows], Rows]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _exact(triton_backend) -> Iterator[None]:
    with exact_rows(True):
        yield


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def fp8(*shape: int) -> StoredMatrix:
    scale = torch.randint(118, 124, (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), dtype=torch.uint8)
    return StoredMatrix(torch.randn(*shape).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def fp4(*shape: int) -> StoredMatrix:
    *stacked, rows, columns = shape
    codes = torch.randint(-128, 128, (*stacked, rows, columns // 2), dtype=torch.int8)
    scale = torch.randint(118, 124, (*stacked, rows, columns // 32), dtype=torch.uint8)
    return StoredMatrix(codes, scale.view(torch.float8_e8m0fnu))


def linears(large: bool) -> Case:
    width, rows = (4096, 1024) if large else (256, 128)
    coded, plain = [fp8(rows, width), fp8(128, width)], [StoredMatrix(normal(64, width))]
    wide = [StoredMatrix(normal(rows, width))]
    return lambda x: sum(map(tuple, gemm.linears(x, coded, plain, wide)), ()), (normal(ROWS_EXACT, width),)


def normed_linears(large: bool) -> Case:
    width, rows = (1024, 32768) if large else (256, 128)
    factor, coded = normal(width), [fp8(rows, width), fp8(128, width)]
    return lambda x: tuple(gemm.normed_linears(x, factor, 1e-6, coded)[0]), (normal(ROWS_EXACT, width),)


def grouped_linear(large: bool) -> Case:
    groups, width, rows = (8, 4096, 8192) if large else (2, 256, 256)
    coded = fp8(rows, width)
    return lambda x: gemm.grouped_linear(x, coded), (normal(ROWS_EXACT, groups, width),)


def rounded_linear(large: bool) -> Case:
    width, rows = (8192, 4096) if large else (384, 128)
    coded = fp8(rows, width)
    return lambda x: gemm.rounded_linear(x, coded), (normal(ROWS_EXACT, width),)


def head(large: bool) -> Case:
    width, rows = (4096, 16_160) if large else (128, 67)
    weight = normal(rows, width)
    return lambda x: gemm.linear_fp32(x, StoredMatrix(weight)), (normal(ROWS_EXACT, width),)


def connection(large: bool, rows: int = 24) -> Connection:
    width = 4 * (4096 if large else 64)
    fn, base = normal(rows, width, dtype=torch.float32) / width**0.5, normal(rows, dtype=torch.float32)
    iterations = 0 if rows == 4 else 20 if large else 2  # interpreted, each takes long
    return Connection(fn, normal(1 if rows == 4 else 3, dtype=torch.float32), base, iterations, 1e-6, 1e-6)


def connect_pre(large: bool) -> Case:
    one = connection(large)
    return lambda s: hyper_connections.connect_pre(s, one), (normal(ROWS_EXACT, 4, 4096 if large else 64),)


def connect_post_pre(large: bool) -> Case:
    width, one = 4096 if large else 64, connection(large)
    factor, shares = normal(width), [torch.rand(ROWS_EXACT, *([4] * n)) for n in (1, 2)]
    given = normal(ROWS_EXACT, width), normal(ROWS_EXACT, 4, width), *shares
    return lambda *rows: hyper_connections.connect_post_pre(*rows, one, factor), given


def connect_head(large: bool) -> Case:
    one = connection(large, 4)
    return lambda s: hyper_connections.connect_head(s, one), (normal(ROWS_EXACT, 4, 4096 if large else 64),)


def route(large: bool) -> Case:
    width, count = (4096, 256) if large else (4096, 8)
    weight, bias = normal(count, width) / width**0.5, normal(count, dtype=torch.float32)
    return lambda x: routing.route(x, weight, bias, 6, 1.5), (normal(ROWS_EXACT, width),)


def mixture(large: bool) -> Case:
    """The halves of the shared expert cancel each other: of rows without any other, rounding alone is left."""
    width, inner, count, k = (4096, 2048, 16, 6) if large else (128, 128, 3, 2)
    shared_inner = 2048 if large else 256
    first, third, second = fp4(count, inner, width), fp4(count, inner, width), fp4(count, width, inner)
    own = fp8(shared_inner, width), fp8(shared_inner, width), fp8(width, shared_inner)
    half = shared_inner // 2
    for codes, scale, _ in own[:2]:
        codes[half:], scale[-(-half // 128) :] = codes[:half].clone(), scale[: half // 128].clone()
    codes, scale, _ = own[2]
    codes.view(torch.uint8)[:, half:] = codes.view(torch.uint8)[:, :half] ^ 128
    scale[:, half // 128 :] = scale[:, : half // 128].clone()
    every = ExpertWeights(first, second, third)
    shared = ExpertWeights(own[0], own[2], own[1])
    chosen = torch.stack([torch.randperm(count)[:k] for _ in range(ROWS_EXACT)])
    chosen[:, 0] = 0  # of one expert all rows, unless a row has it already
    chosen[:, 1:] = torch.stack([1 + torch.randperm(count - 1)[: k - 1] for _ in range(ROWS_EXACT)])
    weights = torch.rand(ROWS_EXACT, k)
    weights[:2] = 0
    given = normal(ROWS_EXACT, width), chosen, weights
    return lambda x, c, w: experts.mixture(x, every, shared, c, w, 10.0, True, BF16), given


def attend(large: bool, length: int) -> Case:
    heads, width, rows = (64, 512, 4096) if large else (16, 64, 64)
    window, entries, sink = normal(rows, width), normal(rows, width), normal(heads, dtype=torch.float32)
    index = torch.randint(0, 2 * rows, (ROWS_EXACT, length))
    index[:, -3:] = -1
    turns = torch.polar(torch.ones(ROWS_EXACT, width // 16), torch.rand(ROWS_EXACT, width // 16))
    given = normal(ROWS_EXACT, heads, width), index, turns
    return lambda q, i, r: attention.sparse_attention(q, window, entries, i, sink, width**-0.5, r), given


def best(large: bool, count: int, one: bool) -> Case:
    """one: whether all rows are of one sequence."""
    heads, width, k = (64, 128, 512) if large else (4, 32, 8)
    sequences = 1 if one else ROWS_EXACT
    codes, scale, _ = fp4(count, width)
    table = torch.stack([torch.randperm(count) for _ in range(sequences)])
    number = torch.arange(ROWS_EXACT)
    visible = count - ROWS_EXACT + 1 + number if one else torch.linspace(1, count, ROWS_EXACT).long()
    window = torch.arange(ROWS_EXACT * 8).view(ROWS_EXACT, 8)
    given = (
        normal(ROWS_EXACT, heads, width), normal(ROWS_EXACT, heads), number * (not one), visible, window,
        torch.full((ROWS_EXACT,), 8),
    )  # fmt: skip

    def call(q, weights, sequence, visible, window, columns):
        entries = IndexEntries(table, sequence, visible)
        listed = WindowList(window, columns, 64)
        return indexer.best_entries(IndexQueries(q, weights, 0.1), IndexKeys(codes, scale), k, entries, listed)

    return call, given


def rms_norm(large: bool) -> Case:
    width = 4096 if large else 96
    factor = normal(width)
    return lambda x: norm.rms_norm(x, factor, 1e-6), (normal(ROWS_EXACT, width),)


FAMILIES: dict[str, Callable[[bool], Case]] = {
    one.__name__: one
    for one in (
        linears, normed_linears, grouped_linear, rounded_linear, head, connect_pre, connect_post_pre, connect_head,
        route, mixture, rms_norm,
    )
}  # fmt: skip
FAMILIES |= {f"attention {length}": lambda large, length=length: attend(large, length) for length in (40, 140, 270)}
FAMILIES |= {
    f"indexer {count}": lambda large, count=count, one=one: best(large, count, one)
    for count, one in ((40, True), (41, False))
}
# more than a second in the interpreter
SLOW = (
    "linears", "normed_linears", "grouped_linear", "mixture", "attention 40", "attention 140", "attention 270",
    "connect_post_pre", "indexer 40", "indexer 41",
)  # fmt: skip
# too large for the interpreter: lists in parts, more than are ranked, prefiltered, more than these
LARGE = {f"attention {length}": lambda large, length=length: attend(large, length) for length in (640, 1152, 8320)}
LARGE |= {
    f"indexer {count}": lambda large, count=count, one=one: best(large, count, one)
    for count, one in ((1000, False), (1500, True), (10_000, True), (40_000, False), (70_000, True))
}


def assert_alike(case: Case, steps: list[tuple[int, int]]) -> None:
    """In each step the same bits as in one of all rows."""
    call, given = case
    every = as_tuple(call(*given))
    for first, count in steps:
        part = as_tuple(call(*(one[first : first + count] for one in given)))
        for ours, whole in zip(part, every, strict=True):
            assert torch.equal(ours, whole[first : first + count]), f"{count} rows from {first}"


def as_tuple(result: torch.Tensor | Rows) -> Rows:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES]
)
def test_a_row_gets_the_bits_that_it_gets_alone(name):
    assert_alike(FAMILIES[name](False), FEW_STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES | LARGE)
def test_at_the_sizes_of_flash(name, triton_backend):
    if triton_backend == "interpreter":
        pytest.skip("the GPU's own sizes")
    with torch.device("cuda"):
        assert_alike((FAMILIES | LARGE)[name](True), STEPS)


@pytest.mark.parametrize("length", [128, *slow(160), 640, *slow(1152, 2176), 8320])
@pytest.mark.parametrize("heads", [16, 64])
def test_lists_are_attended_over_in_one_order(length, heads):
    from dsv4cli.kernels.attention.kernel import plan

    plans = {plan(torch.empty(count, heads, 512, dtype=BF16), length) for count in range(1, ROWS_EXACT + 1)}
    assert len(plans) == 1


@pytest.mark.parametrize(("rows", "columns"), [(32_768, 1024), (8192, 4096), (4096, 8192)])
def test_weights_are_multiplied_in_one_order(rows, columns):
    from dsv4cli.kernels.gemm.kernel.dequant import Product
    from dsv4cli.kernels.gemm.kernel.gemv import gemv_tiles

    matrix = StoredMatrix(torch.empty(rows, columns, dtype=torch.uint8, device="meta"))
    product = Product(matrix, False, BF16)
    for products in ([product], [product] * 2):
        tiles = {gemv_tiles(torch.empty(n, 1, columns), products)._replace(tokens=0) for n in range(1, ROWS_EXACT + 1)}
        assert len(tiles) == 1


@pytest.mark.parametrize("inner", [512, 2048])
def test_experts_are_added_up_in_one_order(inner):
    from dsv4cli.kernels.experts.kernel.few_tokens import few_tokens_tiles

    # of w1 and w3; each token's w2 is multiplied as if it were alone
    assert len({few_tokens_tiles(count, inner).up.warps for count in range(1, ROWS_EXACT + 1)}) == 1


@pytest.mark.parametrize("length", [1000, 10_000, 70_000, 1_000_000])
def test_entries_are_listed_in_one_order(length):
    from dsv4cli.kernels.indexer.kernel.topk import _parts, takes_prefilter

    counts = range(1, ROWS_EXACT + 1)
    assert len({(takes_prefilter(count, length, 512), _parts(count)[1]) for count in counts}) == 1


def test_only_few_rows_are_planned_alike():
    assert [planned_rows(count) for count in (0, 1, 5, 8, 9)] == [0, 8, 8, 8, 9]
    assert [planned_rows(count, 2) for count in (1, 8, 9)] == [2, 2, 9]
    with exact_rows(False):
        assert [planned_rows(count, 2) for count in (0, 1, 8)] == [0, 1, 8]
