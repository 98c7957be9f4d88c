"""What rounding explains, by the rule of judge.py, and the numbers that it is applied to."""

from dataclasses import replace
from math import inf

import pytest
import torch

from dsv4cli.engine.tracing import compare
from dsv4cli.engine.tracing.compare import StageDifference, differences, rounding_of
from dsv4cli.engine.tracing.feed import Jitter, format_rounding, rounding_between, sum_rounding
from dsv4cli.engine.tracing.judge import FACTOR, Moved, judged, load_noise, save_noise
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.errors import UsageError

MANIFEST = TraceManifest("m", (Text(tuple(range(20)), 18),), (0, 2), 2, (0, 4), 64, 4, "bfloat16", simulate=True)


def difference(rows, layer=0, stage="attn.o", rounding=1e-9, alike=None):
    rows = torch.tensor(rows)
    everything = torch.ones(len(rows), dtype=torch.bool)
    return StageDifference(
        layer, stage, 1.0, 0.0, None, rounding, rows, everything if alike is None else torch.tensor(alike)
    )


def excess(found, **twins):
    noise = {}
    for name, rows in twins.items():
        stage = found.stage
        noise[int(name[1:]), stage] = Moved(torch.tensor(rows), torch.ones(len(rows), dtype=torch.bool))
    [verdict] = judged([found], noise)
    return verdict.excess


def test_the_median_row_is_held_against_the_twins_upper_quartile():
    assert excess(difference([0.4] * 8), _0=[0.0] * 5 + [0.1] * 3) == pytest.approx(0.4 / (FACTOR * 0.1))


def test_the_worst_row_is_held_against_the_worst_of_any_layer():
    twin = {"_0": [0.0] * 8, "_1": [0.0] * 7 + [0.2], "_2": [0.0] * 8}
    assert excess(difference([0.0] * 7 + [0.4]), **twin) == pytest.approx(0.4 / (FACTOR * 0.2))


def test_one_rounding_of_the_format_is_always_explained():
    assert excess(difference([0.4] * 8, rounding=0.1), _0=[0.0] * 8) == pytest.approx(1)


@pytest.mark.parametrize(("rows", "expected"), [([0.1] * 8 + [0.0] * 8, 8 / 12), ([0.0] * 15 + [inf], inf)])
def test_choices_are_counted(rows, expected):
    found = difference(rows, stage="gate.chosen")
    assert excess(found, _0=[0.5, 0.5] + [0.0] * 14) == pytest.approx(expected)


def test_rows_with_other_choices_before_them_are_left_out():
    found = difference([0.9] + [0.1] * 9, alike=[False] + [True] * 9)
    assert excess(found, _0=[0.1] * 10) == pytest.approx(1 / FACTOR)


@pytest.mark.parametrize("alike", [[True] * 10, [True] * 9 + [False]])
def test_what_is_no_number_is_never_explained(alike):
    """Nor where another choice came before it."""
    assert excess(difference([0.0] * 9 + [inf], alike=alike), _0=[1.0] * 10) == inf


def test_few_logits_move_as_the_streams_do():
    found = difference([0.4], layer=2, stage="logits")
    noise = {
        (2, "logits"): Moved(torch.tensor([0.0]), torch.tensor([True])),
        (2, "streams"): Moved(torch.full((9,), 0.1), torch.ones(9, dtype=torch.bool)),
    }
    [verdict] = judged([found], noise)
    assert verdict.excess == pytest.approx(0.4 / (FACTOR * 0.1))


def test_noise_is_kept(tmp_path):
    moved = Moved(torch.tensor([0.5, inf]), torch.tensor([True, False]))
    save_noise({(3, "attn.o"): moved, (3, "attn.q"): moved}, tmp_path, fed=True)
    [file] = tmp_path.iterdir()
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode  # others read it as they read the recording
    assert load_noise(tmp_path, fed=False) is None
    known = load_noise(tmp_path, fed=True)
    assert known is not None
    assert known.keys() == {(3, "attn.o"), (3, "attn.q")}
    assert all(torch.equal(a, b) for a, b in zip(known[3, "attn.o"], moved, strict=True))


class InMemory:
    """A recording of one stage."""

    def __init__(self, rows, stage="attn.kv", layer=0, manifest=MANIFEST):
        self.name, self.manifest, self._rows, self._stage, self._layer = "memory", manifest, rows, stage, layer

    def layers(self):
        return [self._layer]

    def stages(self, _):
        return [self._stage]

    def rows(self, layer, stage, first, end):
        return self._rows[first:end]


@pytest.mark.parametrize("at_once", [24, compare.AT_ONCE])
def test_cosine_relative_and_the_largest_difference(monkeypatch, at_once):
    monkeypatch.setattr(compare, "AT_ONCE", at_once)
    a = torch.zeros(20, 3, 2)
    a[..., 0] = 1
    b = a.clone()
    b[7, 2, 1] = 0.5
    [found] = differences(InMemory(a, "attn.o"), InMemory(b, "attn.o"), fed=False)
    assert found.largest is not None
    assert (found.largest.position, found.largest.index, found.largest.difference) == (7, (2, 1), 0.5)
    assert found.relative == pytest.approx((0.25 / 60) ** 0.5)
    assert found.cosine == pytest.approx(60 / (60 * 60.25) ** 0.5)
    assert found.rows[7] == pytest.approx(0.5 / 3**0.5)
    assert found.rows.count_nonzero() == 1


def test_what_is_not_a_number_is_infinitely_far():
    a = torch.ones(20, 2)
    b = a.clone()
    b[3, 1] = float("nan")
    [found] = differences(InMemory(a), InMemory(b), fed=False)
    assert found.rows[3] == inf
    assert found.rows.isfinite().sum() == 19


def test_choices_of_another_size_are_infinitely_far():
    a = torch.tensor([[0, 1, -1], [0, 1, 2], [0, 1, 2], [0, 1, 2]] * 5, dtype=torch.int32)
    b = a.clone()
    b[0] = torch.tensor([0, 1, 2])
    b[1] = torch.tensor([3, 1, 0])
    b[3] = torch.tensor([0, 1, -1])
    [found] = differences(InMemory(a, "indexer.chosen", 1), InMemory(b, "indexer.chosen", 1), fed=False)
    assert found.rows[:4].tolist() == [inf, pytest.approx(1 / 3), 0, inf]


def test_entries_lie_where_their_last_token_is():
    a, b = torch.ones(5, 2), torch.ones(5, 2)
    b[2, 1] = 2
    [found] = differences(InMemory(a, "attn.entries", 1), InMemory(b, "attn.entries", 1), fed=False)
    assert found.largest is not None
    assert found.largest.position == 11


class Choosing(InMemory):
    """Two layers of experts, chosen and added up."""

    def layers(self):
        return [0, 1]

    def stages(self, _):
        return ["streams", "gate.chosen", "ffn.output"]

    def rows(self, layer, stage, first, end):
        return (self._rows if stage == "gate.chosen" and layer == 0 else torch.ones(20, 2))[first:end]


def test_the_coarser_format_of_two_recordings_counts():
    wide = torch.ones(20, 2)
    for one, other in ((wide.bfloat16(), wide), (wide, wide.bfloat16())):
        [found] = differences(InMemory(one, "attn.o"), InMemory(other, "attn.o"), fed=False)
        assert found.rounding == rounding_of(MANIFEST, MANIFEST, "attn.o", 2**-9)


def test_logits_are_left_out_where_their_own_token_chose_otherwise():
    """Of two texts: a row of logits belongs to a token behind those of the texts before."""
    texts = Text((1, 2, 3), 3), Text((4, 5, 6, 7), 3)  # one row of logits, and two
    manifest = replace(MANIFEST, texts=texts)

    class Deciding(InMemory):
        def layers(self):
            return [1, 2]

        def stages(self, layer):
            return ["gate.chosen"] if layer == 1 else ["logits"]

        def rows(self, layer, stage, first, end):
            return (self._rows if layer == 1 else torch.ones(3, 2))[first:end]

    a = torch.tensor([[0, 1]] * 7, dtype=torch.int32)
    b = a.clone()
    b[5] = torch.tensor([0, 2])  # the third token of the second text
    _, logits = differences(Deciding(a, manifest=manifest), Deciding(b, manifest=manifest), fed=False)
    assert logits.alike.tolist() == [True, False, True]


@pytest.mark.parametrize(("fed", "left_out"), [(False, 4), (True, 2)])
def test_rows_behind_another_choice_are_known(fed, left_out):
    a = torch.tensor([[0, 1]] * 20, dtype=torch.int32)
    b = a.clone()
    b[3] = torch.tensor([0, 2])
    found = list(differences(Choosing(a), Choosing(b), fed=fed))
    alike = {(one.layer, one.stage): one.alike for one in found if not one.alike.all()}
    assert len(alike) == left_out  # the rest of its half of the block, what that gives, and unless fed all behind it
    assert alike[0, "ffn.output"].tolist() == [row != 3 for row in range(20)]


def test_rotated_bases_are_not_compared():
    plain = InMemory(torch.ones(20, 4, 2), "indexer.q", 1, replace(MANIFEST, simulate=False))
    assert list(differences(InMemory(torch.ones(20, 4, 2), "indexer.q", 1), plain, fed=False)) == []


def test_roundings():
    sums = (4 * 64) ** 0.5 * 2**-24
    assert sum_rounding(MANIFEST) == sums
    assert format_rounding(MANIFEST) == 2**-9
    assert format_rounding(replace(MANIFEST, dtype="float32")) == sums
    assert rounding_between(MANIFEST, MANIFEST) == sums
    assert rounding_between(MANIFEST, replace(MANIFEST, simulate=False)) == 2**-4
    assert rounding_between(MANIFEST, replace(MANIFEST, rounded=("linear",))) == 2**-4
    assert rounding_between(MANIFEST, replace(MANIFEST, dtype="float32")) == 2**-9
    assert rounding_of(MANIFEST, MANIFEST, "hc_attn.comb", 0.0) == sums
    assert rounding_of(MANIFEST, MANIFEST, "attn.o", 2**-9) == pytest.approx(2**-9 / 3**0.5)
    # numerics that round where the others do not move a stage by more than its own format
    assert rounding_of(MANIFEST, replace(MANIFEST, simulate=False), "attn.o", 2**-9) == pytest.approx(2**-4 / 3**0.5)
    assert rounding_of(MANIFEST, MANIFEST, "gate.weights", 0.0) == pytest.approx(2**-8 / 8, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 2**-12), (torch.float32, 2**-12), (torch.bfloat16, 2**-4)]
)
def test_a_jitter_moves_as_far_as_it_says(dtype, size):
    x = torch.full((200_000,), 1.5, dtype=dtype)
    moved = Jitter(size)(x).double() - 1.5
    assert moved.mean().abs() < size / 100
    # spread evenly over +-size, and in bf16 to a neighbour 2^-7 away as often as it is nearer
    expected = 1.5 * size / 3**0.5
    if dtype == torch.bfloat16 and size < 2**-8:
        expected = (1.5 * size / 2 * 2**-7) ** 0.5
    assert moved.square().mean().sqrt().item() == pytest.approx(expected, rel=0.03)


def test_the_same_jitter_moves_alike():
    x = torch.randn(100).bfloat16()
    assert torch.equal(Jitter(0.1, 3)(x), Jitter(0.1, 3)(x))
    assert not torch.equal(Jitter(0.1, 3)(x), Jitter(0.1, 4)(x))


def test_rows_of_other_widths_do_not_compare():
    with pytest.raises(UsageError, match=r"layer 0, attention.*: a row has 4 values in .* and 2 in .*"):
        list(differences(InMemory(torch.ones(20, 4), "attn.o"), InMemory(torch.ones(20, 2), "attn.o"), fed=False))
