"""Experts on FP8 tensor cores: how inputs are arranged, exactly; sums against the reference; and when they are used."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4cli.engine.config.capacity import divides_from
from dsv4cli.kernels.card import BLACKWELL, CARDS, HOPPER, described
from dsv4cli.kernels.experts import ExpertWeights, mixture, ref, routed_experts
from dsv4cli.kernels.rows import exact_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

pytest.importorskip("triton")  # what is tested here is Triton's only

from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.experts.kernel import fp8_hopper
from tests.kernels.test_experts_many_tokens import BF16, FP32, bf16, fp4, fp8, routed, stacked
from tests.support.slow import slow_rows

# fp32 sums of 32 products each in a tensor core's short accumulator: 2.3e-5 of a product's norm, measured on an H200.
# Between the products values are rounded to steps of up to 1/8, which such an error makes some of them miss: the
# square root of 2.3e-5 / 16, and some room for few values
CLOSE = 3e-3


def shared(hidden: int, inner: int) -> ExpertWeights:
    """The shared expert, with FP8 weights."""
    stacks = (fp8(1, *shape) for shape in ((inner, hidden), (hidden, inner), (inner, hidden)))
    return ExpertWeights(*(StoredMatrix(one.weight.flatten(0, 1), one.scale.flatten(0, 1)) for one in stacks))


def bytes_of(codes: torch.Tensor, fp4_order: bool) -> torch.Tensor:
    """The bytes of 128 columns in the order in which products take them."""
    if not fp4_order:
        return codes
    blocks = codes.unflatten(-1, (4, 32))
    return torch.cat((blocks[..., ::2], blocks[..., 1::2]), -1).flatten(-2)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "with_shared"),
    [
        (2, 6, 256, True),
        (19, 2, 3, True),
        (30, 2, 8, True),
        (9, 3, 5, False),
        (64, 2, 5, True),
        (70, 2, 5, False),
        (66, 3, 12, False),
        (90, 3, 20, False),
        # chunks as full as narrow ones can be, and an expert with full chunks and a narrow one
        (8, 2, 2, True),
        (40, 1, 1, True),
        (72, 1, 1, False),
    ],
)
def test_inputs_by_chunk(tokens, chosen, count, with_shared):
    hidden = 1024
    x = torch.randn(tokens, hidden + 64).bfloat16()[:, :hidden]
    x[0] *= 2.0**-100
    x[1, 300] = -0.0
    experts, routing = routed(tokens, count, chosen)
    rows = torch.randperm(2 * count)[:count]
    weights = replace(stacked(fp4, 2 * count, 32, 512), rows=rows)
    prepared = fp8_hopper._prepared if tokens <= fp8_hopper.FEW else fp8_hopper._sorted
    experts = experts.contiguous()
    work = prepared(x, weights, experts, routing, with_shared)
    own, flat = -(-tokens // work.tokens) if with_shared else 0, experts.flatten()
    codes, scales = block_scale.fp8_codes(x.contiguous(), 128)
    codes, scales = codes.view(torch.uint8).unflatten(-1, (-1, 128)), scales.float()

    def check(chunk: int, size: int, slot: int, token: int, fp4_order: bool) -> None:
        width = work.tokens if size > work.narrow else work.narrow
        held = work.inputs[chunk].view(torch.uint8)[: width * hidden].view(-1, 4, width, 32)
        assert torch.equal(held[:, :, slot].flatten(-2), bytes_of(codes[token], fp4_order))
        assert torch.equal(work.scales[chunk].view(-1, work.tokens)[:, slot], scales[token])

    order = flat.argsort(stable=True)
    assert torch.equal(work.place[order].long(), torch.arange(len(flat)))
    words, begin = work.words[: int(work.count)].tolist(), 0
    for chunk, word in enumerate(words):
        row, first, size = word >> 32, (word >> 8) & 0xFFFFFF, word & 255
        pairs = order[first : first + size]
        assert first == begin
        assert 0 < size <= work.tokens
        assert set(flat[pairs].tolist()) == {rows.tolist().index(row)}
        assert torch.equal(work.factors[own + chunk, :size], routing.flatten()[pairs])
        for slot, pair in enumerate(pairs.tolist()):
            check(own + chunk, size, slot, pair // chosen, True)
        begin += size
    assert begin == len(flat)
    # an expert's chunks are full but for the last
    assert len(words) == sum(-(-int(n) // work.tokens) for n in torch.bincount(flat))
    for token in range(tokens if with_shared else 0):
        size = min(tokens - token // work.tokens * work.tokens, work.tokens)
        check(token // work.tokens, size, token % work.tokens, token, False)
    assert bool((work.factors[:own].flatten()[: tokens if with_shared else 0] == 1).all())
    assert not work.counters[: own + len(words)].any()
    assert not work.turns.any()


@pytest.mark.parametrize(
    ("tokens", "count", "buffers", "programs"),
    # chunks of up to 8, 8 or 16, and 16 or 32 pairs, the last also with the memory for inputs of 4,096 columns;
    # more programs than units, and batches of several units
    [
        (5, 3, None, 132),
        (6, 4, None, 3),
        (34, 6, None, 4),
        (24, 3, (2, 1), 4),
        *slow_rows((20, 5, (3, 1), 132), (24, 3, None, 4), (35, 18, None, 5), (40, 4, None, 132)),
    ],
)
def test_products_in_an_interpreter(tokens, count, buffers, programs, triton_backend, monkeypatch):
    """The kernel's arithmetic and its barriers; layouts are the compiler's, and short sums the GPU's."""
    if triton_backend != "interpreter":
        pytest.skip("this interpreter runs on a CPU")
    from dsv4cli.kernels.experts.kernel import fp8_wgmma
    from tests.support.gluon_interpreter import Descriptor, run

    class Products:
        def __getitem__(self, grid):
            def launch(*arguments, OVERLAP, num_warps):
                names, early = dict(zip(products.arg_names, arguments, strict=False)), set()
                run(products, grid, *arguments, True, early=early)
                # the previous launch writes these, and each thread that reads them has waited for it
                written = {names[name].matrix.data_ptr() for name in ("inputs", "input_scales")}
                assert not written & {address for address, _ in early}

            return launch

    products = fp8_wgmma.products
    monkeypatch.setattr(fp8_wgmma, "products", Products())
    monkeypatch.setattr("dsv4cli.kernels.gluon_launch.gluon_described", Descriptor)
    monkeypatch.setattr(fp8_hopper, "multiprocessors", lambda _: programs)
    if buffers:
        monkeypatch.setattr(fp8_hopper, "buffers", lambda *_: buffers)
    x, weights, own = torch.randn(tokens, 1024).bfloat16(), stacked(fp4, count, 1024, 512), shared(1024, 512)
    experts, routing = routed(tokens, count, 2)
    experts = experts.contiguous()
    for with_shared, expected in (
        (None, ref.routed_experts(x, weights, experts, routing, 7.0, True)),
        (own, ref.mixture(x, weights, own, experts, routing, 7.0, True, FP32)),
    ):
        y = fp8_hopper.mixture(x, weights, with_shared, experts, routing, 7.0, FP32)
        assert (y - expected).norm() <= 2**-11 * expected.norm()


@pytest.mark.parametrize(
    ("total", "own", "programs"),
    [(0, 0, 4), (5, 0, 4), (3, 3, 4), (7, 4, 8), (40, 40, 4), (40, 36, 4), (5000, 64, 132)],
)
def test_units_of_the_shared_expert_follow_the_first_batches(total, own, programs):
    from dsv4cli.kernels.experts.kernel.fp8_units import batch, unit_of
    from tests.support.gluon_interpreter import called

    batches = [range(*map(int, called(batch, number, total, programs))) for number in range(programs + total)]
    assert [turn for batch in batches for turn in batch] == list(range(total))
    # three quarters of all units, in equal parts
    each = max(total * 3 // 4 // programs, 1)
    assert {len(batch) for batch in batches[:programs]} <= ({each} if total >= programs else {0, 1})
    units = [int(called(unit_of, turn, total, own, programs)) for turn in range(total)]
    assert sorted(units) == list(range(total))
    early = min(each * programs, total - own)
    assert units[early : early + own] == list(range(own))


def test_chunks_of_units():
    from dsv4cli.kernels.experts.kernel.fp8_units import chunk_of
    from tests.support.gluon_interpreter import Pointers, called

    # expert's row, position, size; the pairs that `suits` allows take 14 bits
    routed_chunks = [(383, 0, 1), (0, 1, 32), (70_000, 9215, 17)]
    words = torch.tensor([row << 32 | position << 8 | size for row, position, size in routed_chunks])
    chunks = [called(chunk_of, (Pointers(words, 0), 9232, 35), number, 16) for number in range(6)]
    own = [(True, 0, 9232, 16), (True, 0, 9248, 16), (True, 0, 9264, 3)]
    assert chunks == [*own, *((False, *one) for one in routed_chunks)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "hidden", "inner"),
    [(2, 6, 16, 4096, 2048), (5, 3, 4, 1024, 512), (8, 6, 8, 7168, 1024), (16, 6, 64, 4096, 2048),
     (64, 6, 70, 1024, 1536), (70, 2, 12, 4096, 512), (200, 6, 90, 1024, 512), (33, 1, 1, 512, 512)],
)  # fmt: skip
def test_products(tokens, chosen, count, hidden, inner, triton_backend, monkeypatch):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        x, weights = torch.randn(tokens, hidden).bfloat16(), stacked(fp4, 2 * count, hidden, inner)
        weights, own = replace(weights, rows=torch.randperm(2 * count)[:count]), shared(hidden, inner)
        given = routed(tokens, count, chosen)
    monkeypatch.setattr(fp8_hopper, "_is_few", lambda *_: True)
    assert fp8_hopper.suits(x, weights, tokens * chosen, True)
    expected = ref.routed_experts(x, weights, *given, 7.0, True)
    y = routed_experts(x, weights, *given, 7.0, True)
    assert (y - expected).norm() <= CLOSE * expected.norm()
    assert all(torch.equal(routed_experts(x, weights, *given, 7.0, True), y) for _ in range(20))
    both, expected = (one(x, weights, own, *given, 7.0, True, FP32) for one in (mixture, ref.mixture))
    assert (both - expected).norm() <= CLOSE * expected.norm()
    # a token's bits are its own, whichever chunk it is in and however wide that is
    few = slice(tokens // 2 - 1, tokens // 2 + 1)
    assert torch.equal(routed_experts(x[few], weights, *(one[few] for one in given), 7.0, True), y[few])
    # products in short sums are as close as this to those in fp32
    monkeypatch.setattr(fp8_hopper, "suits", lambda *_: False)
    exact = routed_experts(x, weights, *given, 7.0, True)
    assert (y - exact).norm() <= CLOSE * exact.norm()


@pytest.mark.gpu
def test_what_is_not_a_number_stays_so(triton_backend):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        x, weights = torch.randn(12, 1024).bfloat16(), stacked(fp4, 32, 1024, 512)
        experts, routing = routed(12, 32, 4)
    x[3, 77] = torch.nan
    y = routed_experts(x, weights, experts, routing, 7.0, True)
    wrong = y.isnan()
    assert wrong[3].all()
    assert not wrong[[0, 1, 2, *range(4, 12)]].any()


@pytest.mark.parametrize(
    ("card", "stored", "dtype", "hidden", "inner", "suits"),
    [
        ("h200", fp4, BF16, 4096, 2048, True),
        ("h100", fp4, BF16, 7168, 512, True),
        ("h200", fp4, BF16, 4096, 7168, True),
        ("h200", fp4, BF16, 4096, 256, False),
        ("h200", fp4, BF16, 4224, 512, False),
        ("h200", fp4, BF16, 20480, 512, False),
        ("h200", fp4, FP32, 4096, 2048, False),
        ("h200", bf16, BF16, 4096, 2048, False),
        ("a100", fp4, BF16, 4096, 2048, False),
        ("l40s", fp4, BF16, 4096, 2048, False),
        ("b200", fp4, BF16, 4096, 2048, False),
        ("rtx5090", fp4, BF16, 4096, 2048, False),
    ],
)
def test_which_experts(card, stored, dtype, hidden, inner, suits):
    with FakeTensorMode(), described(CARDS[card]), torch.device("cuda"):
        x, weights = torch.empty(4, hidden, dtype=dtype), stacked(stored, 8, hidden, inner)
        assert fp8_hopper.suits(x, weights, 24, True) == suits
        # inputs that are not rounded to e4m3, one token, exact rows, and too many pairs per expert
        assert not fp8_hopper.suits(x, weights, 24, False)
        assert not fp8_hopper.suits(torch.empty(1, hidden, dtype=dtype), weights, 6, True)
        with exact_rows(True):
            assert not fp8_hopper.suits(x, weights, 24, True)
        # 24 pairs per expert, or 15 if chunks of 32 do not fit in shared memory
        most = 127 if max(hidden, inner) > 4096 else 192
        assert fp8_hopper.suits(x, weights, most, True) == suits
        assert not fp8_hopper.suits(x, weights, most + 1, True)


def test_inputs_that_are_read_early_are_not_gathered_just_before():
    # `prepare` reads x before the previous launch has ended: a router, not the all-gather of rows that ranks share
    assert all(divides_from(ranks) > fp8_hopper.FEW for ranks in range(1, 9))


def test_which_shared_expert():
    with FakeTensorMode(), described(CARDS["h200"]), torch.device("cuda"):
        x, weights, own = torch.empty(64, 1024), stacked(fp4, 4, 1024, 512), shared(1024, 512)
        assert fp8_hopper.suits_shared(x, weights, own)
        # more tokens, another width, no codes, and scales in fp32
        assert not fp8_hopper.suits_shared(torch.empty(65, 1024), weights, own)
        assert not fp8_hopper.suits_shared(x, weights, shared(1024, 1024))
        assert not fp8_hopper.suits_shared(x, weights, ExpertWeights(*(bf16(512, 1024) for _ in range(3))))
        wide = [StoredMatrix(one.weight, torch.ones(one.scale.shape)) for one in own.matrices]
        assert not fp8_hopper.suits_shared(x, weights, ExpertWeights(*wide))


@pytest.mark.parametrize(
    ("width", "tokens", "expected"),
    [
        (4096, 8, (4, 2)),
        (2048, 8, (4, 2)),
        (5120, 8, (4, 2)),
        (5632, 8, (4, 1)),  # but for the scales, the inputs of two chunks would fit
        (4096, 16, (4, 1)),
        (7168, 8, (4, 1)),
        (7168, 16, (3, 1)),
        (4096, 32, (2, 1)),
        (2048, 32, (4, 1)),
    ],
)
def test_buffers_fill_shared_memory(width, tokens, expected):
    assert fp8_hopper.buffers(width, tokens) == expected


def test_each_product_has_the_buffers_for_its_width(monkeypatch):
    from dsv4cli.kernels.experts.kernel import fp8_wgmma

    launches = []
    names = fp8_wgmma.products.arg_names

    class Products:
        def __getitem__(self, grid):
            return lambda *arguments, **_: launches.append(dict(zip(names, arguments, strict=False)))

    monkeypatch.setattr(fp8_wgmma, "products", Products())
    monkeypatch.setattr("dsv4cli.kernels.gluon_launch.gluon_described", lambda *_: None)
    with FakeTensorMode():
        weights = stacked(fp4, 2, 4096, 2048)
        work = fp8_hopper._work(torch.empty(8, 4096), weights, 48, False)
        fp8_hopper._products(4096, work, weights, None, 7.0)
    assert [(one["K"], one["SLOTS"], one["BUFFERS"]) for one in launches] == [(4096, 2, 1), (2048, 4, 1)]


def test_wide_chunks_for_many_pairs():
    assert fp8_hopper.chunk(1024, 256, 4096) == (8, 8)
    assert fp8_hopper.chunk(1025, 256, 4096) == (8, 16)
    assert fp8_hopper.chunk(3328, 256, 4096) == (8, 16)
    assert fp8_hopper.chunk(3329, 256, 4096) == (16, 32)
    # chunks of 32 pairs do not fit in shared memory, whichever product has that many columns
    assert fp8_hopper.chunk(3329, 256, 7168) == (8, 16)
    for hidden, inner in ((7168, 512), (512, 7168)):
        with FakeTensorMode():
            work = fp8_hopper._work(torch.empty(8, hidden), stacked(fp4, 2, hidden, inner), 30, False)
        assert (work.narrow, work.tokens) == (8, 16)
