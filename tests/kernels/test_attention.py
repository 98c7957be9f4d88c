"""Attention over listed rows against a softmax in fp64, its one inner rounding and its rotation back written out."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4cli.kernels.attention import ref, sparse_attention, sparse_mqa_sink
from dsv4cli.kernels.card import CARDS, described
from dsv4cli.kernels.dispatch import KernelUnsupported
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.support.slow import slow_rows

NEVER = float("-inf")
# bf16: probabilities and the result are rounded, 2 ** -9 of values below 4 each; fp32: sums of up to 131 rows
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 2e-6}


def slow_attention(q, rows, index, sink, scale) -> torch.Tensor:
    q, rows, sink = q.double(), rows.double(), sink.double()
    scores = torch.einsum("thd,tld->thl", q, rows[index.clamp_min(0)]) * scale
    scores = torch.cat((scores.masked_fill((index < 0)[:, None], NEVER), sink[:, None].expand(len(q), -1, 1)), -1)
    return torch.einsum("thl,tld->thd", scores.softmax(-1)[..., :-1], rows[index.clamp_min(0)])


def lists(tokens: int, length: int, rows: int) -> torch.Tensor:
    """Rows in any order, holes anywhere behind the first column."""
    index = torch.randint(0, rows, (tokens, length))
    index[:, 1:][torch.rand(tokens, length - 1) < 0.3] = -1
    return index


def attention(q, window, entries, index, sink, scale) -> torch.Tensor:
    """With angles of 0, which turn nothing."""
    return sparse_attention(q, window, entries, index, sink, scale, torch.ones(q.shape[0], 1, dtype=torch.complex64))


# tokens, heads, width, length of the lists, entries: one row, a block of 64, one more, a prime over two blocks; more
# heads than a program takes
SHAPES = [
    (0, 2, 8, 5, 40), (1, 1, 4, 1, 0), (2, 4, 16, 64, 1), (3, 2, 16, 65, 0), (2, 17, 8, 33, 9), (2, 3, 34, 131, 40),
    (1, 17, 32, 70, 40),
]  # fmt: skip
# the rows and heads of Flash and of Pro
REAL = [pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 64, 512, 65, 50), (1, 128, 512, 20, 3))]


@pytest.fixture(params=["spread", "parts", "whole"])
def cut(request, triton_backend, monkeypatch):
    """Lists spread over programs, in as many parts as there are programs for, however short they are, or in one."""
    if request.param != "spread":
        monkeypatch.setattr("dsv4cli.kernels.attention.kernel.two_pass_decode.MOST", 0)
        name = "PROGRAMS" if request.param == "whole" else "SHORT"
        monkeypatch.setattr(f"dsv4cli.kernels.attention.kernel.{name}", 1)
    return request.param


def check_against_softmax(shape, dtype):
    tokens, heads, width, length, pool = shape
    q, window, entries = (torch.randn(*size, width).to(dtype) for size in ((tokens, heads), (30,), (pool,)))
    index, sink = lists(tokens, length, 30 + pool), torch.randn(heads)
    o = attention(q, window, entries, index, sink, width**-0.5)
    assert (o.shape, o.dtype) == (q.shape, dtype)
    exact = slow_attention(q, torch.cat((window, entries)), index, sink, width**-0.5)
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES[:-2]),
        *((shape, torch.float32) for shape in (*SHAPES[:2], SHAPES[-1])),
        *slow_rows(*((shape, torch.bfloat16) for shape in SHAPES[-2:])),
        *slow_rows(*((shape, torch.float32) for shape in SHAPES[2:-1])),
    ],
    ids=str,
)
def test_softmax_over_listed_rows(shape, dtype):
    check_against_softmax(shape, dtype)


@pytest.mark.parametrize("shape", [*SHAPES[-2:], *REAL], ids=str)
def test_lists_in_parts_and_whole(shape, cut):
    tokens, heads, *others = shape
    # interpreted, more programs of many heads would take long
    check_against_softmax((tokens, min(heads, 17 if cut == "spread" else heads), *others), torch.bfloat16)


@pytest.mark.usefixtures("cut")
def test_fp32_in_parts_and_whole():
    check_against_softmax((1, 17, 32, 70, 40), torch.float32)


@pytest.mark.usefixtures("cut")
def test_long_lists_with_few_rows():
    # whole parts of the list name nothing; the only rows stand first, last, or in the middle
    q, rows, sink = torch.randn(4, 1, 16).bfloat16(), torch.randn(90, 16).bfloat16(), torch.randn(1)
    index = torch.full((4, 300), -1)
    index[torch.arange(4), torch.tensor([0, 299, 140, 299])] = torch.arange(4)
    index[3, 100:170] = torch.arange(70)
    o = attention(q, rows, rows[:0], index, sink, 0.25)
    exact = slow_attention(q, rows, index, sink, 0.25)
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("width", "pairs", "length"),
    [(34, 17, 7), (64, 8, 9), *slow_rows((16, 3, 20), (512, 32, 16))],
)
def test_the_rounded_result_is_rotated_back(width, pairs, length, dtype):
    q, rows, sink = torch.randn(2, 3, width).to(dtype), torch.randn(40, width).to(dtype), torch.randn(3)
    index, turns = lists(2, length, 40), torch.polar(torch.ones(2, pairs), torch.randn(2, pairs))
    inputs = (q, rows, rows[:0], index, sink, 0.2)
    o, still = sparse_attention(*inputs, turns), attention(*inputs)
    first = width - 2 * pairs
    assert torch.equal(o[..., :first], still[..., :first])
    tail = torch.view_as_complex(still[..., first:].double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(tail * turns[:, None].conj()).flatten(-2)
    # two products and a sum of fp32, each no larger than the pair
    error = 4 * FP32 * tail.abs().repeat_interleave(2, -1)
    assert_rounded_once(o[..., first:], exact, error)


@pytest.mark.usefixtures("backend")
def test_a_conjugate_may_be_a_flag_on_the_rotation():
    q, rows, sink = torch.randn(2, 1, 8).bfloat16(), torch.randn(40, 8).bfloat16(), torch.randn(1)
    inputs, turns = (q, rows, rows[:0], lists(2, 5, 40), sink, 0.2), torch.polar(torch.ones(2, 4), torch.randn(2, 4))
    conjugate = sparse_attention(*inputs, turns.conj())
    assert torch.equal(conjugate, sparse_attention(*inputs, turns.conj().resolve_conj()))
    assert not torch.equal(conjugate, sparse_attention(*inputs, turns))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.int64), (17, torch.int32)])
def test_lists_over_a_paged_pool(heads, dtype):
    q, kv, sink = torch.randn(3, heads, 32).bfloat16(), torch.randn(6, 8, 32).bfloat16(), torch.randn(heads)
    index = lists(3, 33, 48)
    index[1, :20], index[2] = -1, -1
    o = sparse_mqa_sink(q, kv, index.to(dtype), sink, 0.2)
    exact = slow_attention(q, kv.flatten(0, 1), index, sink, 0.2)
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=TOLERANCE[torch.bfloat16])
    assert not o[2].any(), "no row, no result"
    assert not sparse_mqa_sink(q[2:3], kv, index[2:3].to(dtype), sink + NEVER, 0.2).any()


@pytest.mark.usefixtures("backend")
def test_slices_of_wider_rows():
    q, pool, sink = torch.randn(3, 4, 48).bfloat16(), torch.randn(50, 48).bfloat16(), torch.randn(4)
    index = lists(3, 40, 50)
    parts = (q[..., 16:], pool[:30, 16:], pool[30:, 16:], index[:, 3:33], sink)
    whole = [part.contiguous() for part in parts]
    assert torch.equal(attention(*parts, 0.2), attention(*whole, 0.2))


@pytest.mark.usefixtures("backend")
def test_one_row_without_a_sink_is_that_row():
    window, entries = torch.randn(3, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    q, sink = torch.randn(5, 1, 8).bfloat16(), torch.full((1,), NEVER)
    index = torch.full((5, 70), -1)
    index[:, 0] = torch.arange(5)
    o = attention(q, window, entries, index, sink, 1.0)
    assert torch.equal(o, torch.cat((window, entries))[:, None])


@pytest.mark.usefixtures("backend")
def test_sink_only_joins_the_denominator_and_is_not_scaled():
    rows = torch.arange(1.0, 7.0)[:, None].expand(-1, 4).contiguous()  # [6, 4]
    q, sink = torch.zeros(1, 2, 4), torch.tensor([math.log(2), NEVER])
    o = attention(q, rows, rows[:0], torch.tensor([[0, 1, -1, 5]]), sink, 1e-3)
    # scores 0: each row counts 1, the sink 2 or nothing
    assert o[0, :, 0].tolist() == pytest.approx([9 / 5, 9 / 3], rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_probabilities_are_rounded_for_the_product_only():
    seen_apart = 0
    for step in range(50):
        # scores 0 and -scale; the second row alone has a value in the second dim
        scale, rows = 0.1 + step / 10, torch.tensor([[0.0, 0.0], [-1.0, 1.0]]).bfloat16()
        q, sink = torch.tensor([[[1.0, 0.0]]]).bfloat16(), torch.tensor([NEVER])
        o = attention(q, rows, rows[:0], torch.tensor([[0, 1]]), sink, scale)
        chance = math.exp(-torch.tensor(scale, device="cpu").item())
        product = torch.tensor(chance, device="cpu").bfloat16().item()
        expected = [torch.tensor(part / (1 + chance)).bfloat16().item() for part in (product, chance)]
        assert o[0, 0, 1].item() == expected[0]
        seen_apart += expected[0] != expected[1]
    assert seen_apart > 5


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("first", [1e4, -1e4])
def test_maximum_runs_from_block_to_block(first):
    # the first 64 rows score far above or far below the others: nothing overflows, nothing is lost
    rows = torch.zeros(66, 2)
    rows[:64, 0], rows[:, 1] = first, torch.arange(66.0)
    index, sink = torch.arange(66)[None], torch.tensor([0.0])
    o = attention(torch.tensor([[[1.0, 0.0]]]), rows, rows[:0], index, sink, 1.0)
    expected = sum(range(64)) / 64 if first > 0 else (64 + 65) / 3
    assert o[0, 0, 1].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("backend")
def test_the_sink_may_be_far_above_every_row():
    o = attention(
        torch.zeros(1, 1, 2), torch.ones(1, 2), torch.ones(0, 2), torch.tensor([[0]]), torch.tensor([80.0]), 1.0
    )
    assert o[0, 0, 0].item() == pytest.approx(math.exp(-80), rel=1e-5)


@pytest.mark.usefixtures("backend")
def test_empty_blocks_change_nothing():
    q, rows, sink = torch.randn(3, 2, 8), torch.randn(9, 8), torch.randn(2)
    index, holes = lists(3, 64, 9), torch.full((3, 70), -1)
    o = attention(q, rows, rows[:0], index, sink, 0.3)
    for padded in (torch.cat((index, holes), 1), torch.cat((holes, index), 1)):
        # the same numbers, perhaps in other blocks: fp32 sums of 64
        torch.testing.assert_close(attention(q, rows, rows[:0], padded, sink, 0.3), o, rtol=0, atol=1e-6)


# a block; less than one, with holes; several, the last one short; more heads than a program has; whole blocks of holes;
# more blocks than one program of `spread` multiplies at once
BLOCKS = [
    (1, 2, 64, 0.0), (2, 2, 40, 0.3), (1, 4, 190, 0.0), pytest.param(1, 17, 140, 0.3, marks=pytest.mark.slow),
    (1, 2, 300, 0.99), (1, 3, 600, 0.3),
]  # fmt: skip


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("tokens", "heads", "length", "holes"), BLOCKS)
def test_rounds_relative_to_the_maximum_of_the_blocks_so_far(tokens, heads, length, holes):
    # scores are eighths, as powers of two: no probability comes within 2 ** -12 of itself to the middle of two bf16, so
    # the last bit of an exp decides nothing; relative to another maximum, unless whole powers of two away, it rounds to
    # another value
    q, rows, sink = torch.randn(tokens, heads, 32), torch.randn(600, 32), torch.randn(heads)
    q[..., :8], rows[:, :8] = torch.randint(-2, 3, (tokens, heads, 8)), torch.randint(-3, 4, (600, 8))
    q[..., 8:] = 0
    q, rows, turns = q.bfloat16(), rows.bfloat16(), torch.polar(torch.ones(tokens, 4), torch.randn(tokens, 4))
    # the score of the first head rises, so that its maximum is another one in each block; those of others do as they do
    index = (rows.float() @ q[0, 0].float()).argsort()[-length:].repeat(tokens, 1)
    index = index.masked_fill(torch.rand(tokens, length) < holes, -1)
    inputs = (q, rows[:150], rows[150:], index, sink, math.log(2) / 8, turns)
    same = sparse_attention(*inputs) == ref.sparse_attention(*inputs)
    # fp32 sums in another order seldom reach the 8 bits that are kept
    assert same.double().mean() >= 0.99


@pytest.mark.usefixtures("triton_backend")
def test_refuses_what_it_cannot_read():
    sink, index = torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64)
    for q, said in (
        (torch.zeros(1, 1, 514), "values, not 514"),
        (torch.zeros(1, 1, 3), "pairs"),
        (torch.zeros(1, 1, 4).half(), "float16"),
    ):
        rows = q[0]
        with pytest.raises(KernelUnsupported, match=said):
            attention(q, rows, rows[:0], index, sink, 1.0)


# lists of a prompt: of one block, of whole blocks, longer than what is looked through at once; heads of one rank of
# two, of Flash, more than a program has
PROMPTS = [(140, 64, 20), (300, 64, 640), (300, 32, 600), (150, 17, 1100), (140, 128, 128), (3, 64, 640)]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "heads", "length"), PROMPTS)
def test_warps_that_share_the_work_of_a_prompt(tokens, heads, length, triton_backend, monkeypatch):
    from dsv4cli.kernels.attention.kernel import hopper
    from dsv4cli.kernels.card import BLACKWELL, HOPPER

    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    monkeypatch.setattr(hopper, "FEWEST", 1)
    monkeypatch.setattr("dsv4cli.kernels.attention.kernel.two_pass_decode.MOST", 0)
    with torch.device("cuda"):
        q, window, entries = (torch.randn(*size, 512).bfloat16() for size in ((tokens, heads), (200,), (2000,)))
        index, sink = lists(tokens, length, 2200), torch.randn(heads)
        index[tokens // 2], index[-1, length // 3 :] = -1, -1
        turns = torch.polar(torch.ones(tokens, 32), torch.randn(tokens, 32))
        inputs = (q, window, entries, index, sink, 512**-0.5, turns)
        assert hopper.suits(q, window, entries, 32)
        o = sparse_attention(*inputs)
        torch.testing.assert_close(o, ref.sparse_attention(*inputs), rtol=0, atol=TOLERANCE[torch.bfloat16])
        # a token's bits are its own, whichever program takes it and whatever it took before
        few = slice(tokens // 3, tokens // 3 + 5)
        alone = sparse_attention(q[few], window, entries, index[few], sink, 512**-0.5, turns[few])
        assert torch.equal(alone, o[few])


@pytest.mark.parametrize(
    ("card", "shape", "dtype", "row", "turned", "suits"),
    [
        ("h200", (4096, 64, 512), torch.bfloat16, 512, 32, True),
        ("h100", (132, 17, 512), torch.bfloat16, 1024, 64, True),
        ("h200", (66, 128, 512), torch.bfloat16, 512, 0, True),
        ("h200", (131, 64, 512), torch.bfloat16, 512, 32, False),
        ("h200", (4096, 16, 512), torch.bfloat16, 512, 32, False),
        ("h200", (4096, 64, 512), torch.float32, 512, 32, False),
        ("h200", (4096, 64, 256), torch.bfloat16, 256, 32, False),
        ("h200", (4096, 64, 512), torch.bfloat16, 520, 32, False),
        ("h200", (4096, 64, 512), torch.bfloat16, 512, 65, False),
        ("a100", (4096, 64, 512), torch.bfloat16, 512, 32, False),
        ("b200", (4096, 64, 512), torch.bfloat16, 512, 32, False),
        ("rtx5090", (4096, 64, 512), torch.bfloat16, 512, 32, False),
    ],
)
def test_which_prompts_warps_share(card, shape, dtype, row, turned, suits):
    from dsv4cli.kernels.attention.kernel import hopper

    with FakeTensorMode(), described(CARDS[card]):
        q = torch.empty(shape, dtype=dtype, device="cuda")
        window = torch.empty_strided((300, shape[2]), (row, 1), dtype=dtype, device="cuda")
        assert hopper.suits(q, window, window, turned) == suits
        # copies begin at multiples of 16 bytes
        assert not hopper.suits(q, window.as_strided((200, shape[2]), (row, 1), 4), window, turned)
    assert not hopper.suits(torch.empty(shape, dtype=dtype, device="meta"), window, window, turned)


def test_another_triton_is_not_asked_for_gluon(monkeypatch):
    """Gluon is experimental: a version whose Gluon was not read runs the kernels of plain Triton."""
    from dsv4cli.kernels.attention.kernel import hopper

    with FakeTensorMode(), described(CARDS["h200"]):
        q, rows = (torch.empty(*size, 512, dtype=torch.bfloat16, device="cuda") for size in ((4096, 64), (300,)))
        assert hopper.suits(q, rows, rows, 32)
        monkeypatch.setattr("triton.__version__", "3.9.0")
        assert not hopper.suits(q, rows, rows, 32)
