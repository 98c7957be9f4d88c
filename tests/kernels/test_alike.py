"""On a CPU each row of a plain kernel gets the bits that it gets alone, whatever stands in the others."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch

from dsv4cli.kernels import alike
from dsv4cli.kernels.attention import ref as attention
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.compressor import ref as compressor
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts import ref as experts
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.hyper_connections import ref as hyper_connections
from dsv4cli.kernels.indexer import IndexEntries, IndexKeys, IndexQueries, WindowList
from dsv4cli.kernels.indexer import ref as indexer
from dsv4cli.kernels.norm import ref as norm
from dsv4cli.kernels.rope import ref as rope
from dsv4cli.kernels.routing import ref as routing
from dsv4cli.kernels.rows import ROWS_ALIKE
from dsv4cli.kernels.step_metadata.ref import rotation
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support.slow import slow, slow_except

# one more than a product's rows, all lengths of a step that verifies drafts, the most
COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 17, 31, ROWS_ALIKE)
FEW = (5, 17, ROWS_ALIKE)
WIDTH, HEADS, EXPERTS = 128, 4, 8
Rows = tuple[torch.Tensor, ...]
Case = tuple[Callable[..., torch.Tensor | Rows], Rows]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def stored(*shape: int) -> StoredMatrix:
    """A matrix, or several, in FP8."""
    scale = torch.full((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), 126, dtype=torch.uint8)
    return StoredMatrix(normal(*shape).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def gemms() -> dict[str, Case]:
    x, weight, coded = normal(ROWS_ALIKE, WIDTH), normal(100, WIDTH), stored(3 * WIDTH, WIDTH)
    plain = StoredMatrix(weight)
    bf16 = x.bfloat16()
    groups = normal(ROWS_ALIKE, 3, WIDTH)
    return {
        "linear": (lambda x: gemm.linear(x, plain), (x,)),
        "linear of one column": (lambda x: gemm.linear_fp32(x, StoredMatrix(weight[:1])), (x,)),
        "linear of few columns": (lambda x: gemm.linear_fp32(x, StoredMatrix(weight[:7])), (x,)),
        "linear_fp32": (lambda x: gemm.linear_fp32(x, StoredMatrix(weight)), (bf16,)),
        "rounded_linear": (lambda x: gemm.rounded_linear(x, coded), (bf16,)),
        "grouped_linear": (lambda x: gemm.grouped_linear(x, coded), (groups,)),
        "linears": (
            lambda x: list(chain(*gemm.linears(x, [coded], [plain], [StoredMatrix(weight)]))),
            (bf16,),
        ),
        "normed_linears": (
            lambda x: list(chain(*gemm.normed_linears(x, weight[0], 1e-6, [coded], [plain]))),
            (bf16,),
        ),
    }


def mixtures() -> dict[str, Case]:
    routed = [stored(EXPERTS, WIDTH, WIDTH) for _ in range(3)]
    shared = [stored(WIDTH, WIDTH) for _ in range(3)]
    # all rows may choose one expert, and another one each: never one twice, for more than ROWS_ALIKE rows of it
    chosen, weights = torch.randint(1, EXPERTS, (ROWS_ALIKE, 2)), torch.rand(ROWS_ALIKE, 2)
    chosen[:, 0] = 0
    chosen = (chosen + 3) % EXPERTS
    x, every, one = normal(ROWS_ALIKE, WIDTH), ExpertWeights(*routed), ExpertWeights(*shared)
    return {
        "routed_experts": (lambda x, c, w: experts.routed_experts(x, every, c, w, 1.0, False), (x, chosen, weights)),
        "shared_expert": (lambda x: experts.shared_expert(x, one, 0.0, True), (x.bfloat16(),)),
        "mixture": (
            lambda x, c, w: experts.mixture(x, every, one, c, w, 1.0, True, torch.bfloat16),
            (x.bfloat16(), chosen, weights),
        ),
    }


def routers() -> dict[str, Case]:
    x, bias = normal(ROWS_ALIKE, WIDTH), torch.zeros(EXPERTS)
    weight, table = normal(EXPERTS, WIDTH), torch.randint(0, EXPERTS, (9, 2))
    ids = torch.randint(0, 9, (ROWS_ALIKE,))
    return {
        "route": (lambda x: routing.route(x, weight, bias, 2, 1.5), (x,)),
        "route_by_id": (lambda x, ids: routing.route_by_id(x, weight, table, ids, 1.5), (x, ids)),
        "scores": (routing.scores, (normal(ROWS_ALIKE, 100),)),
    }


def connections() -> dict[str, Case]:
    streams, x = normal(ROWS_ALIKE, 4, WIDTH), normal(ROWS_ALIKE, WIDTH)
    connection = Connection(normal(24, 4 * WIDTH), normal(3), normal(24), 20, 1e-6, 1e-6)
    head = Connection(normal(4, 4 * WIDTH), normal(1), normal(4), 0, 1e-6, 1e-6)
    rows = streams, torch.rand(ROWS_ALIKE, 4), torch.rand(ROWS_ALIKE, 4, 4)
    weight = normal(WIDTH)
    return {
        "connect_pre": (lambda s: hyper_connections.connect_pre(s, connection), (streams,)),
        "connect_post": (hyper_connections.connect_post, (x, *rows)),
        "connect_post_pre": (
            lambda *rows: hyper_connections.connect_post_pre(*rows, connection, weight),
            (x, *rows),
        ),
        "connect_head": (lambda s: hyper_connections.connect_head(s, head), (streams.bfloat16(),)),
    }


def keys_and_entries() -> dict[str, Case]:
    x, q, weight = normal(ROWS_ALIKE, WIDTH), normal(ROWS_ALIKE, HEADS, WIDTH), normal(WIDTH)
    positions = torch.arange(500, 500 + ROWS_ALIKE)
    frequencies = 1 / 160_000 ** (torch.arange(0, 64, 2) / 64)
    turn = rotation(positions, frequencies)
    groups = [(normal(ROWS_ALIKE, ratio, WIDTH), normal(ROWS_ALIKE, ratio, WIDTH)) for ratio in (8, 128)]
    return {
        "rms_norm": (lambda x: norm.rms_norm(x, weight, 1e-6), (x,)),
        "head_norm": (lambda q: norm.head_norm(q, 1e-6), (q.bfloat16(),)),
        "rotation": (lambda p: torch.view_as_real(rotation(p, frequencies)), (positions,)),
        "rotate keys": (rope.rotate, (x, turn)),
        "rotate queries": (rope.rotate, (q, turn)),
        "hadamard": (block_scale.hadamard, (q,)),
        "pool of ratio 4": (compressor.pool, groups[0]),
        "pool of ratio 128": (compressor.pool, groups[1]),
    }


def lists() -> dict[str, Case]:
    window, entries = normal(300, WIDTH), normal(50, WIDTH)
    index = torch.randint(-1, 350, (ROWS_ALIKE, 129))
    q, sink = normal(ROWS_ALIKE, HEADS, WIDTH), normal(HEADS)
    weights, keys = normal(ROWS_ALIKE, HEADS), IndexKeys(normal(200, WIDTH), None)
    visible, sequence = torch.randint(0, 90, (ROWS_ALIKE,)), torch.arange(ROWS_ALIKE) // 9
    table = torch.randint(0, 200, (8, 90))
    columns = torch.full((ROWS_ALIKE,), 129)

    def best(q: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, sequence: torch.Tensor, *window: Rows):
        listed = IndexEntries(table, sequence, visible)
        return indexer.best_entries(IndexQueries(q, weights, 0.1), keys, 32, listed, WindowList(*window, 300))

    return {
        "attended": (lambda q, i: attention.attended(q, window, entries, i, sink, 0.1), (q, index)),
        "best_entries": (best, (q, weights, visible, sequence, index, columns)),
        "index_scores": (
            lambda q, w, v, s: indexer.index_scores(IndexQueries(q, w, 0.1), keys, IndexEntries(table, s, v)),
            (q.bfloat16(), weights.bfloat16(), visible, sequence),
        ),
    }


# on several threads: products that another one makes too, or that are too small for two threads
ALONE = {"linear of one column", "linear of few columns", "linear_fp32", "rounded_linear", "linears"}
FAMILIES = {made.__name__: made for made in (gemms, mixtures, routers, connections, keys_and_entries, lists)}


def results(function: Callable[..., torch.Tensor | Rows], rows: Rows) -> list[torch.Tensor]:
    given = function(*rows)
    return [given] if isinstance(given, torch.Tensor) else list(given)


@pytest.mark.parametrize(
    ("family", "threads"),
    [*((family, 1) for family in FAMILIES), *slow_except([("gemms", 2)], [(family, 2) for family in FAMILIES])],
    indirect=["threads"],
)
def test_a_row_gets_the_bits_that_it_gets_alone(family, threads):
    for name, (function, rows) in FAMILIES[family]().items():
        if threads > 1 and name in ALONE:
            continue
        torch.set_num_threads(1)  # one row has no work for two, and two that wait for each other cost seconds
        single = [results(function, tuple(x[row : row + 1] for x in rows)) for row in range(ROWS_ALIKE)]
        alone = [torch.cat(parts) for parts in zip(*single, strict=True)]
        torch.set_num_threads(threads)
        for count in COUNTS if threads == 1 else FEW:
            together = results(function, tuple(x[:count] for x in rows))
            for ours, theirs in zip(together, alone, strict=True):
                assert torch.equal(ours, theirs[:count]), (name, count)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [*slow(2), 3, *slow(5, 9), ROWS_ALIKE])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 0.0])
def test_a_product_does_not_see_the_other_rows(count, value):
    x, weight = normal(count, WIDTH), normal(48, WIDTH)
    expected = alike.product(x, weight)
    for row in {0, 1, count // 2, count - 1}:
        other = torch.full_like(x, value)
        other[row] = x[row]
        assert torch.equal(alike.product(other, weight)[row], expected[row])


def test_no_rows_have_no_product():
    assert alike.product(normal(0, 3), normal(5, 3)).shape == (0, 5)


@pytest.mark.parametrize("width", [0, 1, 4, 31, 32, 33])
def test_each_gives_each_value_what_many_get(width):
    x = normal(3, width)
    expected = torch.sigmoid(x.flatten().repeat(64)).view(64, 3, width)[0]
    assert torch.equal(alike.each(torch.sigmoid, x), expected)
