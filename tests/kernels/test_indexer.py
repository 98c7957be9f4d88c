"""Index scores with every rounding written out, and the choice of entries against a sort in pure Python."""

import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise, fp4_codes, fp4_round
from dsv4cli.kernels.card import CARDS, described
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.indexer import (
    IndexEntries,
    IndexKeys,
    IndexQueries,
    WindowList,
    choose_entries,
    index_scores,
    ref,
    top_entries,
)
from tests.support.slow import slow, slow_rows

INF = float("inf")
SCALE = 7 / 64  # products with bf16 are exact in fp32


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64, device="cpu").float().bfloat16().item()


def slow_score(q: list[list[float]], weights: list[float], key: list[float]) -> float:
    total = 0.0
    for head, weight in zip(q, [rounded(SCALE * weight) for weight in weights], strict=True):
        dot = rounded(sum(a * b for a, b in zip(head, key, strict=True)))
        total += rounded(max(dot, 0.0) * weight)
    return rounded(total)


def grouped(q, weights, weight_scale, keys, key_scale, table, sequence, visible):
    """What index_scores takes."""
    return IndexQueries(q, weights, weight_scale), IndexKeys(keys, key_scale), IndexEntries(table, sequence, visible)


# tokens, heads, width, entries of each sequence: none, one, a block of 64, one more; many tokens of a sequence
SHAPES = [
    (0, 4, 32, 3), (1, 1, 32, 0), (1, 4, 128, 1), (2, 16, 32, 64), (4, 4, 32, 65), (1, 3, 64, 131), (17, 2, 32, 9),
]  # fmt: skip


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        *((shape, "fp4") for shape in SHAPES[:5]),
        *((shape, "bf16") for shape in SHAPES[1:3]),
        *slow_rows(*((shape, "fp4") for shape in SHAPES[5:])),
        *slow_rows(*((shape, "bf16") for shape in (SHAPES[0], *SHAPES[3:]))),
    ],
    ids=str,
)
def test_scores_round_each_step(shape, stored):
    tokens, heads, width, entries = shape
    # halves up to 6, as FP4 leaves them: dots are exact, their roundings those of the true values
    q, keys = (torch.randint(-12, 13, size).div(2).bfloat16() for size in ((tokens, heads, width), (200, width)))
    q, keys = fp4_round(q, 32), fp4_round(keys, 32)
    weights = torch.randn(tokens, heads).bfloat16()
    table = torch.randint(0, 200, (2, entries + 5))[:, :entries]
    sequence = torch.arange(tokens) // 3 % 2  # which takes turns
    visible = torch.randint(0, entries + 1, (tokens,)).index_fill(0, torch.arange(min(tokens, 1)), entries)
    codes, scale = fp4_codes(keys, 32) if stored == "fp4" else (keys, None)
    scores = index_scores(*grouped(q, weights, SCALE, codes, scale, table, sequence, visible))
    assert (scores.shape, scores.dtype) == ((tokens, entries), torch.bfloat16)
    for token in range(tokens):
        for entry, cell in enumerate(table[sequence[token]].tolist()):
            expected = slow_score(q[token].tolist(), weights[token].tolist(), keys[cell].tolist())
            hidden = entry >= visible[token]
            assert scores[token, entry].item() == (-INF if hidden else expected), (token, entry)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("tokens", "sequences", "entries", "operand", "each"),
    [
        *slow_rows(
            (1, 1, 70, torch.bfloat16, 64),
            (1, 1, 33, torch.bfloat16, 64),
            (32, 2, 130, torch.bfloat16, 64),
            (40, 2, 70, torch.float8_e4m3fn, 8),  # a program has tokens of both sequences
        ),
        (16, 1, 33, torch.float8_e4m3fn, 8),
    ],
)
def test_scores_of_real_heads_are_those_of_the_reference(tokens, sequences, entries, operand, each, monkeypatch):
    from dsv4cli.kernels.indexer import kernel

    monkeypatch.setattr(kernel, "tokens_per_program", lambda *_: each)
    monkeypatch.setattr(kernel, "_operand", lambda device: operand)
    q, keys = fp4_round(torch.randn(tokens, 64, 128).bfloat16(), 32), torch.randn(300, 128).bfloat16()
    codes, scale = fp4_codes(keys * torch.logspace(-3, 3, 300)[:, None].bfloat16(), 32)
    weights = torch.randn(tokens, 64).bfloat16()
    table = torch.randint(0, 300, (sequences, entries))
    sequence = torch.arange(tokens) * sequences // tokens
    visible = torch.randint(entries // 2, entries + 1, (tokens,))
    inputs = (q, weights, SCALE, codes, scale, table, sequence, visible)
    # dots are exact; the sum over heads may round to the other neighbour where its fp32 sum has another order
    torch.testing.assert_close(index_scores(*grouped(*inputs)), ref.index_scores(*grouped(*inputs)), rtol=2**-7, atol=0)


def test_programs_share_keys_if_they_fill_the_gpu():
    from dsv4cli.kernels.indexer.kernel import tokens_per_program

    with described(CARDS["h200"]):
        found = [tokens_per_program(*shape, torch.device("cuda")) for shape in ((512, 1280), (512, 6272), (512, 6400))]
    assert found == [8, 8, 64]  # 392 and 400 programs, where three per multiprocessor are 396


@pytest.mark.usefixtures("triton_backend")
def test_rows_of_a_verified_draft_are_scored_as_one_is(monkeypatch):
    from dsv4cli.kernels.indexer import kernel

    monkeypatch.setattr(kernel, "_score_many", lambda *given: pytest.fail("eight rows are few"))
    codes, scale = fp4_codes(torch.randn(20, 32).bfloat16(), 32)
    q, weights = fp4_round(torch.randn(8, 4, 32).bfloat16(), 32), torch.randn(8, 4).bfloat16()
    table, zero = torch.arange(20)[None], torch.zeros(8, dtype=torch.int64)
    every = index_scores(*grouped(q, weights, SCALE, codes, scale, table, zero, zero + 20))
    alone = index_scores(*grouped(q[3:4], weights[3:4], SCALE, codes, scale, table, zero[:1], zero[:1] + 20))
    assert torch.equal(every[3:4], alone)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("splits", [1, 2])
def test_a_program_takes_several_tiles_of_keys(splits, monkeypatch):
    from dsv4cli.kernels.indexer import kernel

    monkeypatch.setattr(kernel, "one_token_tiles", lambda tokens, entries: (16, splits, 4))
    codes, scale = fp4_codes(torch.randn(200, 32).bfloat16(), 32)
    table, zero = torch.randint(0, 200, (1, 110)), torch.zeros(1, dtype=torch.int64)
    q, weights = fp4_round(torch.randn(1, 1, 32).bfloat16(), 32), torch.ones(1, 1).bfloat16()
    inputs = grouped(q, weights, SCALE, codes, scale, table, zero, zero + 90)
    assert torch.equal(index_scores(*inputs), ref.index_scores(*inputs))


@pytest.mark.usefixtures("triton_backend")
def test_blocks_of_a_key_may_differ_by_120_powers_of_two():
    codes = torch.full((1, 64), 0x22, dtype=torch.uint8).view(torch.int8)  # ones
    scale = torch.tensor([[10, 60, 127, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    q = torch.eye(128).bfloat16()[::32, None]  # a token for each block
    zero = torch.zeros(4, dtype=torch.int64)
    scores = index_scores(*grouped(q, torch.ones(4, 1).bfloat16(), 1.0, codes, scale, zero[None, :1], zero, zero + 1))
    assert torch.equal(scores.float(), dequantise(codes, scale)[:, ::32].T)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [3, 19])
def test_scores_in_fp32_are_not_rounded(tokens):
    q, weights, keys = torch.randn(tokens, 4, 32), torch.randn(tokens, 4), torch.randn(70, 32)
    zero = torch.zeros(tokens, dtype=torch.int64)
    scores = index_scores(*grouped(q, weights, 0.5, keys, None, torch.arange(70)[None], zero, zero + 70))
    dots = torch.einsum("thd,ed->the", q.double(), keys.double())
    # sums of 32 products of normal numbers in fp32
    torch.testing.assert_close(scores.double(), (dots.relu() * weights[..., None] / 2).sum(1), rtol=0, atol=5e-5)


@pytest.mark.usefixtures("backend")
def test_negative_heads_do_not_cancel_positive_ones():
    # relu stands before the sum over heads
    q, zero = torch.tensor([[[1.0], [-1.0]]]), torch.zeros(1).long()
    assert index_scores(*grouped(q, torch.ones(1, 2), 1.0, torch.ones(1, 1), None, zero[None], zero, zero + 1)) == 1


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    q, zero = torch.zeros(1, 2, 32), torch.zeros(1).long()
    codes, scale = fp4_codes(torch.zeros(3, 32).bfloat16(), 32)
    with pytest.raises(KernelUnsupported, match="keys like the queries"):
        index_scores(*grouped(q, torch.ones(1, 2), 1.0, torch.ones(3, 32).bfloat16(), None, zero[None], zero, zero))
    with pytest.raises(KernelUnsupported, match="FP4 keys with bf16 queries"):
        index_scores(*grouped(q, torch.ones(1, 2), 1.0, codes, scale, zero[None], zero, zero))
    with pytest.raises(KernelUnsupported, match="consecutive columns"):
        top_entries(torch.zeros(3, 4).T, torch.zeros(4).long(), 2)


def slow_top(scores: list[float], visible: int, k: int) -> list[int]:
    return sorted(sorted(range(visible), key=lambda entry: (-scores[entry], entry))[:k])


def check_top(scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    chosen = top_entries(scores, visible, k)
    assert (chosen.shape, chosen.dtype) == ((scores.shape[0], min(k, scores.shape[1])), torch.int64)
    for row, values, count in zip(chosen.tolist(), scores.tolist(), visible.tolist(), strict=True):
        expected = slow_top(values, count, k)
        assert sorted(row[: len(expected)]) == expected
        assert row[len(expected) :] == [-1] * (len(row) - len(expected))


@pytest.fixture
def few_parts(backend, monkeypatch):
    """Fewer programs where they are interpreted: of up to 64 visible entries each is ranked, of more some are found."""
    if backend == "interpreter":
        from dsv4cli.kernels.indexer.kernel import topk

        monkeypatch.setattr(topk, "_parts", lambda rows: (2, 64, 2))


@pytest.fixture
def many_rows(backend, monkeypatch):
    """As if there were so many rows that a program takes a whole one."""
    if backend in ("interpreter", "triton-cuda"):
        from dsv4cli.kernels.indexer.kernel import topk

        monkeypatch.setattr(topk, "FEW", 0)


# none, one, fewer than k, more; more than a program takes at once
TOP = [
    (0, 5, 2), (1, 0, 3), (3, 1, 1), (3, 67, 8), (3, 8, 8), (3, 3, 8), (1, 2100, 1100), (1, 8200, 99),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((7, 67, 8), (2, 1025, 512))),
]  # fmt: skip


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize(("tokens", "entries", "k"), TOP)
def test_top_entries_breaks_ties_by_number(tokens, entries, k, dtype):
    scores = torch.randint(-3, 4, (tokens, entries)).to(dtype)  # few values: ties everywhere
    check_top(scores, torch.randint(0, entries + 1, (tokens,)), k)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "entries", "k"),
    [
        (2, 67, 8),
        (3, 3, 8),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((7, 67, 8), (2, 1025, 512), (2, 32_771, 99))),
    ],
)
def test_top_entries_of_whole_rows(tokens, entries, k, dtype):
    scores = torch.randint(-3, 4, (tokens, entries)).to(dtype)
    check_top(scores, torch.randint(0, entries + 1, (tokens,)), k)


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize(
    ("k", "dtype"),
    [
        (1, torch.bfloat16),
        (64, torch.float32),
        *(pytest.param(k, torch.bfloat16, marks=pytest.mark.slow) for k in (63, 64, 200)),
        *(pytest.param(k, torch.float32, marks=pytest.mark.slow) for k in (1, 63, 200)),
    ],
)
def test_top_entries_of_scores_of_every_size(k, dtype):
    scores = (torch.randn(4, 300) * torch.logspace(-30, 30, 300)).to(dtype)
    scores[0, 7], scores[1, 100:], scores[2, ::3] = INF, -INF, scores[2, ::3].abs()
    check_top(scores[:, :251], torch.tensor([251, 150, 251, 250]), k)


@pytest.mark.usefixtures("few_parts")
def test_zeros_of_either_sign_are_equal():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    check_top(scores, torch.tensor([5]), 2)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    "visible", [*(pytest.param(n, marks=pytest.mark.slow) for n in (32_768, 32_770)), 40_000, 16, *slow(0)]
)
def test_the_last_part_of_a_long_row(visible):
    scores = torch.randn(1, 40_000).bfloat16()
    check_top(scores, torch.tensor([visible]), 16)


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("visible", [40_000, *slow(8_193, 8_192), 50, *slow(0)])
def test_a_long_row_of_which_little_is_visible(visible):
    scores = torch.randn(1, 40_000).bfloat16()
    check_top(scores, torch.tensor([visible]), 16)


def test_the_reference_decodes_the_entries_of_a_sequence_once(monkeypatch):
    """A prompt has thousands of tokens that see the same entries."""
    decoded = []
    monkeypatch.setattr(ref, "dequantise", lambda codes, scale: decoded.append(codes.shape) or dequantise(codes, scale))
    codes, scale = fp4_codes(torch.randn(100, 32).bfloat16(), 32)
    table, sequence = torch.randint(0, 100, (2, 70)), torch.arange(9) // 5
    queries = torch.randn(9, 4, 32).bfloat16(), torch.randn(9, 4).bfloat16()
    ref.index_scores(*grouped(*queries, SCALE, codes, scale, table, sequence, torch.full((9,), 70)))
    assert decoded == [(2, 64, 16)] * 2


@pytest.mark.usefixtures("few_parts")
def test_hidden_entries_never_win():
    scores = torch.tensor([[-1.0, -2.0, 9.0, 9.0]])
    assert top_entries(scores, torch.tensor([2]), 3).tolist() == [[0, 1, -1]]
    assert top_entries(scores, torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]


# tokens, entries, k, columns of the window: none, fewer entries than k, more; ranked, found, of more than one pass
LISTS = [(0, 5, 2, 4), (2, 0, 3, 4), (3, 1, 1, 0), (4, 30, 40, 7), (3, 90, 12, 16), (1, 9000, 40, 5)]


def check_lists(tokens, entries, k, window):
    scores = torch.randn(tokens, entries).mul(3).round().bfloat16()
    visible = torch.randint(0, entries + 1, (tokens,)).index_fill(0, torch.arange(min(tokens, 2)), entries)
    table, sequence = torch.randperm(3 * entries)[: 2 * entries].view(2, entries), torch.arange(tokens) % 2
    index = torch.randint(-1, 50, (tokens, window))
    columns = torch.randint(0, window + 1, (tokens,))
    lists = choose_entries(scores, k, IndexEntries(table, sequence, visible), WindowList(index, columns, 50))
    assert (lists.shape, lists.dtype) == ((tokens, window + min(k, entries)), torch.int64)
    for row in range(tokens):
        cells = (table[sequence[row]] + 50).tolist()
        chosen = {cells[entry] for entry in slow_top(scores[row].tolist(), int(visible[row]), k)}
        first, listed = int(columns[row]), lists[row].tolist()
        assert set(listed[first : first + len(chosen)]) == chosen
        expected = index[row].tolist() + [-1] * min(k, entries)
        expected[first : first + min(k, entries)] = [-1] * min(k, entries)
        expected[first : first + len(chosen)] = listed[first : first + len(chosen)]
        assert listed == expected


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize(("tokens", "entries", "k", "window"), LISTS)
def test_lists_of_chosen_entries(tokens, entries, k, window):
    check_lists(tokens, entries, k, window)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(("tokens", "entries", "k", "window"), LISTS[3:])
def test_lists_of_whole_rows(tokens, entries, k, window):
    check_lists(tokens, entries, k, window)
