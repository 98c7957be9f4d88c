"""Sequences side by side: each gets the logits that it gets alone, whatever happens around it and in its own past."""

from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels import alike
from tests.support.drafting import mtp_logits
from tests.support.golden_data import NETS, Golden, chunks, golden, remember_weights
from tests.support.slow import slow, slow_except
from tests.support.small_model import FP32, NARROW, RATIOS

LENGTHS = (1, 3, 127, 128, 129, 300)
# sums in another order over the same fp32 numbers: measured here 1e-6, a wrong row gives 0.05 and more
PLAIN_BOUND = 1e-5


@pytest.fixture(scope="module")
def plain() -> Transformer:
    """Every kind of layer and router; few entries chosen (index_topk) and clamps that act (swiglu_limit)."""
    few = {"index_topk": 8, "swiglu_limit": 0.5, "vocab_size": 128}
    layers = {"num_hidden_layers": len(RATIOS), "compress_ratios": [*RATIOS, 0]}
    config = parse_config(TINY | NARROW | few | layers, "test")
    return build_random(config, Numerics.plain(), formats=FP32)


@pytest.fixture
def _row_independent(monkeypatch):
    """A matmul's sums may be ordered by the number of rows: the rows of a long step are no more alike by themselves."""
    monkeypatch.setattr(alike, "ROWS_ALIKE", 1000)


class Runner:
    """A model with a cache; `step` gives logits and MTP logits side by side for every token of every sequence."""

    def __init__(self, model: Transformer, slots: int = 1) -> None:
        self.model = model
        self.cache = Cache(model.config, model.numerics, slots=slots)

    def step(self, work: list[tuple[Sequence, list[int]]]) -> list[torch.Tensor]:
        """Work: for each sequence its tokens and the one after them -> [T, 2 V] of each sequence."""
        model, cache = self.model, self.cache
        batch = make_batch(cache, [(sequence, ids[:-1]) for sequence, ids in work])
        streams = model(batch, cache.layers).streams
        following = torch.tensor([token for _, ids in work for token in ids[1:]])
        rows = torch.arange(following.numel())
        drafted = mtp_logits(model, streams, following, batch, cache, rows)
        for sequence, ids in work:
            cache.advance(sequence, len(ids) - 1)
        return list(torch.cat((model.logits(streams), drafted), -1).split([len(ids) - 1 for _, ids in work]))

    def read(self, sequence: Sequence, ids: list[int], split: list[int] | None = None) -> torch.Tensor:
        """All of ids but the last, alone, in chunks of these sizes."""
        pieces = [ids[start : end + 1] for start, end in chunks(split or [], len(ids) - 1)]
        return torch.cat([self.step([(sequence, piece)])[0] for piece in pieces])


def text(model: Transformer, count: int, seed: int = 0) -> list[int]:
    """`count` tokens and the one after them."""
    return torch.randint(model.config.vocab_size, (count + 1,), generator=torch.Generator().manual_seed(seed)).tolist()


# what happens to a sequence, one entry a step: n feeds n tokens of its text; ("wrong", n) feeds n others and takes them
# back; ("other", n) feeds n others; ("over", n) puts n others in the place of its last n tokens; "save" takes a
# snapshot, "back" restores it, "move" restores it into another slot
SCRIPTS = {
    1: [1],
    3: [1, ("wrong", 2), 1, 1],
    127: [50, 6, "save", ("over", 5), ("other", 1), "back", 70, 1],
    128: [3, 1, 4, ("wrong", 5), 1, 1, 110, ("wrong", 1), 6, ("wrong", 4), 1, 1],
    129: [126, ("wrong", 5), 1, ("wrong", 3), 2],
    300: [
        90, 1, 33, "save", ("wrong", 5), ("over", 3), ("other", 3), ("wrong", 2), ("other", 140), "back", 2, 1, 1, 1,
        ("wrong", 5), 120, "save", ("other", 60), "move", 1, 1, ("wrong", 2), 49,
    ],
}  # fmt: skip
# the order of joining: 4 slots, so the last two wait for one; 129 finds the one that 127 leaves
ORDER = (300, 128, 3, 127, 1, 129)


class Scripted:
    """One sequence going through its script in a shared cache."""

    def __init__(self, runner: Runner, length: int, seed: int) -> None:
        self.cache = runner.cache
        self.ids = text(runner.model, length, seed)
        self.others = text(runner.model, 200, seed + 1000)
        self.sequence = self.cache.allocate()
        self.results: list[torch.Tensor] = []
        self.snapshot = self.cache.snapshot(self.sequence)

    def play(self, script: list) -> Iterator[list[int]]:
        """The tokens of each step; resumed after it."""
        for entry in script:
            if entry == "save":
                self.cache.drop(self.snapshot)
                self.snapshot = self.cache.snapshot(self.sequence)
            elif entry == "back":
                self.cache.restore(self.sequence, self.snapshot)
            elif entry == "move":
                old, self.sequence = self.sequence, self.cache.allocate()
                self.cache.restore(self.sequence, self.snapshot)
                self.cache.free(old)
            elif isinstance(entry, int):
                yield self.ids[self.sequence.length :][: entry + 1]
            else:
                kind, count = entry
                if kind == "over":
                    self.cache.roll_back(self.sequence, count)
                yield self.others[-count - 1 :]
                self.results.pop()
                if kind == "wrong":
                    self.cache.roll_back(self.sequence, count)
        self.cache.drop(self.snapshot)
        self.cache.free(self.sequence)


def play_all(runner: Runner) -> dict[int, torch.Tensor]:
    """All scripts at once: each step takes one entry of every sequence that has a slot."""
    waiting, active, results = list(ORDER), {}, {}
    while waiting or active:
        while waiting and runner.cache.free_slots > 1:  # one stays free for "move"
            length = waiting.pop(0)
            player = Scripted(runner, length, seed=length)
            active[length] = (player, player.play(SCRIPTS[length]))
        work = []
        for length, (player, steps) in list(active.items()):
            ids = next(steps, None)
            if ids is None:
                results[length] = torch.cat(active.pop(length)[0].results)
            else:
                work.append((player, ids))
        logits = runner.step([(player.sequence, ids) for player, ids in work]) if work else []
        for (player, _), rows in zip(work, logits, strict=True):
            player.results.append(rows)
    return results


def play_alone(model: Transformer, length: int) -> torch.Tensor:
    """The same tokens in the same chunks, nothing else."""
    runner = Runner(model)
    return runner.read(runner.cache.allocate(), text(model, length, seed=length), fed(length))


def fed(length: int) -> list[int]:
    """The chunks of a script that belong to the text."""
    return [entry for entry in SCRIPTS[length] if isinstance(entry, int)]


def test_scripts_feed_the_whole_text():
    assert {length: sum(fed(length)) for length in SCRIPTS} == {length: length for length in LENGTHS}


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def test_plain_ragged_equals_alone(plain):
    runner = Runner(plain, slots=5)
    ragged = play_all(runner)
    for length in LENGTHS:
        assert ragged[length].shape == (length, 2 * plain.config.vocab_size)
        assert apart(ragged[length], play_alone(plain, length)) < PLAIN_BOUND, length
    assert (runner.cache.used_blocks, runner.cache.free_slots) == (0, 5)


# the larger net takes twice the time, and has no kind of layer of its own
SHARE = ["tiny-flash", pytest.param("tiny-pro", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("_row_independent")
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARE)
def test_reference_ragged_equals_alone_bit_for_bit(name, monkeypatch):
    remember_weights(monkeypatch)
    model = golden(name).model
    ragged = play_all(Runner(model, slots=5))
    for length in LENGTHS:
        assert torch.equal(ragged[length], play_alone(model, length)), length


def noise(net: Golden, kind: str) -> float:
    """What summing in fp64 changes after a prompt as long as the longest text here."""
    return (net.recorded[f"p300.{kind}_alt"] - net.recorded[f"p300.{kind}"]).abs().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARE)
def test_reference_ragged_equals_alone_within_noise(name, monkeypatch):
    # the number of rows decides how a matmul rounds, and one rounding may choose another entry or expert: as large a
    # change as the official code shows when it sums in fp64, and twice that between two roundings
    remember_weights(monkeypatch)
    net = golden(name)
    ragged = play_all(Runner(net.model, slots=5))
    for length in LENGTHS:
        kinds = (ragged[length] - play_alone(net.model, length)).abs().chunk(2, -1)
        for kind, difference in zip(("logits", "mtp_logits"), kinds, strict=True):
            assert difference.mean() <= 2 * noise(net, kind), (length, kind)


def random_split(low: int, high: int) -> Callable[[int], list[int]]:
    def split(rows: int) -> list[int]:
        return torch.randint(low, high + 1, (rows // low,), generator=torch.Generator().manual_seed(low)).tolist()

    return split


SPLITS = {
    "one by one": lambda rows: [1] * 70,
    "1 to 9": random_split(1, 9),
    "20 to 140": random_split(20, 140),
    "around the window": lambda rows: [127, 1, 1, 126, 2],
    "around the room in a ring": lambda rows: [140, ROLLBACK + 1, ROLLBACK + 2, ROLLBACK + 3, ROLLBACK + 2],
    "all sizes": lambda rows: [7, 1, 33, 130, 2, 64, 3, 60],
    "prompt, then one by one": lambda rows: [131] + [1] * 30,
}


FEW = ("around the room in a ring",)


@pytest.mark.parametrize("split", slow_except(FEW, SPLITS))
def test_any_split_gives_the_same_logits(split, plain):
    ids = text(plain, 300)
    whole, cut = (Runner(plain) for _ in range(2))
    expected = whole.read(whole.cache.allocate(), ids)
    assert apart(cut.read(cut.cache.allocate(), ids, SPLITS[split](300)), expected) < PLAIN_BOUND


def read_after(plain: Transformer, before: int, count: int) -> torch.Tensor:
    """What a sequence gets in chunks of `count` and then 1 in the slot of one that had `before` tokens."""
    runner = Runner(plain)
    if before:
        sequence = runner.cache.allocate()
        runner.read(sequence, text(plain, before, seed=1))
        runner.cache.free(sequence)
    # the first entry, at the fourth token, looks back to where the predecessor's rows lie
    return runner.read(runner.cache.allocate(), text(plain, 8, seed=2), [count] + [1] * 8)


@pytest.mark.parametrize("count", [*slow(1, 2), 3])
def test_successor_in_a_slot_finds_nothing(count, plain):
    fresh = read_after(plain, 0, count)
    for before in (3, 300):
        assert torch.equal(read_after(plain, before, count), fresh), before


@pytest.mark.usefixtures("_row_independent")
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in NETS)])
def test_no_token_sees_a_later_one(name, plain, monkeypatch):
    if name in NETS:
        remember_weights(monkeypatch)
    model = golden(name).model if name in NETS else plain
    ids = text(model, 150)

    def logits(tokens: list[int]) -> tuple[torch.Tensor, ...]:
        runner = Runner(model)
        return runner.read(runner.cache.allocate(), tokens).chunk(2, -1)

    expected = logits(ids)
    for changed in (3, 128):
        other = list(ids)
        other[changed] = (ids[changed] + 1) % model.config.vocab_size
        # MTP reads one token further
        for before, after, first in zip(expected, logits(other), (changed, changed - 1), strict=True):
            assert torch.equal(before[:first], after[:first]), changed
            assert not torch.equal(before[first], after[first]), changed


def test_snapshot_restores_many_times(plain):
    cache = (runner := Runner(plain, slots=2)).cache
    ids, first = text(plain, 260), cache.allocate()
    runner.read(first, ids[:131])
    snapshot = cache.snapshot(first)
    expected = runner.read(first, ids[130:])
    runner.read(second := cache.allocate(), text(plain, 40, seed=3))
    for sequence in (first, second, first):
        cache.restore(sequence, snapshot)
        assert torch.equal(runner.read(sequence, ids[130:]), expected)
    cache.free(first)
    cache.free(second)
    assert cache.used_blocks == 2  # the snapshot's own: 130 tokens
    cache.drop(snapshot)
    assert (cache.used_blocks, cache.free_slots) == (0, 2)


def test_rollback_has_a_limit(plain):
    runner = Runner(plain)
    sequence = runner.cache.allocate()
    runner.read(sequence, text(plain, 20))
    for _ in range(2):
        runner.cache.roll_back(sequence, sequence.length - 20 + ROLLBACK)
        for tokens in (1, -1, 20):
            with pytest.raises(ValueError, match="cannot take"):
                runner.cache.roll_back(sequence, tokens)
        assert sequence.length == 20 - ROLLBACK
        runner.read(sequence, text(plain, 2))


def test_a_restored_sequence_rolls_back_no_further_than_its_rings_hold(plain):
    runner = Runner(plain, slots=2)
    cache, sequence = runner.cache, runner.cache.allocate()
    runner.read(sequence, text(plain, 20))
    cache.roll_back(sequence, 5)
    snapshot = cache.snapshot(sequence)
    for restored in (sequence, cache.allocate()):
        cache.restore(restored, snapshot)
        with pytest.raises(ValueError, match="cannot take"):
            cache.roll_back(restored, ROLLBACK - 4)
        cache.roll_back(restored, ROLLBACK - 5)
        assert restored.length == 20 - ROLLBACK


def test_after_an_interruption_the_cache_holds_what_it_is_told(plain):
    cache = (runner := Runner(plain, slots=3)).cache
    kept, lost = cache.allocate(), cache.allocate()
    runner.read(kept, text(plain, 130))
    snapshot = cache.snapshot(kept)
    for sequence in (kept, lost):
        runner.read(sequence, text(plain, 130, seed=1))
    cache.recover([kept], [snapshot])
    assert (cache.free_slots, cache.used_blocks) == (2, 3 + 1)  # 260 tokens, and the block that was copied
    cache.drop(snapshot)
    cache.free(kept)
    assert (cache.free_slots, cache.used_blocks) == (3, 0)


def test_slots_run_out(plain):
    cache = Cache(plain.config, plain.numerics, slots=2)
    first = cache.allocate()
    assert cache.allocate().slot != first.slot
    with pytest.raises(NotEnoughMemory, match="every slot"):
        cache.allocate()
    cache.free(first)
    assert cache.allocate().slot == first.slot
