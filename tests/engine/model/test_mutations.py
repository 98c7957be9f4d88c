"""Mistakes put into the engine on purpose, each of which a comparison catches.

Mistakes in what is computed show against transformers, some of them only in chunks; mistakes in how it is rounded show
against the blocks recorded from the official code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.model import attention as engine_attention
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime import batch_builder as prepare
from dsv4cli.engine.runtime.state import cache as engine_cache
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels.attention import ref as attention
from dsv4cli.kernels.block_scale import ref as block_scale
from dsv4cli.kernels.compressor import ref as compressor
from dsv4cli.kernels.experts import ref as experts_ref
from dsv4cli.kernels.formats import E2M1_VALUES
from dsv4cli.kernels.gemm import ref as gemm
from dsv4cli.kernels.hyper_connections import ref as hyper
from dsv4cli.kernels.indexer import ref as indexer
from dsv4cli.kernels.qk_norm_rope import ref as keys
from dsv4cli.kernels.rope import ref as rope
from dsv4cli.kernels.routing import ref as routing
from dsv4cli.kernels.step_metadata import ref as step_metadata
from tests.support import oracle
from tests.support.golden_data import FOLDER, Golden, golden, run_blocks, topk_entries

# ends at every token of a group of 4; 13 is more than a ring's spare rows, or writing it before reading were no mistake
CHUNKS = [131, *[13] * 12, 12, 1]
# a hundred times what the right engine is allowed; the mildest mistake moves the logits by 0.09
VISIBLE = 100 * oracle.TOLERANCE
# the recording that the rounding mistakes are held against
NET, PROMPT = "tiny-flash", 133
# relative L2 of the worst block: 1e-5 where sums round as in the recording, up to 1.2e-3 where linears add in another
# order (a flipped code or expert in one row), 6e-3 for the mildest mistake
BLOCK_VISIBLE = 2.5e-3


@dataclass(frozen=True)
class Mutation:
    """What stands in the place of owner.name, made from the right one, and where the mistake shows."""

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    in_prefill: bool = True
    in_chunks: bool = True

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.owner, self.name, self.wrong(getattr(self.owner, self.name, None)), raising=False)


def changed_step(change):
    """What a step knows of compressed entries, with the fields that change(entries, frequencies, positions, ratio)
    gives."""

    def wrong(right):
        def entries_of(chunks, layout, tokens, frequencies, ratio):
            entries = right(chunks, layout, tokens, frequencies, ratio)
            return replace(entries, **change(entries, frequencies, tokens.positions, ratio))

        return entries_of

    return Mutation(step_metadata, "entries_of", wrong)


def rotated_at(position):
    """Entries rotated at position(number of the group, ratio); of one sequence."""

    def change(entries, frequencies, positions, ratio):
        groups = int(positions[0]) // ratio + torch.arange(len(entries.cells))
        return {"rotation": step_metadata.rotation(position(groups, ratio), frequencies)}

    return changed_step(change)


def seen(visible):
    """Tokens see visible(their positions, ratio) entries."""
    return changed_step(lambda _, __, positions, ratio: {"visible": visible(positions, ratio)})


def no_yarn(right):
    return lambda config, ratio: right(replace(config, rope_theta=config.compress_rope_theta) if ratio else config, 0)


def halves_swapped(right):
    return lambda rows, halves: right(rows.roll(rows.shape[-1] // 2, -1) if halves == 2 else rows, halves)


def overlap_dropped(right):
    def compress_both(compressors, rows, batch, states):
        start = int(batch.positions[0]) // 4 * 4
        for state in states:  # forget the group before the open one
            state.score.data[:, torch.arange(start - 4, start) % state.score.capacity] = float("-inf")
        right(compressors, rows, batch, states)

    return compress_both


def written_before_read(right):
    def forward(self, x, batch, cache):
        self.prepare(x.new_empty(len(x), 0, self.config.head_dim), self.wkv(x), batch, cache.window)
        return right(self, x, batch, cache)

    return forward


def window_one_short(right):
    def index(chunks, layout, tokens):
        rows = right(chunks, layout, tokens)
        rows[tokens.positions >= layout.window - 1, 0] = -1
        return rows

    return index


def always_in_rings(right):
    return lambda cache, numbers, extent: right(cache, numbers, replace(extent, longest=1))


def sink_ignored(right):
    return lambda q, window, entries, index, sink, *rest: right(q, window, entries, index, sink - float("inf"), *rest)


def relu_after_sum(_):
    dots = "thd,ted,th->te"
    return lambda queries, keys, entries: torch.einsum(
        dots, queries.q, keys.keys[entries.table[entries.sequence]], queries.weights * queries.weight_scale
    ).relu()


def sinkhorn_without_eps(_):
    def sinkhorn(logits, iterations, eps):
        comb = logits.softmax(-1)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb

    return sinkhorn


NO_EPS = Mutation(hyper, "sinkhorn", sinkhorn_without_eps)
MUTATIONS = {
    "entries rotated at g": rotated_at(lambda group, ratio: group),
    "entries rotated at the group's last token": rotated_at(lambda group, ratio: group * ratio + ratio - 1),
    "compressed theta in SWA layers": Mutation(
        engine_cache, "frequencies", lambda right: lambda config, _: right(config, 4)
    ),
    "no YaRN": Mutation(engine_cache, "frequencies", no_yarn),
    "visibility per call": seen(lambda positions, ratio: ((positions[-1] + 1) // ratio).expand_as(positions)),
    "own completed group hidden": seen(lambda positions, ratio: positions // ratio),
    "open group visible": seen(lambda positions, ratio: positions // ratio + 1),
    "overlap halves swapped": Mutation(compressor, "_halves", halves_swapped),
    "ape missing": Mutation(
        compressor, "_pooled", lambda right: lambda own, plan, kept: right(replace(own, ape=0 * own.ape), plan, kept)
    ),
    "overlap dropped at chunk borders": Mutation(engine_attention, "compress_both", overlap_dropped, in_prefill=False),
    "ring written before read": Mutation(Attention, "forward", written_before_read, in_prefill=False),
    "long chunks read in the rings": Mutation(prepare, "batch_of", always_in_rings),
    "window one short": Mutation(step_metadata, "window_index", window_one_short),
    "HC matrix transposed": Mutation(
        hyper, "connect_post", lambda right: lambda x, streams, post, comb: right(x, streams, post, comb.mT)
    ),
    "3 Sinkhorn iterations": Mutation(hyper, "sinkhorn", lambda right: lambda logits, _, eps: right(logits, 3, eps)),
    "Sinkhorn without eps": NO_EPS,
    "route scale missing": Mutation(routing, "weigh", lambda right: lambda score, chosen, _: right(score, chosen, 1.0)),
    "bias leaks into weights": Mutation(
        routing, "choose", lambda right: lambda score, bias, k: right(score.add_(bias), 0 * bias, k)
    ),
    "shared expert unclamped": Mutation(
        experts_ref,
        "_shared",
        lambda right: lambda x, given, weights, limit, inner: right(x, given, weights, 0.0, inner),
    ),
    "gate clamped below": Mutation(
        experts_ref, "gated", lambda right: lambda gate, up, limit: right(gate.clamp_min(-limit), up, limit)
    ),
    "up clamped only above": Mutation(
        experts_ref, "gated", lambda _: lambda gate, up, limit: F.silu(gate.clamp(max=limit)) * up.clamp(max=limit)
    ),
    # only un-rotating takes a conjugate
    "no inverse rope": Mutation(rope, "rotate", lambda right: lambda x, turn: x if turn.is_conj() else right(x, turn)),
    "sink ignored": Mutation(attention, "sparse_attention", sink_ignored),
    "no q-head norm": Mutation(keys, "head_norm", lambda _: lambda q, eps: q),
    "relu after head sum": Mutation(indexer, "index_scores", relu_after_sum),
}
# one rounding; the rest is slow
ALWAYS = {"keys not rounded"}


def named(mutations):
    return [
        pytest.param(mutation, id=name, marks=() if name in ALWAYS else pytest.mark.slow)
        for name, mutation in mutations.items()
    ]


@pytest.fixture(scope="module")
def distance_of():
    """distance_of(chunks): from the engine as it now is to transformers."""
    model, ids = oracle.engine_model(0), oracle.random_ids(0)
    expected = oracle.transformers_logits(model, ids)
    return lambda chunks: oracle.distance(oracle.logits_in_chunks(model, ids, chunks), expected)


@pytest.mark.slow  # test_oracle.py has other chunks by default
@pytest.mark.parametrize("chunks", [[oracle.TOKENS], CHUNKS], ids=["prefill", "chunks"])
def test_nothing_put_in(distance_of, chunks):
    assert distance_of(chunks) < oracle.TOLERANCE


@pytest.mark.parametrize("mutation", named(MUTATIONS))
def test_shows_against_transformers(distance_of, monkeypatch, mutation):
    mutation.put_in(monkeypatch)
    for chunks, shows in (([oracle.TOKENS], mutation.in_prefill), (CHUNKS, mutation.in_chunks)):
        distance = distance_of(chunks)
        assert distance > VISIBLE if shows else distance < oracle.TOLERANCE


def test_sinkhorn_without_eps_shows_in_six_digits(monkeypatch):
    logits = [[1, -1, 0.5, 0], [2, 0, -2, 1], [-0.5, 0.25, 0.75, -1], [0, 3, -3, 1]]
    expected = [  # of the official function
        [0.336752, 0.039413, 0.370319, 0.253515],
        [0.525466, 0.061500, 0.017451, 0.395583],
        [0.096153, 0.176032, 0.608470, 0.119344],
        [0.041628, 0.723054, 0.003759, 0.231557],
    ]

    def error() -> float:
        comb = hyper.sinkhorn(torch.tensor([logits], dtype=torch.float64), 20, 1e-6)
        return float((comb[0] - torch.tensor(expected, dtype=torch.float64)).abs().max())

    assert error() < 0.51e-6  # the digits end there
    NO_EPS.put_in(monkeypatch)
    assert error() > 1.5e-6


def high_nibble_first(right):
    return lambda packed: right(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def weight_after_w2(right):
    return lambda x, weights, expert, factors, limit, rounded: (
        factors * right(x, weights, expert, torch.ones_like(factors), limit, rounded)
    )


def no_rounding_before_w2(right):
    return lambda x, weights, expert, factors, limit, rounded: right(x, weights, expert, factors, limit, False)


def ties_to_lower_code(_):
    grid = torch.tensor(E2M1_VALUES[:8])
    return lambda x: torch.copysign(grid[(x.abs()[..., None] - grid).abs().argmin(-1)], x)


def hadamard_of_queries_only(right):
    # queries have heads, keys have none
    return lambda x: right(x) if x.dim() == 3 else x


ROUNDING_MUTATIONS = {
    "nibbles swapped": Mutation(block_scale, "unpack_e2m1", high_nibble_first),
    "scale rounded to nearest": Mutation(block_scale, "power_of_two_ceil", lambda right: lambda x: right(x / 2**0.5)),
    "input of linears not rounded": Mutation(gemm, "rounded_linear", lambda _: gemm.linear),
    "keys not rounded": Mutation(keys, "rounded", lambda _: lambda kv, turned: kv),
    "Hadamard of queries only": Mutation(block_scale, "hadamard", hadamard_of_queries_only),
    "no FP4 in the indexer": Mutation(keys, "fp4_round", lambda _: lambda x, block: x),
    "routing weight after w2": Mutation(experts_ref, "_expert", weight_after_w2),
    "input of w2 not rounded": Mutation(experts_ref, "_expert", no_rounding_before_w2),
    "e2m1 ties to the lower code": Mutation(block_scale, "round_e2m1", ties_to_lower_code),
}


@pytest.fixture
def recording(monkeypatch):
    """The golden net, loaded before a mistake is put in: other tests share it."""
    monkeypatch.setattr(indexer, "top_entries", topk_entries)
    return golden(NET)


@oracle.one_thread()
def worst_block(recording: Golden) -> float:
    """The largest relative L2 of a block of the engine as it now is, each fed with the recorded streams."""
    # loaded anew: some parts of a model keep the functions that they were built with
    net = replace(recording, model=load_model(FolderSource(NET, FOLDER / NET), Numerics.reference()))
    outputs = zip(run_blocks(net, PROMPT, [PROMPT]), net.outputs(PROMPT), strict=True)
    return max(float((ours.float() - theirs.float()).norm() / theirs.float().norm()) for (ours,), theirs in outputs)


@pytest.mark.slow  # test_golden.py compares the same blocks by default
def test_no_wrong_rounding_put_in(recording):
    assert worst_block(recording) < BLOCK_VISIBLE


@pytest.mark.parametrize("mutation", named(ROUNDING_MUTATIONS))
def test_shows_against_recorded_blocks(recording, monkeypatch, mutation):
    mutation.put_in(monkeypatch)
    assert worst_block(recording) > BLOCK_VISIBLE
