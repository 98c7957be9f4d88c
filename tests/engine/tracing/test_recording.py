"""What is recorded is what the model computes, wherever its rows come from; and nothing is left behind."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Drafting
from dsv4cli.engine.tracing.compare import differences
from dsv4cli.engine.tracing.feed import RecordedStreams
from dsv4cli.engine.tracing.judge import load_noise
from dsv4cli.engine.tracing.manifest import Text, TraceManifest, check_same_tokens, read_manifest
from dsv4cli.engine.tracing.observer import Watched
from dsv4cli.engine.tracing.passes import Pass, Plan
from dsv4cli.engine.tracing.record import manifest_of as record_manifest
from dsv4cli.engine.tracing.record import walked
from dsv4cli.engine.tracing.recording import RecordedFolder, Writer, file_of, make_folder
from dsv4cli.engine.tracing.stages import BY_NAME, parse_groups
from dsv4cli.engine.tracing.walk import Company, Walk
from dsv4cli.engine.weights.load import load_model
from dsv4cli.errors import UsageError
from tests.support import small_model, tracing

TEXTS = [tracing.text(22), Text(tuple(range(40, 55)), 13)]
# of its three layers
CSA, LAST = 1, 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two texts, in one step each and then token by token."""
    return record(Walk(small_model.model(), tracing.CPU), tmp_path_factory.mktemp("whole") / "whole")


def manifest_of(texts):
    config = small_model.model().config
    return TraceManifest(
        "small",
        tuple(texts),
        (0, LAST),
        LAST,
        tuple(config.layer_ratios),
        config.hidden_size,
        config.hc_mult,
        "float32",
        False,
    )


def record(walk, folder, texts=TEXTS, **changes):
    [recording] = tracing.recorded(walk, Plan(replace(manifest_of(texts), **changes), (Pass(folder),)))
    return recording


def everything(recording):
    """Every stage of every layer."""
    per = {(layer, stage): BY_NAME[stage].per for layer in recording.layers() for stage in recording.stages(layer)}
    return {
        (layer, stage): recording.rows(layer, stage, 0, recording.manifest.rows(kind, layer))
        for (layer, stage), kind in per.items()
    }


def same(one, other):
    """Equal in every bit."""
    left, right = everything(one), everything(other)
    assert left.keys() == right.keys()
    assert [place for place in left if not torch.equal(left[place], right[place])] == []


def test_streams_and_logits_are_those_of_the_model(whole):
    model, text = small_model.model(), TEXTS[1]
    cache = Cache(model.config, model.numerics)
    sequence, start = cache.allocate(), len(TEXTS[0].ids)
    batch = make_batch(cache, [(sequence, text.ids[: text.prompt])])
    hidden = model(batch, cache.layers)
    last = model.config.num_hidden_layers
    assert torch.equal(whole.rows(last, "streams", start, start + text.prompt), hidden.streams)
    row = TEXTS[0].logits
    assert torch.equal(whole.rows(last, "logits", row, row + 1), model.logits(hidden.streams[-1:]))
    entries = cache.layers[CSA].compressed.entries.data[batch.entries[4].table[0, :3]]
    first = len(TEXTS[0].ids) // 4
    assert torch.equal(whole.rows(CSA, "attn.entries", first, first + 3), entries)


def test_every_stage_is_there(whole):
    assert {stage for layer in whole.layers() for stage in whole.stages(layer)} == BY_NAME.keys()
    chosen = whole.rows(CSA, "indexer.chosen", 0, 24)
    counts = (chosen >= 0).sum(1)
    assert counts.tolist() == [(position + 1) // 4 for position in range(24)]
    assert [row[row >= 0].tolist() for row in chosen] == [list(range(count)) for count in counts]
    experts = whole.rows(1, "gate.chosen", 0, 24)
    assert (experts[:, 1:] > experts[:, :-1]).all()
    weights = whole.rows(1, "gate.weights", 0, 24)
    torch.testing.assert_close(weights.sum(1), torch.full((24,), 1.5))


@pytest.mark.parametrize(
    "company",
    [
        pytest.param(Company(before=[tracing.text(30)]), id="in a used slot", marks=pytest.mark.slow),
        pytest.param(Company(beside=[tracing.text(9, 3), tracing.text(31, 3)]), id="beside others"),
    ],
)
def test_the_same_rows_in_company(whole, company, tmp_path):
    same(whole, record(Walk(small_model.model(), tracing.CPU, company=company), tmp_path / "other"))


def test_chunks_differ_by_rounding_alone(whole, tmp_path):
    # a prompt's first step sums in an order of its own (docs/reference/exactness.md)
    chunks = record(Walk(small_model.model(), tracing.CPU, chunk=5), tmp_path / "other")
    assert max(one.relative for one in differences(whole, chunks, fed=False)) < 1e-6


@pytest.mark.slow
def test_drafts_leave_no_trace(tmp_path):
    nano, texts = resolve_model("nano"), [tracing.text(22, 12)]
    plan = Plan(record_manifest(nano, Numerics.reference(), texts), (Pass(tmp_path / "one"),))
    model = load_model(nano, Numerics.reference())
    [one] = tracing.recorded(Walk(model, tracing.CPU), plan)
    drafted = Plan(plan.manifest, (Pass(tmp_path / "other"),))
    [other] = tracing.recorded(Walk(model, tracing.CPU, drafting=Drafting(3, always=True)), drafted)
    same(one, other)


def test_drawn_tokens_are_written_down(tmp_path):
    texts = [Text((*TEXTS[1].ids[:13], -1, -1), 13)]
    drawn = record(Walk(small_model.model(), tracing.CPU), tmp_path / "drawn", texts)
    ids = drawn.manifest.texts[0].ids
    assert ids[:13] == TEXTS[1].ids[:13]
    assert min(ids) >= 0
    logits = drawn.rows(LAST, "logits", 0, 3)
    assert logits.argmax(1)[:2].tolist() == list(ids[13:])
    same(drawn, record(Walk(small_model.model(), tracing.CPU), tmp_path / "given", drawn.manifest.texts))


def test_a_part_of_the_layers_and_stages(whole, tmp_path):
    part = record(Walk(small_model.model(), tracing.CPU), tmp_path / "part", layers=(1, 2), what=("router", "block"))
    found = everything(part)
    assert part.layers() == [1, 2]
    assert part.stages(1) == ["streams", "ffn.streams", "gate.chosen", "gate.weights"]
    assert part.stages(2) == ["streams"]
    every = everything(whole)
    assert all(torch.equal(rows, every[place]) for place, rows in found.items())


def test_ranks_are_joined(whole, tmp_path):
    plan, rows = Plan(replace(whole.manifest, ranks=2), (Pass(tmp_path / "ranks"),)), everything(whole)
    make_folder(tmp_path / "ranks")
    for rank in range(2):
        writer = Writer(tmp_path / "ranks", plan.manifest, rank)
        for layer in whole.layers():
            for stage in whole.stages(layer):
                if writer.wants(layer, stage):
                    own = rows[layer, stage]
                    writer.take(layer, stage, 0, own.chunk(2, 1)[rank] if BY_NAME[stage].split else own)
            writer.end_layer(layer)
    same(whole, plan.finish(plan.manifest)[0])
    assert RecordedFolder(tmp_path / "ranks").stages(CSA) == whole.stages(CSA)


def test_a_model_is_left_as_it_was(tmp_path):
    model = small_model.model()
    names = {module: {*vars(module)} for module in model.modules()}
    record(Walk(model, tracing.CPU), tmp_path / "one", [Text((5, 6), 1)])
    assert {module: {*vars(module)} for module in model.modules()} == names
    hooks = [module._forward_hooks | module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


def test_a_wrong_draft_keeps_its_own_streams(whole):
    feed, ids = RecordedStreams(whole), torch.tensor([*TEXTS[0].ids[10:12], 1])
    own = torch.zeros(5, 4, 64)
    streams = feed.streams(2, "streams", own, Watched(1, 3, 10, 0, 0, ids))
    assert torch.equal(streams[1:3], whole.rows(2, "streams", 10, 12))
    assert not streams[[0, 3, 4]].any()


def test_tokens_that_are_not_known_yet_are_fed(whole):
    manifest = replace(whole.manifest, texts=(Text((*TEXTS[0].ids[:22], -1, -1), 22), TEXTS[1]))
    feed = RecordedStreams(RecordedFolder(whole.folder, manifest))
    streams = feed.streams(2, "streams", torch.zeros(1, 4, 64), Watched(0, 1, 23, 0, 0, torch.tensor([7])))
    assert torch.equal(streams, whole.rows(2, "streams", 23, 24))


def test_no_more_than_one_layer_is_held(whole, tmp_path, monkeypatch):
    held, most = [], []
    take, end = Writer.take, Writer.end_layer
    monkeypatch.setattr(Writer, "take", lambda self, layer, *rest: (held.append(layer), take(self, layer, *rest))[1])
    monkeypatch.setattr(
        Writer, "end_layer", lambda self, layer: (most.append({*held}), held.clear(), end(self, layer))[2]
    )
    record(Walk(small_model.model(), tracing.CPU), tmp_path / "other")
    assert max(map(len, most)) == 1


def test_an_unfinished_recording_is_refused(tmp_path):
    walked(Walk(small_model.model(), tracing.CPU), Plan(manifest_of(TEXTS), (Pass(tmp_path / "one"),)))
    with pytest.raises(UsageError, match="has no complete recording"):
        RecordedFolder(tmp_path / "one")


@pytest.mark.parametrize(
    ("damage", "complaint"), [(Path.unlink, "is missing"), (lambda path: os.truncate(path, 9), "has changed")]
)
def test_a_recording_that_has_lost_something_is_refused(whole, tmp_path, damage, complaint):
    copy = shutil.copytree(whole.folder, tmp_path / "copy")
    assert RecordedFolder(copy).layers() == whole.layers()
    damage(file_of(copy, 1, 0))
    with pytest.raises(UsageError, match=complaint):
        RecordedFolder(copy)
    # the same tokens can be recorded again
    assert read_manifest(copy) == whole.manifest


@pytest.mark.parametrize("tensors", [{"streams": torch.zeros(1)}, {"0/streams/other": torch.zeros(1)}, None])
def test_noise_that_is_damaged_is_refused(tmp_path, tensors):
    path = tmp_path / "noise.safetensors"
    path.write_bytes(b"x" * 20) if tensors is None else save_file(tensors, path)
    with pytest.raises(UsageError, match=r"noise\.safetensors is damaged"):
        load_noise(tmp_path, fed=False)


def test_a_manifest_comes_back(whole):
    assert read_manifest(whole.folder) == whole.manifest


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"schema": "dsv4.trace/9"}', "no json", pytest.param("[" * 10**5, id="deep")]
)
def test_another_manifest_is_refused(content, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match="not written by this version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ([Text((1, 2, 3), 2), Text((1,), 1)], "1 texts, B 2"),
        ([Text((1, 9, 3), 2)], "token 2 and 9 at position 1"),
        ([Text((1, 2), 2)], "3 and 2 tokens, with 2 and 2 prompt tokens"),
        ([Text((1, 2, 3), 3)], "3 and 3 tokens, with 2 and 3 prompt tokens"),
    ],
)
def test_other_tokens_are_refused(other, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_same_tokens([Text((1, 2, 3), 2)], other, ("A", "B"))


def test_groups():
    assert parse_groups("ffn, block") == ("block", "ffn")
    with pytest.raises(UsageError, match="'blocks' is not a group"):
        parse_groups("blocks")
