"""A row gets the same bits in a step of any number of rows, whatever the others are, on a CPU: what makes decoding with
drafts equal to decoding without."""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache

import pytest
import torch

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import build_random, load_model
from tests.support.cache_state import same, state
from tests.support.drafting import mtp_logits
from tests.support.golden_data import NETS, golden, remember_weights
from tests.support.slow import slow_rows

DSPARK = TINY | {
    "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 300,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32,
}
# widths that leave a rest in a vector of 8 or 16 values
ODD = {"hidden_size": 96, "head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 40, "o_lora_rank": 36}
ODD |= {"index_head_dim": 32, "index_topk": 8, "moe_intermediate_size": 32, "swiglu_limit": 0.5, "vocab_size": 133}
REFERENCE, FP32, BF16 = Numerics.reference(), Numerics.plain(), Numerics.plain(torch.bfloat16)
ROWS = ROLLBACK + 1
# what a sequence holds before the step: around the ends of the window, of its ring, of entries and of their blocks
LENGTHS = (1, 3, *range(126, 131), 135, *range(254, 258), *range(383, 386), *range(511, 514))


@cache
def net(name: str, numerics: Numerics) -> Transformer:
    """A recorded net, one of random weights with MTP or DSpark, one of odd widths, or nano."""
    if name in NETS and numerics == REFERENCE:
        return golden(name).model
    if name in ("dspark", "odd"):
        values = DSPARK if name == "dspark" else TINY | ODD
        return build_random(parse_config(values, "test"), numerics)
    return load_model(resolve_model("random:tiny" if name == "tiny" else name), numerics)


def text(model: Transformer, count: int, seed: int = 0) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def step(model: Transformer, cache: Cache, work: list[tuple[Sequence, list[int]]]) -> list[list[torch.Tensor]]:
    """Work: of each sequence its tokens and the one after them. Streams, logits and what the drafter sees, of each."""
    batch = make_batch(cache, [(sequence, ids[:-1]) for sequence, ids in work])
    hidden = model(batch, cache.layers)
    seen = [hidden.streams, model.logits(hidden.streams)]
    if model.config.drafter == "mtp":
        following = torch.tensor([token for _, ids in work for token in ids[1:]])
        seen.append(mtp_logits(model, hidden.streams, following, batch, cache, torch.arange(len(following))))
    elif model.config.drafter == "dspark":
        model.mtp.absorb(hidden.context, batch, cache.layers)
        seen.append(hidden.context)
    counts = [len(ids) - 1 for _, ids in work]
    for (sequence, _), count in zip(work, counts, strict=True):
        cache.advance(sequence, count)
    return [list(parts) for parts in zip(*(tensor.split(counts) for tensor in seen), strict=True)]


class Alone:
    """One sequence whose last rows were read one by one: what each gave, and the state after each."""

    def __init__(self, model: Transformer, length: int, rows: int, seed: int = 0) -> None:
        self.model, self.length, self.ids = model, length, text(model, length + rows + 1, seed)
        self.before = Cache(model.config, model.numerics)
        self.sequence = self.before.allocate()
        step(model, self.before, [(self.sequence, self.ids[: length + 1])])
        cache, sequence = deepcopy((self.before, self.sequence))
        given, self.states = [], []
        for place in range(length, length + rows):
            given.append(step(model, cache, [(sequence, self.ids[place : place + 2])])[0])
            self.states.append([tensor.clone() for tensor in state(cache, sequence)])
        self.given = [torch.cat(parts) for parts in zip(*given, strict=True)]

    def differs(self, rows: int, given: list[torch.Tensor], held: list[torch.Tensor]) -> list[str]:
        """What is not as it is alone, of a step of so many rows."""
        names = ("streams", "logits", "drafter")
        found = [name for name, one, other in zip(names, given, self.given, strict=True) if not same(one, other[:rows])]
        states = zip(held, self.states[rows - 1], strict=True)
        return found + [f"state {number}" for number, (one, other) in enumerate(states) if not same(one, other)]


def difference(model: Transformer, length: int, counts: Iterable[int]) -> dict[int, list[str]]:
    """By the number of rows of a step what differs from steps of one row."""
    alone = Alone(model, length, max(counts))
    found = {}
    for rows in counts:
        cache, sequence = deepcopy((alone.before, alone.sequence))
        (given,) = step(model, cache, [(sequence, alone.ids[length : length + rows + 1])])
        found[rows] = alone.differs(rows, given, list(state(cache, sequence)))
    return {rows: names for rows, names in found.items() if names}


def ragged(model: Transformer, alone: dict[int, Alone], counts: Iterable[int]) -> list[str]:
    """Sequences of several lengths in one step, each with its number of rows: what is not as it is alone."""
    cache = Cache(model.config, model.numerics, slots=len(alone))
    sequences = [cache.allocate() for _ in alone]
    for sequence, one in zip(sequences, alone.values(), strict=True):
        step(model, cache, [(sequence, one.ids[: one.length + 1])])
    parts = list(zip(sequences, alone.values(), counts, strict=True))
    given = step(model, cache, [(sequence, one.ids[one.length :][: rows + 1]) for sequence, one, rows in parts])
    return [
        f"{one.length}: {name}"
        for (sequence, one, rows), seen in zip(parts, given, strict=True)
        for name in one.differs(rows, seen, list(state(cache, sequence)))
    ]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def _threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


# the official roundings, and plain fp32, where no rounding hides another order of a sum
QUICK = [*slow_rows(("tiny-flash", REFERENCE, 254)), ("dspark", FP32, 126), *slow_rows(("nano", FP32, 3))]
CASES = [(name, REFERENCE, LENGTHS) for name in NETS]
CASES += [(name, numerics, LENGTHS) for name in ("tiny", "dspark", "nano") for numerics in (REFERENCE, FP32, BF16)]
CASES += [("odd", numerics, LENGTHS) for numerics in (FP32, BF16)]
RAGGED = [(4, 9, 1, 6, 2, 9, 3), (1, 1, 1, 1, 1, 1, 1), (9, 9, 9, 9, 9, 9, 9)]
SEQUENCES = (129, 3, 255, 1, 511, 127, 384)


@pytest.mark.parametrize(("name", "numerics", "length"), QUICK)
def test_a_step_of_several_rows_is_several_steps_of_one(name, numerics, length, monkeypatch):
    remember_weights(monkeypatch)
    assert difference(net(name, numerics), length, (2, ROWS)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("name", "numerics", "lengths"), CASES)
def test_steps_of_all_numbers_of_rows_at_all_borders(name, numerics, lengths, monkeypatch):
    remember_weights(monkeypatch)
    model = net(name, numerics)
    found = {length: difference(model, length, range(2, ROWS + 1)) for length in lengths}
    assert {length: rows for length, rows in found.items() if rows} == {}


@pytest.mark.slow  # test_ragged.py compares sequences in one step with each alone
@pytest.mark.parametrize("name", ["dspark"])
def test_two_sequences_do_not_see_each_other(name, monkeypatch):
    remember_weights(monkeypatch)
    model = net(name, FP32)
    assert ragged(model, {length: Alone(model, length, 4, seed=length) for length in (3, 127)}, (4, 2)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("name", "numerics"), [case[:2] for case in CASES])
def test_sequences_in_one_step_do_not_see_each_other(name, numerics, monkeypatch):
    remember_weights(monkeypatch)
    model = net(name, numerics)
    alone = {length: Alone(model, length, ROWS, seed=length) for length in SEQUENCES}
    for counts in RAGGED:
        assert ragged(model, alone, counts) == [], counts
