"""Lists of the best entries by the peaks of a row's scores, against the reference."""

import pytest
import torch
import torch.nn.functional as F

from dsv4cli.kernels.block_scale import fp4_codes, fp4_round
from dsv4cli.kernels.indexer import IndexEntries, IndexKeys, IndexQueries, WindowList, best_entries, ref
from tests.support.slow import slow_rows


@pytest.fixture
def few_peaks(triton_backend, monkeypatch):
    """Rows are chosen from by their peaks, up to 2,048 seen entries by themselves."""
    from dsv4cli.kernels.indexer import kernel
    from dsv4cli.kernels.indexer.kernel import topk

    if triton_backend == "interpreter":
        monkeypatch.setattr(kernel, "one_token_tiles", lambda tokens, entries: (1024, 2, 4))
    monkeypatch.setattr(kernel, "takes_prefilter", lambda *_: True)
    monkeypatch.setattr(topk, "_kept", lambda length: (2048, 512, 1, 128))


def few_higher(n: int) -> torch.Tensor:
    """Equal keys, but for every 70th."""
    return torch.randn(n, 32) * (torch.arange(n) % 70 == 0)[:, None]


# keys, of entries that come in turns of 8 where a peak may hide others
KEYS = {
    "of every size": lambda n: torch.randn(n, 32) * torch.logspace(-9, 9, n)[torch.randperm(n), None],
    "alike": lambda n: torch.randn(n // 8 + 1, 32).repeat_interleave(8, 0)[:n] + torch.randn(n, 32) / 4,
    "few values": lambda n: torch.randint(-2, 3, (n, 1)).expand(-1, 32).float(),
    "few higher": few_higher,
    "equal": lambda n: torch.zeros(n, 32),
}


@pytest.mark.usefixtures("few_peaks")
@pytest.mark.parametrize(
    ("kind", "visible"),
    [
        ("of every size", (2111, 1999)), *slow_rows(("equal", (0, 1025)), ("few higher", (2111, 1999))),
        *slow_rows(*((kind, visible) for kind in KEYS for visible in ((2111, 1025), (2049, 2048), (1999, 70)))),
    ],
    ids=str,
)  # fmt: skip
def test_best_entries_by_peaks(kind, visible):
    codes, scale = fp4_codes(KEYS[kind](2111).bfloat16(), 32)
    # heads that add and heads that take away
    q, weights = fp4_round(torch.randn(2, 2, 32).bfloat16(), 32), torch.tensor([[1.0, -0.5], [-1.0, 0.5]]).bfloat16()
    table, sequence = torch.stack((torch.arange(2111), torch.randperm(2111))), torch.tensor([1, 0])
    entries = IndexEntries(table, sequence, torch.tensor(visible))
    window = WindowList(torch.randint(-1, 50, (2, 7)), torch.tensor([3, 7]), 50)
    inputs = (IndexQueries(q, weights, 1.0), IndexKeys(codes, scale), 70, entries, window)
    chosen, expected = best_entries(*inputs), ref.best_entries(*inputs)
    for row, (first, count) in enumerate(zip((3, 7), visible, strict=True)):
        last = first + min(count, 70)
        assert set(chosen[row, first:last].tolist()) == set(expected[row, first:last].tolist())
        chosen[row, first:last] = expected[row, first:last]
    assert torch.equal(chosen, expected)


@pytest.mark.usefixtures("triton_backend")
def test_peaks_are_the_largest_of_each_eight_scores():
    from dsv4cli.kernels.indexer import kernel

    codes, scale = fp4_codes(torch.randn(150, 32).bfloat16(), 32)
    q, weights = fp4_round(torch.randn(1, 1, 32).bfloat16(), 32), -torch.ones(1, 1).bfloat16()
    zero, scores, counts = torch.zeros(1).long(), torch.empty(1, 150).bfloat16(), torch.ones(1, dtype=torch.int32)
    peaks = torch.zeros(1, 19).bfloat16()
    stored, entries = (codes.view(torch.int32), scale.view(torch.uint8)), torch.arange(150)[None]
    seen = IndexEntries(entries, zero, zero + 139)
    kernel._score_few(scores, IndexQueries(q, weights, 1.0), stored, seen, (peaks, counts))
    # the last but one has three that are seen, the last has none
    assert torch.equal(peaks[0, :18], F.pad(scores[0], (0, 2), value=-torch.inf).view(-1, 8).amax(1)[:18])
    assert (peaks[0, 18].item(), counts.item()) == (0, 0)
