"""Compression: pooling against a softmax written out in pure Python, whole steps against every token's history."""

import math
from dataclasses import replace

import pytest
import torch

from dsv4cli.kernels.block_scale.ref import dequantise, fp4_round, hadamard
from dsv4cli.kernels.compressor import (
    Compression,
    EntryPlan,
    State,
    compress_both,
    compress_index_keys,
    compress_keys,
    ref,
)
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.norm.ref import rms_norm
from dsv4cli.kernels.qk_norm_rope.ref import rounded
from dsv4cli.kernels.rope.ref import rotate
from tests.support.slow import slow, slow_rows

EPS, NEVER, SPARE = 1e-6, float("-inf"), 3


def slow_pool(kv: list[float], score: list[float]) -> float:
    top = max(score)
    shares = [math.exp(value - top) for value in score]
    return sum(share * value for share, value in zip(shares, kv, strict=True)) / sum(shares)


# groups, tokens of a group, channels
@pytest.mark.parametrize("shape", [(0, 8, 16), (1, 8, 1), (3, 8, 17), (2, 128, 5), (1, 1, 3)], ids=str)
def test_pool(shape):
    kv, score = torch.randn(shape), torch.randn(shape) * 5
    entries = ref.pool(kv, score)
    assert (entries.shape, entries.dtype) == ((shape[0], shape[2]), torch.float32)
    for group in range(shape[0]):
        for channel in range(shape[2]):
            expected = slow_pool(kv[group, :, channel].tolist(), score[group, :, channel].tolist())
            # a softmax and a sum of up to 128 numbers around 1, in fp32
            assert entries[group, channel].item() == pytest.approx(expected, rel=0, abs=2e-6)


def turns(positions: list[int], pairs: int) -> torch.Tensor:
    angles = torch.tensor(positions).float()[:, None] * torch.logspace(0, -3, pairs)
    return torch.polar(torch.ones_like(angles), angles)


class Texts:
    """Sequences with the raw rows of all their tokens, fed to a compressor a few at a time."""

    def __init__(self, lengths: list[int], ratio: int, halves: int, width: int, pairs: int) -> None:
        self.ratio, self.halves, self.width, self.pairs = ratio, halves, width, pairs
        self.slots = list(range(len(lengths)))[::-1]  # slot 0 is the last sequence's
        self.kv = [torch.randn(n, halves * width) for n in lengths]
        self.score = [torch.randn(n, halves * width) * 2 for n in lengths]
        self.ape = torch.randn(ratio, halves * width)
        self.weight = torch.rand(width) + 0.5
        self.capacity = halves * ratio + SPARE
        self.most = max(lengths) // ratio + 1
        self.done = [0] * len(lengths)
        self.spare = 0  # groups of the last sequence in each step that no token of it can complete

    def state(self, dtype: torch.dtype, packed: bool = False) -> State:
        shape, cells = (len(self.slots), self.capacity, self.halves * self.width), len(self.slots) * self.most
        rings = torch.zeros(shape), torch.full(shape, NEVER)
        if packed:
            codes = torch.zeros(cells, self.width // 2, dtype=torch.int8)
            scale = torch.zeros(cells, self.width // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            return State(*rings, codes, scale)
        return State(*rings, torch.zeros(cells, self.width, dtype=dtype))

    def cell(self, sequence: int, group: int) -> int:
        return self.slots[sequence] * self.most + group

    def step(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, EntryPlan]:
        """The rows and the plan of the next tokens of every sequence."""
        groups, entries, rotated, positions, row = [], [], [], [], 0
        ratio, before = self.ratio, (self.halves - 1) * self.ratio
        for sequence, count in enumerate(counts):
            start, end = self.done[sequence], self.done[sequence] + count
            # as many as these tokens can complete, wherever they begin
            more = self.spare if sequence == len(counts) - 1 else 0
            for group in range(start // ratio, start // ratio - (-count // ratio) + more):
                groups.append([self.slots[sequence], group * ratio - before, start, end, row])
                entries.append(self.cell(sequence, group) if (group + 1) * ratio <= end else -1)
                rotated.append(group * ratio)
            positions += range(start, end)
            row += count
        fresh = [
            torch.cat([raw[at : at + n] for raw, at, n in zip(every, self.done, counts, strict=True)])
            for every in (self.kv, self.score)
        ]
        self.done = [at + count for at, count in zip(self.done, counts, strict=True)]
        numbers = (torch.tensor(part, dtype=torch.int64) for part in (groups, entries, positions))
        groups, entries, positions = numbers
        plan = EntryPlan(groups.view(-1, 5), entries, turns(rotated, self.pairs), positions)
        return fresh[0], fresh[1], plan

    def pooled(self, sequence: int, group: int) -> torch.Tensor:
        """What a group pools, from the definition: fp64 [d]."""
        ratio, width, rows = self.ratio, self.width, []
        for member in range((1 - self.halves) * ratio, ratio):
            position = group * ratio + member
            if position >= 0:
                half = slice(None) if self.halves == 1 else slice(width) if member < 0 else slice(width, None)
                logits = (self.score[sequence][position] + self.ape[position % ratio])[half]
                rows.append((self.kv[sequence][position][half].double(), logits.double()))
        kv, logits = (torch.stack(part) for part in zip(*rows, strict=True))
        return (logits.softmax(0) * kv).sum(0)


# tokens of a group, halves, width, rotated pairs; the last are those of Flash and Pro, the indexer's among them
KINDS = [(4, 2, 80, 8), (4, 1, 16, 4), (32, 1, 48, 8)]
REAL = [(4, 2, 512, 32), (128, 1, 512, 32), (4, 2, 128, 32)]
# the tokens of three sequences in each step: long ones, single ones, none of one sequence
SPLITS = [[[13, 1, 34], [4, 3, 1], [1, 1, 1], [2, 1, 9]], [[1, 1]] * 9, [[3, 70], [40, 1]], [[6, 7], [6, 5]]]


def lengths(split: list[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*split, strict=True)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("kind", "split"),
    [
        *((KINDS[0], split) for split in SPLITS),
        *((kind, SPLITS[0]) for kind in KINDS[1:]),
        *slow_rows(*((kind, split) for kind in KINDS[1:] for split in SPLITS[1:])),
    ],
    ids=str,
)
def test_entries_are_those_of_the_whole_text(kind, split):
    check_steps(Texts(lengths(split), *kind), split)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [KINDS[0], *slow(*KINDS[1:])], ids=str)
def test_groups_that_are_too_many_change_nothing(kind):
    texts = Texts(lengths(SPLITS[2]), *kind)
    texts.spare = 5
    check_steps(texts, SPLITS[2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [REAL[1], *slow(REAL[0], REAL[2])], ids=str)
def test_entries_of_real_widths(kind):
    # short and long steps, with and without an entry
    most = max(kind[0], 12) - 2
    check_steps(Texts([most + 5], *kind), [[most], [1], [1], [3]])
    check_steps(Texts([5, most + 1], *kind), [[5, most + 1]])


@pytest.mark.usefixtures("triton_backend")
def test_a_first_entry_whose_first_members_do_not_exist(monkeypatch):
    """In a long step a program pools four members at once, and of the first entry none of the first four exists."""
    from dsv4cli.kernels.compressor import kernel

    monkeypatch.setattr(kernel, "FEW", 4)  # so that five tokens are a long step
    assert kernel.entry_tiles(8, 130, tokens=5, groups=2).size == 4
    check_steps(Texts([5], 4, 2, 130, 8), [[5]])


def check_steps(texts: Texts, split: list[list[int]]) -> None:
    state = texts.state(torch.float32)
    for counts in split:
        kv, score, plan = texts.step(counts)
        after = compress_keys(Compression(kv, score, texts.ape, texts.weight, EPS, state), plan, False)
        assert after.kv.data_ptr() == state.kv.data_ptr()
        assert after.entries.data_ptr() == state.entries.data_ptr()
    for sequence, length in enumerate(texts.done):
        for group in range(texts.most):
            entry = state.entries[texts.cell(sequence, group)]
            if (group + 1) * texts.ratio > length:
                assert not entry.any()
                continue
            pooled = texts.pooled(sequence, group)[None]
            normed = pooled / (pooled.square().mean() + EPS).sqrt() * texts.weight.double()
            expected = rotate(normed.float(), turns([group * texts.ratio], texts.pairs))[0]
            # fp32: a softmax and sums of up to 128 numbers, a norm, two products of the rotation
            torch.testing.assert_close(entry, expected, rtol=1e-5, atol=2e-6)
        kept = range(max(0, length - texts.capacity), length)
        ring, cells = texts.slots[sequence], [position % texts.capacity for position in kept]
        assert torch.equal(state.kv[ring, cells], texts.kv[sequence][kept.start :])
        bias = texts.ape[[position % texts.ratio for position in kept]]
        assert torch.equal(state.score[ring, cells], texts.score[sequence][kept.start :] + bias)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "kind", [(4, 2, 128, 32), *slow((4, 1, 192, 64)), (32, 1, 96, 16), *slow((4, 2, 512, 32))], ids=str
)
def test_entries_round_step_by_step(kind):
    texts = Texts([37], *kind)
    state, weight = texts.state(torch.bfloat16), texts.weight.bfloat16()
    for counts in ([34], [1], [1], [1]):
        kv, score, plan = texts.step(counts)
        compress_keys(Compression(kv, score, texts.ape, weight, EPS, state), plan, True)
    count, pairs = 37 // texts.ratio, texts.pairs
    pooled = torch.stack([texts.pooled(0, group) for group in range(count)]).bfloat16()
    rotation = turns([group * texts.ratio for group in range(count)], pairs)
    expected = rounded(rotate(rms_norm(pooled, weight, EPS), rotation), 2 * pairs)
    assert_nearly_equal(state.entries[:count], expected)


def assert_nearly_equal(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit, but for the few values at the edge between two codes: their sums were taken in another order."""
    assert ours.dtype == expected.dtype
    assert (ours != expected).double().mean() < 0.01
    # e4m3 steps of 1/8, e2m1 steps of 1/2 of a value; zeros next to the smallest code
    apart = (ours.double() - expected.double()).abs()
    assert (apart <= expected.double().abs() / 2 + expected.double().abs().max() / 8).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [(4, 2, 128, 32), (32, 1, 64, 8)], ids=str)
def test_index_entries_as_values_and_packed(kind):
    split = [[33, 3], [1, 9]]
    texts, again = Texts(lengths(split), *kind), None
    values, packed = texts.state(torch.bfloat16), texts.state(torch.bfloat16, packed=True)
    weight = texts.weight.bfloat16()
    for counts in split:
        kv, score, plan = texts.step(counts)
        for state in (values, packed):
            compress_index_keys(Compression(kv, score, texts.ape, weight, EPS, state), plan)
    for sequence, length in enumerate(texts.done):
        groups = range(length // texts.ratio)
        cells = [texts.cell(sequence, group) for group in groups]
        if not cells:
            continue
        pooled = torch.stack([texts.pooled(sequence, group) for group in groups]).bfloat16()
        again = rotate(rms_norm(pooled, weight, EPS), turns([group * texts.ratio for group in groups], texts.pairs))
        assert_nearly_equal(values.entries[cells], fp4_round(hadamard(again), 32))
        # the same codes, exactly
        unpacked = dequantise(packed.entries[cells], packed.scale[cells])
        assert torch.equal(unpacked.view(torch.int32), values.entries[cells].float().view(torch.int32))
    assert again is not None
    assert torch.equal(packed.kv, values.kv)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("packed", "round_keys"), [(False, False), pytest.param(False, True, marks=pytest.mark.slow), (True, True)]
)
def test_both_compressors_of_a_layer(packed, round_keys):
    split = [[9, 2], [1, 1], [3, 5]]
    texts, index = (Texts(lengths(split), 4, 2, width, pairs) for width, pairs in ((80, 8), (32, 8)))
    states = [texts.state(torch.bfloat16), index.state(torch.bfloat16, packed)]
    alone = [texts.state(torch.bfloat16), index.state(torch.bfloat16, packed)]
    for counts in split:
        kv, score, plan = texts.step(counts)
        index_kv, index_score, _ = index.step(counts)
        own = [Compression(kv, score, texts.ape, texts.weight, EPS, state) for state in (states[0], alone[0])]
        others = [
            Compression(index_kv, index_score, index.ape, index.weight, EPS, state) for state in (states[1], alone[1])
        ]
        after = compress_both(own[0], others[0], plan, round_keys)
        assert [one.kv.data_ptr() for one in after] == [one.kv.data_ptr() for one in states]
        compress_keys(own[1], plan, round_keys)
        if round_keys:
            compress_index_keys(others[1], plan)
        else:
            compress_keys(others[1], plan, False)
    for state, expected in zip(states, alone, strict=True):
        for ours, theirs in zip(vars(state).values(), vars(expected).values(), strict=True):
            assert ours is theirs or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.usefixtures("triton_backend")
def test_few_rows_of_a_sequence_take_one_launch_for_both(monkeypatch):
    from dsv4cli.kernels.compressor import kernel

    monkeypatch.setattr(kernel, "_compress", lambda *given: pytest.fail("a launch for each"))
    texts, index = Texts([7], 4, 2, 80, 8), Texts([7], 4, 2, 32, 8)
    (kv, score, plan), (index_kv, index_score, _) = texts.step([7]), index.step([7])
    own, other = (
        Compression(*rows, one.ape, one.weight, EPS, one.state(torch.bfloat16))
        for one, rows in ((texts, (kv, score)), (index, (index_kv, index_score)))
    )
    assert compress_both(own, other, plan, False)[1].entries[0].any()


@pytest.mark.usefixtures("triton_backend")
def test_entries_do_not_depend_on_how_many_rows_come_at_once():
    texts, states = Texts([13], 4, 2, 512, 32), []
    for split in ([1] * 13, [3, 8, 2], [13]):
        texts.done, state = [0], texts.state(torch.float32)
        for count in split:
            kv, score, plan = texts.step([count])
            compress_keys(Compression(kv, score, texts.ape, texts.weight, EPS, state), plan, False)
        states.append(state)
    for state in states[1:]:
        assert torch.equal(state.entries, states[0].entries)


@pytest.mark.usefixtures("backend")
def test_rows_of_a_wider_product():
    texts = Texts([9], 4, 2, 64, 8)
    kv, score, plan = texts.step([9])
    both = torch.cat((kv, torch.ones(9, 3), score), 1)
    states = texts.state(torch.float32), texts.state(torch.float32)
    width = kv.shape[1]
    compress_keys(Compression(kv, score, texts.ape, texts.weight, EPS, states[0]), plan, False)
    apart = Compression(both[:, :width], both[:, width + 3 :], texts.ape, texts.weight, EPS, states[1])
    compress_keys(apart, plan, False)
    assert torch.equal(states[0].entries, states[1].entries)
    assert torch.equal(states[0].score, states[1].score)


@pytest.mark.usefixtures("backend")
def test_nothing_to_do():
    texts = Texts([5], 4, 2, 64, 8)
    kv, score, plan = texts.step([0])
    state = texts.state(torch.float32)
    compress_keys(Compression(kv, score, texts.ape, texts.weight, EPS, state), plan, False)
    assert not state.kv.any()
    kv, score, plan = texts.step([5])
    nothing = replace(plan, entries=torch.full_like(plan.entries, -1))
    compress_keys(Compression(kv, score, texts.ape, texts.weight, EPS, state), nothing, False)
    assert not state.entries.any()
    assert torch.equal(state.kv[0, :5], kv)


def test_a_gradient_flows_into_a_new_state():
    texts = Texts([9], 4, 2, 64, 8)
    kv, score, plan = texts.step([9])
    state = texts.state(torch.float32)
    after = compress_keys(Compression(kv.requires_grad_(), score, texts.ape, texts.weight, EPS, state), plan, False)
    assert not state.entries.any()
    assert not state.kv.any()
    after.entries.sum().backward()
    assert (kv.grad != 0).any(1).tolist() == [True] * 8 + [False]


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    texts = Texts([4], 4, 2, 96, 8)
    kv, score, plan = texts.step([4])
    own = Compression(kv, score, texts.ape, texts.weight, EPS, texts.state(torch.bfloat16))
    with pytest.raises(KernelUnsupported, match="power of two"):
        compress_index_keys(own, plan)
    with pytest.raises(KernelUnsupported, match="at once, not 80"):
        compress_keys(own, plan, True)
    with pytest.raises(KernelUnsupported, match="fp32"):
        compress_keys(replace(own, kv=kv.bfloat16()), plan, False)
