"""Decoding with numbers that stay in place: what a step of one token of each sequence gives anyway."""

from itertools import count
from random import Random

import pytest
import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model import moe
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.step_sizes import DECODE_TOKENS
from dsv4cli.engine.weights.load import load_model
from tests.support import small_model

# long enough that entries of both ratios are completed and blocks are added while decoding
LENGTHS = (126, 1, 3, 250, 5)
STEPS = 3


# fp32 sums of other rows may be added up in another order, which with rounding moves a code or a choice of the indexer;
# the row of another sequence, or a wrong position, is off by 1
PLAIN, ROUNDED = 1e-4, 0.2
ON_GPU = pytest.mark.gpu


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", Numerics.plain(), PLAIN), id="cpu"),
        pytest.param(("cuda", Numerics.plain(), PLAIN), id="cuda-plain", marks=ON_GPU),
        pytest.param(("cuda", Numerics.reference(), ROUNDED), id="cuda", marks=ON_GPU),
    ],
)
def case(request):
    """A model and how far apart logits may be."""
    device, numerics, tolerance = request.param
    if device == "cpu":
        return small_model.model(), tolerance
    return load_model(resolve_model("random:tiny"), numerics, device=device), tolerance


class Side:
    """A cache, and what has become of some texts in it."""

    def __init__(self, model, slots):
        device = model.embed.weight.device
        self.model, self.cache = model, Cache(model.config, model.numerics, slots=slots, device=device)
        self.sequences = {}

    @torch.no_grad()
    def read(self, name, ids):
        """Takes a new text in."""
        sequence = self.sequences[name] = self.cache.allocate()
        self.model(make_batch(self.cache, [(sequence, ids)]), self.cache.layers)
        self.cache.advance(sequence, len(ids))

    @torch.no_grad()
    def step(self, tokens):
        """The logits after one more token of each: by the step that takes any work."""
        work = [(self.sequences[name], [token]) for name, token in tokens.items()]
        return self.model.logits(self.model(make_batch(self.cache, work), self.cache.layers).streams)

    def advance(self, tokens):
        for name in tokens:
            self.cache.advance(self.sequences[name], 1)

    def drop(self, name):
        self.cache.free(self.sequences.pop(name))


def decode(decoder, work):
    return decoder.filled(work).run().logits[: len(work)]


@torch.no_grad()
def test_it_gives_what_any_step_gives_while_sequences_come_and_go(case):
    """Sequences join and leave, so rows are padded, move, and are used again; pools grow on the way."""
    model, tolerance = case
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in LENGTHS]
    plain, ours = Side(model, len(LENGTHS)), Side(model, len(LENGTHS) + 1)
    decoder = GraphRunner(model, ours.cache, 300)
    live: set[int] = set()
    for joins, leaves in (((0,), ()), ((1, 2), ()), ((), (0,)), ((3, 4), ()), ((), (1, 4)), ((0,), (2,))):
        for name in joins:
            plain.read(name, texts[name])
            ours.read(name, texts[name])
        for name in leaves:
            plain.drop(name)
            ours.drop(name)
        live = (live | set(joins)) - set(leaves)
        for step in range(STEPS):
            tokens = {name: (31 * name + 7 * step) % 500 for name in sorted(live, reverse=len(live) % 2 == 0)}
            expected = plain.step(tokens)
            found = decode(decoder, [(ours.sequences[name], [token]) for name, token in tokens.items()])
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
            plain.advance(tokens)
            ours.advance(tokens)
    for name in list(live):
        ours.drop(name)
    # the padding has a block
    assert (ours.cache.free_slots, ours.cache.used_blocks) == (len(LENGTHS), 1)


@torch.no_grad()
def test_padding_touches_no_live_state(case):
    """Steps of many tokens complete entries, also those of rows that no sequence fills, before and after sequences
    have changed places."""
    model, _ = case
    side = Side(model, 5)
    decoder = GraphRunner(model, side.cache, 300)
    for name in range(4):
        side.read(name, list(range(5, 14 + name)))
    layer = next(layer for layer in side.cache.layers if layer.compressed and layer.index)
    pools = layer.compressed.entries, layer.index.entries
    for names in ((0, 1, 2, 3), (0, 1, 2), (2,), (3, 1, 2)):
        blocks = [side.sequences[name].blocks[0] for name in range(4)]
        # what the texts have completed: two entries each
        rows = [pool.per_block * block + entry for pool in pools[:1] for block in blocks for entry in range(2)]
        before = [pool.data[rows].clone() for pool in pools]
        decoder.filled([(side.sequences[name], [7, 8, 9]) for name in names])
        decode(decoder, [(side.sequences[name], [7, 8, 9, 10, 11]) for name in names])
        assert all(torch.equal(pool.data[rows], old) for pool, old in zip(pools, before, strict=True))


@torch.no_grad()
def test_blocks_that_others_take_are_not_read_any_more(case):
    """A sequence grows into a new block, writes beside a snapshot, and goes back to it; pools do not grow meanwhile."""
    model, tolerance = case
    generator = torch.Generator().manual_seed(1)
    ids, others = torch.randint(3, 500, (2, 133), generator=generator).tolist()
    plain, ours = Side(model, 1), Side(model, 3)
    ours.cache.provide(8)
    decoder = GraphRunner(model, ours.cache, 300)
    for side in (plain, ours):
        side.read("text", ids[:126])
    snapshot = ours.cache.snapshot(ours.sequences["text"])
    for token in others[126:]:
        decode(decoder, [(ours.sequences["text"], [token])])
        ours.advance(["text"])
    ours.cache.restore(ours.sequences["text"], snapshot)
    ours.cache.drop(snapshot)
    ours.read("other", others)  # into what has become free
    for token in ids[126:]:
        found = decode(decoder, [(ours.sequences["text"], [token])])
        torch.testing.assert_close(found, plain.step({"text": token}), rtol=0, atol=tolerance)
        plain.advance(["text"])
        ours.advance(["text"])


@pytest.mark.slow
@torch.no_grad()
def test_two_thousand_steps_leave_nothing_behind(case):
    """Sequences of random lengths join and leave; no slot, block or byte is lost."""
    model, _ = case
    slots, choice = 5, Random(0)
    side = Side(model, slots + 1)
    side.cache.provide(64)
    decoder = GraphRunner(model, side.cache, 400)
    held, names, taken = [], count(), set()
    for step in range(2000):
        if (len(side.sequences) < slots and choice.random() < 0.05) or not side.sequences:
            side.read(next(names), [choice.randrange(3, 500) for _ in range(choice.randrange(1, 200))])
        tokens = {name: choice.randrange(3, 500) for name in side.sequences}
        decode(decoder, [(side.sequences[name], [token]) for name, token in tokens.items()])
        side.advance(tokens)
        for name in [name for name in tokens if choice.random() < 0.02 or side.sequences[name].length == 400]:
            side.drop(name)
        taken.add(side.cache.used_blocks)
        if step in (999, 1999) and side.cache.device.type == "cuda":
            held.append(torch.cuda.memory_allocated())
    assert max(taken) > 3 * slots // 2
    for name in list(side.sequences):
        side.drop(name)
    assert (side.cache.free_slots, side.cache.used_blocks, side.cache.blocks) == (slots, 1, 64)
    assert len(set(held)) <= 1


@torch.no_grad()
def test_rows_behind_a_sequence_count_as_written(case):
    """A step of five tokens has six rows: what the sixth has overwritten cannot be gone back to."""
    model, _ = case
    side = Side(model, 2)
    side.read("text", list(range(5, 145)))
    sequence = side.sequences["text"]
    decode(GraphRunner(model, side.cache, 300), [(sequence, [3, 4, 5, 6, 7])])
    side.cache.advance(sequence, 5)
    assert (sequence.length, sequence.high) == (145, 146)
    with pytest.raises(ValueError, match="cannot take 8 tokens back"):
        side.cache.roll_back(sequence, 8)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [128, 256])
def test_drafts_behind_the_longest_sequence_have_blocks(case, tokens):
    """Also where a sequence becomes longer than the steps were prepared for."""
    model, tolerance = case
    side, drafts = Side(model, 3), [7, 8, 9, 10]
    side.read("text", [number % 500 + 3 for number in range(tokens - 1)])
    decoder = GraphRunner(model, side.cache, 5)
    side.read("short", [3, 4])
    decode(decoder, [(side.sequences["short"], drafts)])  # prepared for one block
    decoder.lengthen(tokens)
    found = decode(decoder, [(side.sequences["text"], drafts)])
    batch = make_batch(side.cache, [(side.sequences["text"], drafts)])
    expected = model.logits(model(batch, side.cache.layers).streams)
    torch.testing.assert_close(found, expected[:1], rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    ("counts", "routed"),
    [
        ([1, 1, 1], [0, 1, 2, 0]),
        ([1, 1], [0, 1]),
        ([3, 1], [0, 1, 2, 3, 3, 3]),
        ([2, 1, 2], [0, 1, 2, 2, 4, 5, 0, 1]),
        ([5], [0, 1, 2, 3, 4, 4]),
    ],
    ids=str,
)
def test_rows_that_mean_nothing_ask_for_no_expert_of_their_own(counts, routed, case, monkeypatch):
    model, _ = case
    if model.embed.weight.is_cuda:
        pytest.skip("a capture on a GPU cannot be asked what was chosen")
    side = Side(model, len(counts) + 1)
    decoder, chosen = GraphRunner(model, side.cache, 300), []
    compute = moe.experts.mixture
    monkeypatch.setattr(moe.experts, "mixture", lambda *given: chosen.append(given[3].cpu()) or compute(*given))
    for number in range(len(counts)):
        side.read(number, [5 + number, 9])
    chosen.clear()
    for given in (counts, counts[:-1] or counts):  # one ends
        work = [(side.sequences[number], [20 + 3 * number] * count) for number, count in enumerate(given)]
        decoder.filled(work).run()
        assert chosen
        if given == counts:
            assert all(torch.equal(own, own[routed]) for own in chosen)
        assert all({*own.flatten().tolist()} == real(own, given) for own in chosen)
        chosen.clear()


def real(chosen, counts):
    """The experts of the tokens of sequences, each of which has as many rows."""
    rows = next(rows for rows in DECODE_TOKENS if rows >= max(counts))
    return {*torch.cat([chosen[rows * one :][:count] for one, count in enumerate(counts)]).flatten().tolist()}
